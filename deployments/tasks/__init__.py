"""Tasks: a name with a ladder of models that can do it (J5)."""
