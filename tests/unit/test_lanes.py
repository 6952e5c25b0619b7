"""Slow tests are divided among two workers, each folder or file on one of them."""

import re
from itertools import pairwise
from pathlib import Path

from tests.support.lanes import ORDER, piece_of, turn_of

ROOT = Path(__file__).parents[2]
OTHERS = {"unit", "style", "bugs", "support"}  # their order says nothing, or they have no tests


def test_a_piece_is_the_whole_of_the_graph_or_the_simulation_and_a_file_elsewhere() -> None:
    assert piece_of("tests/sim/test_sim.py::test_a[1]") == "tests/sim"
    assert piece_of("tests/graph/test_front.py::test_a[x::y]") == "tests/graph"
    one = "tests/integration/test_swaps.py"
    assert piece_of(f"{one}::test_a[x/y]") == piece_of(f"{one}::TestB::test_c") == one


def test_file_of_the_graph_with_a_system_of_its_own_is_a_piece_with_a_turn_of_its_own() -> None:
    files = [name for name in ORDER if name.endswith(".py")]
    assert files and all(piece_of(f"{file}::test_a[x]") == file for file in files)
    turns = [turn_of(f"{file}::test_a") for file in files]
    assert min(turns) > turn_of("tests/graph/test_front.py::test_a")
    assert all(later - sooner > 1 for sooner, later in pairwise(turns)), "none beside another"
    for file in files:
        text = (ROOT / file).read_text()
        shares = re.search(r"^(?:async )?def test_\w+\([^)]*\bgraph\b", text, re.M)
        assert not shares, f"{file} would start the shared system once more"


def test_every_folder_of_long_pieces_has_its_turn() -> None:
    slow = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")} - OTHERS
    assert {f"tests/{name}" for name in slow} == {n for n in ORDER if not n.endswith(".py")}
    assert turn_of("tests/graph/test_front.py::test_a") == 0
    assert turn_of("tests/later/test_a.py::test_b") == len(ORDER)
