"""Commands as a person runs them, most of them in processes of their own; fixtures of
tests.support.command_line."""

from tests.support.command_line import front, owner, run

__all__ = ["front", "owner", "run"]
