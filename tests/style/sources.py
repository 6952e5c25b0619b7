"""The files of the repository and their syntax trees, each read and parsed once."""

import ast
from functools import cache
from pathlib import Path

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
