"""Whether a model's files are still those that it was loaded from."""
