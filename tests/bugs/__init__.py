"""Bugs to plant: what one reads, and which piece of the code it replaces."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """Replaces the piece of code `old` by the mistake `new`, in one function of one file.

    Both are Python: an expression, or statements. They are compared as syntax trees, so layout,
    parentheses and comments do not count; `...` stands for anything (within a list, for any number
    of elements), and in `new` for what it stood for in `old`. An empty `new` removes the piece.
    `where` is `Class.method`, or empty for the whole file. See tests/bugs/planting.py.
    """

    name: str
    path: str
    where: str
    old: str
    new: str
