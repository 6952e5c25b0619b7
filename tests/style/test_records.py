"""Rules read the records and change them through named methods only."""

import ast
from collections.abc import Iterable
from functools import cache

import pytest

from tests.style.sources import ROOT, broken_in, nodes_of, text_of

RECORDS = ROOT / "arbiter" / "core" / "records"
RULES = sorted(
    path for path in (ROOT / "arbiter" / "core").rglob("*.py") if RECORDS not in path.parents
)


def _is_record(node: ast.AST) -> bool:
    """A dataclass that can be written: a frozen one refuses by itself."""
    if not isinstance(node, ast.ClassDef):
        return False
    decorators = [ast.unparse(d) for d in node.decorator_list]
    return any(d.startswith("dataclass") and "frozen=True" not in d for d in decorators)


@cache
def fields_of_records() -> set[str]:
    """Names of all fields of the writable records, and what the other records keep."""
    records: set[str] = set()
    for path in RECORDS.glob("*.py"):
        for node in nodes_of(path):
            if _is_record(node):
                assert isinstance(node, ast.ClassDef)
                records |= {
                    ast.unparse(f.target) for f in node.body if isinstance(f, ast.AnnAssign)
                }
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                records |= {attr for attr, _ in writes(ast.walk(node)) if not attr.startswith("_")}
    return records


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return list(node.targets)
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _parts(target: ast.expr) -> list[ast.expr]:
    """A target, or each part of a tuple; of `a.b[c] = d` the field is `a.b`."""
    if isinstance(target, ast.Tuple | ast.List):
        return [part for each in target.elts for part in _parts(each)]
    return _parts(target.value) if isinstance(target, ast.Subscript) else [target]


# What changes a dictionary, a list, a set or a deque in place.
IN_PLACE = {
    *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend"),
    *("insert", "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove"),
    *("reverse", "rotate", "setdefault", "sort", "subtract", "update"),
}


def _changed_in_place(node: ast.AST) -> list[ast.expr]:
    """Of `a.b[c].pop(d)` the container, `a.b[c]`. A record has methods of such names, too; what
    they are called on is no field of a record."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    return [node.func.value] if node.func.attr in IN_PLACE else []


def writes(nodes: Iterable[ast.AST]) -> list[tuple[str, ast.Attribute]]:
    """Every attribute that is assigned, counted up, deleted or changed in place."""
    targets = [t for node in nodes for t in (*_targets(node), *_changed_in_place(node))]
    parts = [p for target in targets for p in _parts(target)]
    return [(p.attr, p) for p in parts if isinstance(p, ast.Attribute)]


# The state of a rule itself, and state that no book depends on (arbiter/core/state.py).
OWN = {"self", "pass_", "state", "holder", "node", "pressure_state", "engine", "failure", "switch"}


def direct_writes(nodes: Iterable[ast.AST], fields: set[str]) -> list[str]:
    """Writes to a field of a record from outside, as `line: target`."""
    return [
        f"{target.lineno}: {ast.unparse(target)}"
        for attr, target in writes(nodes)
        if attr in fields and not (isinstance(target.value, ast.Name) and target.value.id in OWN)
    ]


def test_rules_change_records_through_named_methods() -> None:
    fields = fields_of_records()
    assert not broken_in(RULES, lambda path: direct_writes(nodes_of(path), fields))


PLANTED = (
    "ticket.granted = {}",
    "ticket.inflight, ticket.last_used = 0, now",
    "victim.measured[device] = Bytes(0)",
    "state.ledger.books[device].free_bytes -= size",
    "ticket.revocation.unloading_since = None",
    "del book.tickets[ticket]",
    "ticket.granted.update(sizes)",
    "book.tickets.pop(ticket)",
    "state.ledger.dirty.add(node)",
    "self._state.ledger.dirty = set()",
)


@pytest.mark.parametrize("line", PLANTED)
def test_direct_write_that_is_planted_in_a_rule_is_found(line: str) -> None:
    path = ROOT / "arbiter" / "core" / "eviction" / "eviction.py"
    planted = f"{text_of(path)}\n\ndef planted(state, ticket):\n    {line}\n"
    assert direct_writes(ast.walk(ast.parse(planted)), fields_of_records())
