"""What every capability replica shares: a model's life, its uses, its files and its prefixes."""
