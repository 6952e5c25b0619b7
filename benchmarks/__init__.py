"""Each module prints a ratio against what a user would pick instead, and writes it as JSON."""
