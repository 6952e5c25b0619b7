"""Fixtures of tests.support.command_line."""

from tests.support.command_line import front, owner, run

__all__ = ["front", "owner", "run"]
