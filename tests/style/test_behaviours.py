"""docs/behaviours.md has the form it promises, and claims nothing that no test holds."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.style.sources import ROOT, nodes_of, tree_of

LENGTH_MOST = 200  # of a sentence: a reader compares lines, and notes have the rest
ROWS_LEAST = 100  # a page that is parsed wrongly has none
STATE = re.compile(r"(works|partial|missing)(?: `\[gpu\]`)?")
TEST = re.compile(r"`(test_\w+|benchmarks\.\w+)`|")
LACKS = ("Missing:", "Unproved:")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table of the page."""

    id: str
    behaviour: str
    state: str
    test: str


def rows_of(page: str) -> list[Row]:
    """Raises ValueError for a line that has an id and not four cells."""
    found = []
    for line in page.splitlines():
        if re.match(r"\|\s*[A-Z]\d", line):
            id_, behaviour, state, test = (cell.strip() for cell in line.strip()[1:-1].split("|"))
            found.append(Row(id_, behaviour, state, test))
    return found


def notes_of(page: str) -> list[tuple[str, str]]:
    """Id and text of each note, in the order of the page."""
    found = re.findall(r"^- \*\*(\w+)\*\* (.+(?:\n  .+)*)", page, re.M)
    return [(id_, " ".join(text.split())) for id_, text in found]


def marks(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.spec":
                yield from (str(arg.value) for arg in call.args if isinstance(arg, ast.Constant))


def marked_tests() -> dict[str, set[str]]:
    """Name of each test to the ids it is marked with."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        shared = {
            mark
            for node in tree_of(file).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for mark in marks([node.value])
        }
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = set(marks(node.decorator_list))
                found.setdefault(node.name, set()).update(own | shared)
    return found


TESTS = marked_tests()
PAGE = (ROOT / "docs" / "behaviours.md").read_text()
ROWS = rows_of(PAGE)
NOTES = notes_of(PAGE)
IDS = [row.id for row in ROWS]


def test_page_has_rows_and_each_id_once() -> None:
    assert len(ROWS) > ROWS_LEAST
    assert len(IDS) == len(set(IDS))


def test_notes_belong_to_rows_and_each_row_has_one_at_most() -> None:
    noted = [id_ for id_, _ in NOTES]
    assert len(noted) == len(set(noted))
    assert set(noted) <= set(IDS)
    assert len(noted) == len(re.findall(r"^- ", PAGE.partition("\n## ")[2], re.M))


def test_ids_of_marks_are_rows() -> None:
    assert set().union(*TESTS.values()) <= set(IDS)


def test_rows_have_the_form_of_the_page() -> None:
    for row in ROWS:
        check_form(row)


def check_form(row: Row) -> None:
    assert re.fullmatch(r"[A-Z]\d+", row.id)
    size = len(row.behaviour)
    assert size <= LENGTH_MOST, f"{row.id}: {size} characters; use the note"
    is_sentence = row.behaviour.endswith(".") and ". " not in row.behaviour
    assert is_sentence, f"{row.id} is not one sentence"
    assert STATE.fullmatch(row.state), f"{row.id}: {row.state}"
    assert TEST.fullmatch(row.test), f"{row.id}: {row.test}"


def test_notes_name_what_partial_rows_lack() -> None:
    for row in ROWS:
        check_note(row, dict(NOTES).get(row.id, ""))


def check_note(row: Row, note: str) -> None:
    lacks = any(label in note for label in LACKS)
    state = row.state.split()[0]
    assert lacks or state != "partial", f"{row.id}: write `Missing:` or `Unproved:` in its note"
    assert not lacks or state != "works", f"{row.id}: its note names what is missing or unproved"


def test_named_tests_and_benchmarks_exist_and_carry_the_ids() -> None:
    for row in ROWS:
        check_test(row)


def check_test(row: Row) -> None:
    name = row.test.strip("`")
    assert name or row.state != "works", f"{row.id} works, but no test is named"
    if name.startswith("benchmarks."):
        name = name.removeprefix("benchmarks.")
        folder = ROOT / "benchmarks"
        assert (folder / f"{name}.py").exists() or (folder / name / "__main__.py").exists()
        assert list((ROOT / "docs" / "benchmarks").glob(f"{name}*.json")), f"{row.id}: no figures"
    elif name:
        assert name in TESTS, f"{row.id}: there is no test {name}"
        assert row.id in TESTS[name], f"{name} is not marked with {row.id}"


def test_names_of_tests_on_the_page_are_those_of_tests() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named and not named - TESTS.keys()


@pytest.mark.parametrize(
    ("line", "is_read"),
    [
        ("| A1 | A sentence. | works | `test_x` |", True),
        ("| A1 | A sentence. | partial `[gpu]` | |", True),
        ("| A1-A3 | A sentence. | missing | |", True),  # and refused by its form
        ("| id | behaviour | state | test |", False),
    ],
)
def test_line_with_an_id_is_never_overlooked(line: str, is_read: bool) -> None:
    assert bool(rows_of(line)) is is_read
