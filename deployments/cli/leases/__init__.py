"""Device memory for a person or a program that is not a model."""
