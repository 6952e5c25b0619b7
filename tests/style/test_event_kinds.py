"""Every line of the event log has a kind that EventKind names, and every kind is used."""

import ast
from collections.abc import Iterable

import pytest

from arbiter.core.decisions import EventKind
from tests.style.sources import ROOT, name_of, nodes_of

CODE = [p for package in ("arbiter", "deployments") for p in (ROOT / package).rglob("*.py")]


def _is_log_line(call: ast.Call) -> bool:
    """`LogEvent(kind, ...)`, or `state.log(kind, ...)` of the core."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "LogEvent"
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "log"
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in ("state", "self")
    )


def free_kinds(nodes: Iterable[ast.AST]) -> list[str]:
    """Kinds given as a string, as `line: kind`."""
    calls = [n for n in nodes if isinstance(n, ast.Call) and _is_log_line(n)]
    firsts = [call.args[0] for call in calls if call.args]
    return [f"{a.lineno}: {a.value}" for a in firsts if isinstance(a, ast.Constant)]


@pytest.mark.spec("K1")
def test_no_line_of_the_event_log_has_a_kind_of_its_own() -> None:
    found = {name_of(path): free_kinds(nodes_of(path)) for path in CODE}
    assert not {path: kinds for path, kinds in found.items() if kinds}
    for planted in ('state.log("misspelt", ticket)', 'log.tell(LogEvent("odd", {}))'):
        assert free_kinds(ast.walk(ast.parse(planted)))


def test_every_kind_of_event_is_used() -> None:
    outside = [p for p in CODE if p.name != "decisions.py"]
    used = {
        node.attr
        for path in outside
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "EventKind"
    }
    assert used == {kind.name for kind in EventKind}


def test_kind_of_event_reads_as_its_value() -> None:
    """Readers of the log and hashes of recordings see what they saw when kinds were strings."""
    kind = EventKind.MODEL_LOAD
    assert kind == "model_load" and str(kind) == "model_load" and repr(kind) == "'model_load'"
    assert "model_load" in {kind}
