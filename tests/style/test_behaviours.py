"""docs/behaviours.md claims nothing that no test holds."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([A-Z]\d+) \|[^|]*\| (works|partial|missing) \| (?:`([\w.]+)`)? ?\|", re.M)


def marks(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.spec":
                yield from (str(arg.value) for arg in call.args if isinstance(arg, ast.Constant))


def marked_tests() -> dict[str, set[str]]:
    """Name of each test to the ids it is marked with."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(file.read_text())
        shared = {
            mark
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for mark in marks([node.value])
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = set(marks(node.decorator_list))
                found.setdefault(node.name, set()).update(own | shared)
    return found


TESTS = marked_tests()
PAGE = (ROOT / "docs" / "behaviours.md").read_text()
ROWS = ROW.findall(PAGE)


# Several lines of the specification at once, as `| H2-H8 |` and `| K2, K4 |`: only what is missing.
SEVERAL = re.compile(r"^\| [A-Z]\d+(?:(?:-|, )[A-Z]\d+)+ \|[^|]*\| missing \|")
LINES = [line for line in PAGE.splitlines() if re.match(r"\| [A-Z]\d", line)]


def test_behaviours_page_has_rows() -> None:
    assert len(ROWS) > 50


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split(" | ")[0])
def test_every_behaviours_row_is_checked_or_marked_missing(line: str) -> None:
    assert ROW.match(line) or SEVERAL.match(line), line


@pytest.mark.parametrize(("line", "state", "test"), ROWS, ids=lambda v: v)
def test_working_behaviour_is_held_by_a_marked_test_or_a_benchmark(
    line: str, state: str, test: str
) -> None:
    assert test or state != "works", f"{line} works, but no test is named"
    if test.startswith("benchmarks."):
        name = test.removeprefix("benchmarks.")
        folder = ROOT / "benchmarks"
        assert (folder / f"{name}.py").exists() or (folder / name / "__main__.py").exists()
        assert list((ROOT / "docs" / "benchmarks").glob(f"{name}*.json")), f"{line}: no figures"
    elif test:
        assert test in TESTS, f"{line}: there is no test {test}"
        assert line in TESTS[test], f"{test} is not marked with {line}"
