"""Stable prefixes of a model: which are known, and which are warmed while it is idle."""
