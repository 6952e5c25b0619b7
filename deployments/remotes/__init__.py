"""Remotes: OpenAI-compatible endpoints of the operator's table, as further homes of models (J5)."""
