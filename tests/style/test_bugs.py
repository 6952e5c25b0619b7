"""Planted bugs fit the code as it is, and go on fitting while it is renamed and laid out anew."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.bugs import Bug
from tests.bugs.planting import BUGS, DoesNotApply, mutated, scope_of
from tests.style.sources import ROOT, text_of, tree_of

CODE = """\
def first(queue):  # in the order of their turns
    if len(queue) > 1 and (
        not queue.closed
    ):
        return queue[0]
    return None


def last(queue):
    return queue[-1] if len(queue) > 1 else None
"""


def bug(old: str, new: str, where: str = "first") -> Bug:
    return Bug("a bug", "code.py", where, old, new)


@cache
def written(planted: Bug) -> str:
    """The file with the bug."""
    return mutated(planted, text_of(ROOT / planted.path))


@pytest.mark.parametrize("planted", BUGS, ids=lambda b: b.name)
def test_planted_bug_fits_once(planted: Bug) -> None:
    assert ast.dump(ast.parse(planted.old)) != ast.dump(ast.parse(planted.new))
    assert written(planted) != text_of(ROOT / planted.path)
    scope = scope_of(tree_of(ROOT / planted.path), planted.where)
    is_whole_file = isinstance(scope, ast.Module)
    assert is_whole_file == (not planted.where), f"{planted.path} has no {planted.where}"


def test_planted_bugs_can_be_read_and_name_nothing_that_does_not_exist(tmp_path: Path) -> None:
    """Such a bug is a SyntaxError or a NameError, which any test finds."""
    for planted in BUGS:
        name = f"{planted.name.replace(' ', '_').replace('/', '_')}.py"
        (tmp_path / name).write_text(written(planted))
    ruff = (sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F7,PLE1142")
    checked = subprocess.run((*ruff, str(tmp_path)), capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_names_of_planted_bugs_differ() -> None:
    assert len({b.name for b in BUGS}) == len(BUGS)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("len(queue) > 1", "True", CODE.replace("len(queue) > 1", "True", 1)),
        ("not queue.closed", "", CODE.replace("and (\n        not queue.closed\n    )", "")),
        ("if len(queue) > 1 and not queue.closed: ...", "if False: ...",
         CODE.replace("len(queue) > 1 and (\n        not queue.closed\n    )", "False")),
        ("return None", "", CODE.replace("    return None\n\n", "\n")),
    ],
)  # fmt: skip
def test_piece_is_replaced_and_lines_after_it_keep_their_numbers(
    old: str, new: str, wanted: str
) -> None:
    broken = mutated(bug(old, new), CODE)
    assert ast.dump(ast.parse(broken)) == ast.dump(ast.parse(wanted))
    assert broken.splitlines()[-2:] == CODE.splitlines()[-2:]
    assert broken.count("\n") == CODE.count("\n")


@pytest.mark.parametrize(
    "words", [("queue", "waiting"), ("closed", "is_closed"), ("first", "head"), ("> 1", ">  (1)")]
)
def test_rename_or_new_layout_leaves_a_planted_bug_in_place(words: tuple[str, str]) -> None:
    planted = bug("len(queue) > 1 and not queue.closed", "len(queue) > 1 and queue.closed")
    wanted = mutated(planted, CODE).replace(*words)
    assert ast.dump(ast.parse(mutated(planted, CODE.replace(*words)))) == ast.dump(
        ast.parse(wanted)
    )


@pytest.mark.parametrize(
    ("old", "where"),
    [("len(queue) > 1", ""), ("len(queue) > 2", "first"), ("sum(tickets) > 1", "first")],
)
def test_planted_bug_that_fits_twice_or_nowhere_is_refused(old: str, where: str) -> None:
    with pytest.raises(DoesNotApply):
        mutated(bug(old, "False", where), CODE)


def test_statement_beside_a_changed_one_is_no_rename_of_it() -> None:
    code = """\
def first(state, entry):
    state.failures.pop(entry.name, None)
    state.evicted.pop((entry.holder, entry.name), None)
"""
    with pytest.raises(DoesNotApply):
        mutated(bug("state.failures.pop((entry.capability, entry.name), None)", ""), code)
