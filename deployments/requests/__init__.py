"""What the front and the engines both read of a request: fields, forms, pictures, prefixes."""
