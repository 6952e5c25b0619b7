"""Finds the piece of code that a bug replaces by its syntax tree, and writes the file with the bug.

A piece whose names have changed since is still found, while its form is the same, most of its
names are, the old ones are gone, and no other piece of the function fits: a rename breaks no
planted bug.
"""

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tests.bugs import Bug, around, core, gpus, subtle

BUGS = core.BUGS + subtle.BUGS + around.BUGS + gpus.BUGS
Place = tuple[ast.AST, str, int, int]  # a node's field, and the span within it


class DoesNotApply(Exception):
    """The piece of code is not there, or is there more than once."""


@dataclass(slots=True)
class Match:
    """One fit of a pattern: `taken` is what each `...` stood for; `names` maps the pattern's names
    to those of the code."""

    taken: list[list[ast.AST]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        return all(old == new for old, new in self.names.items())

    @property
    def is_renamed(self) -> bool:
        """Whether the code differs by a rename: no two names became one, and most stayed."""
        stayed = sum(old == new for old, new in self.names.items())
        is_one_to_one = len({*self.names.values()}) == len(self.names)
        return is_one_to_one and 2 * stayed > len(self.names)

    def is_rename_in(self, used: set[str]) -> bool:
        """Whether it is a rename where these names are in use: an old name in use is no rename."""
        kept = {old for old, new in self.names.items() if old != new} & used
        return self.is_renamed and not kept

    def take(self, other: "Match") -> bool:
        self.taken, self.names = other.taken, other.names
        return True


def mutated(bug: Bug, text: str) -> str:
    """The text of the file with the bug; lines outside the changed statement keep their numbers.
    Raises DoesNotApply unless the bug fits in one place."""
    module = ast.parse(text)
    place, new = _found(bug, scope_of(module, bug.where))
    node, name, start, end = place
    value = getattr(node, name)
    if isinstance(value, list):
        old = value[start:end]
        value[start:end] = new
        if name == "body" and not value:
            new = value[:] = [ast.Pass()]
    else:
        old = [value]
        setattr(node, name, new[0])
    path = _path(module, node)
    outer = [([n], [n]) for n in reversed(path) if hasattr(n, "lineno")]
    for pieces in ((old, new), *outer):
        written = _spliced(text, *pieces)
        if _is_as(path[:2][-1], text, written):
            return written
    raise DoesNotApply(f"{bug.name}: no statement around it can be written anew in {bug.path}")


def _is_as(top: Any, text: str, written: str) -> bool:
    """Whether the text reads as the changed tree, at its outermost statement."""
    more = written.count("\n") - text.count("\n")
    if not isinstance(top, ast.Module):
        first = min(n.lineno for n in (top, *getattr(top, "decorator_list", ())))
        written = "\n".join(written.splitlines()[first - 1 : top.end_lineno + more])
    try:
        tree = ast.parse(written)
    except SyntaxError:
        return False
    return ast.dump(tree) == ast.dump(ast.parse(ast.unparse(top)))


def _found(bug: Bug, scope: ast.AST) -> tuple[Place, list[Any]]:
    """The one place that it fits, and what is to be there."""
    old, new = _statements(bug.old), _statements(bug.new)
    pairs: list[tuple[list[Any], list[Any]]] = [(old, new)]
    if len(old) == 1 and all(isinstance(n, ast.Expr) for n in (*old, *new)):
        pairs.append(([n.value for n in old], [n.value for n in new]))
    fits = [(place, match, new) for old, new in pairs for place, match in _fits(scope, old)]
    chosen = [f for f in fits if f[1].is_exact]
    if not chosen:
        used = {v for n in ast.walk(scope) for _, v in ast.iter_fields(n) if isinstance(v, str)}
        chosen = [f for f in fits if f[1].is_rename_in(used)]
    chosen = [f for f in chosen if f[2] is new] or chosen  # a statement before an expression
    if len(chosen) != 1:
        where = f"{bug.path}, {bug.where or 'anywhere'}"
        raise DoesNotApply(f"{bug.name}: found {len(chosen)} times in {where}:\n{bug.old}")
    place, match, new = chosen[0]
    holes = sum(isinstance(n, ast.Constant) and n.value is ... for m in new for n in ast.walk(m))
    if holes not in (0, len(match.taken)):
        raise DoesNotApply(f"{bug.name}: {holes} `...` for {len(match.taken)}:\n{bug.new}")
    return place, _filled(new, match)


def _statements(snippet: str) -> list[Any]:
    return [*ast.parse(textwrap.dedent(snippet)).body]


def scope_of(module: ast.Module, where: str) -> ast.AST:
    """The function or class of this qualified name; the file where none is called that any more."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    scope: ast.AST = module
    for name in where.split(".") if where else ():
        inner = [n for n in ast.walk(scope) if isinstance(n, kinds) and n.name == name]
        if len(inner) > 1:  # the outermost, not a method of this name
            inner = [n for n in inner if n in ast.iter_child_nodes(scope)]
        if len(inner) != 1:
            return module
        scope = inner[0]
    return scope


def _fits(scope: ast.AST, old: list[ast.AST]) -> Iterator[tuple[Place, Match]]:
    for node in ast.walk(scope):
        for name, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else [value]
            for start in range(len(values) - len(old) + 1):
                match = Match()
                part = values[start : start + len(old)]
                if all(_fits_one(p, n, match) for p, n in zip(old, part, strict=True)):
                    yield (node, name, start, start + len(old)), match


def _is_anything(pattern: object) -> bool:
    inner = pattern.value if isinstance(pattern, ast.Expr) else pattern
    return isinstance(inner, ast.Constant) and inner.value is ...


def _fits_one(pattern: object, value: object, match: Match) -> bool:
    if isinstance(pattern, list) and isinstance(value, list):
        return _fits_list(pattern, value, match)
    if _is_anything(pattern) and isinstance(value, ast.AST):
        match.taken.append([value])
        return True
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(value) and pattern == value
    if isinstance(pattern, ast.expr_context):
        return True
    return type(pattern) is type(value) and all(
        _fits_field(pattern, name, getattr(value, name), match) for name in pattern._fields
    )


def _fits_field(pattern: ast.AST, name: str, value: object, match: Match) -> bool:
    wanted = getattr(pattern, name)
    if isinstance(wanted, str) and isinstance(value, str) and not isinstance(pattern, ast.Constant):
        return match.names.setdefault(wanted, value) == value
    return _fits_one(wanted, value, match)


def _fits_list(pattern: list[object], values: list[ast.AST], match: Match) -> bool:
    if not pattern:
        return not values
    lengths = range(len(values) + 1) if _is_anything(pattern[0]) else range(1, 2)
    for length in lengths:
        trial = Match([*match.taken], {**match.names})
        if _is_anything(pattern[0]):
            trial.taken.append(values[:length])
        elif not values or not _fits_one(pattern[0], values[0], trial):
            return False
        if _fits_list(pattern[1:], values[length:], trial):
            return match.take(trial)
    return False


class _Fill(ast.NodeTransformer):
    """Puts what `...` stood for back in, and the names that the code has now."""

    def __init__(self, match: Match) -> None:
        self.match, self.left = match, [*match.taken]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if isinstance(value, str) and not isinstance(node, ast.Constant):
                setattr(node, name, self.match.names.get(value, value))
        return super().generic_visit(node)

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        if not _is_anything(node):
            return self.generic_visit(node)
        taken = self.left.pop(0)
        return taken[0] if len(taken) == 1 else taken


def _filled(new: list[Any], match: Match) -> list[Any]:
    fill = _Fill(match)
    filled: list[Any] = []
    for node in new:
        done = fill.visit(node)
        filled += done if isinstance(done, list) else [done]
    return filled


def _path(node: ast.AST, changed: ast.AST) -> list[ast.AST]:
    """The nodes from `node` down to the changed node."""
    if node is changed:
        return [node]
    for inner in ast.iter_child_nodes(node):
        if path := _path(inner, changed):
            return [node, *path]
    return []


def _spliced(text: str, old: list[Any], new: list[Any]) -> str:
    """The text with these neighbouring nodes written anew, on as many lines."""
    starts = [0, *accumulate(len(line) for line in text.encode().splitlines(keepends=True))]
    begin = starts[old[0].lineno - 1] + old[0].col_offset
    end = starts[old[-1].end_lineno - 1] + old[-1].end_col_offset
    piece = "\n".join(ast.unparse(n) for n in new)
    gap = "\n" * (text.encode()[begin:end].count(b"\n") - piece.count("\n"))
    if isinstance(old[0], ast.expr):
        piece = f"({piece}{gap})"
    else:
        piece = textwrap.indent(piece, " " * old[0].col_offset).lstrip() + gap
    return (text.encode()[:begin] + piece.encode() + text.encode()[end:]).decode()
