"""Bugs to plant: what one reads, and by which a test must notice it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """`old` stands once in the file at `path`; `new` is the mistake."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = ()  # unit tests that should catch it; none named: those of the core
