"""The files of the repository and their syntax trees, each read and parsed once.

A rule over all files is one test, because each of thousands of tests takes pytest milliseconds.
"""

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parents[2]


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of its tree, as `ast.walk` finds them."""
    return tuple(ast.walk(tree_of(path)))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def broken_in(paths: Iterable[Path], problems: Callable[[Path], T]) -> dict[str, T]:
    """By file, what a rule finds in it; only of files in which it finds something."""
    problems_by_file = {name_of(path): problems(path) for path in paths}
    return {name: problem for name, problem in problems_by_file.items() if problem}
