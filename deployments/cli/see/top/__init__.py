"""`arbiter top`: `watch` follows the front, `rows` has the text, `screen` is that of textual."""
