"""The configuration: schema, checks, and what it makes of a model (its load plan)."""
