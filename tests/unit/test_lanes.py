"""Slow tests are divided among two workers, each folder or file on one of them."""

from pathlib import Path

from tests.support.lanes import ORDER, piece_of, turn_of

ROOT = Path(__file__).parents[2]
OTHERS = {"unit", "style", "bugs", "support"}  # their order says nothing, or they have no tests


def test_a_piece_is_the_whole_of_the_graph_or_the_simulation_and_a_file_elsewhere() -> None:
    assert piece_of("tests/sim/test_sim.py::test_a[1]") == "tests/sim"
    assert piece_of("tests/graph/test_front.py::test_a[x::y]") == "tests/graph"
    one = "tests/integration/test_swaps.py"
    assert piece_of(f"{one}::test_a[x/y]") == piece_of(f"{one}::TestB::test_c") == one


def test_every_folder_of_long_pieces_has_its_turn() -> None:
    slow = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")} - OTHERS
    assert {f"tests/{name}" for name in slow} == set(ORDER)
    assert turn_of("tests/graph/test_front.py::test_a") == 0
    assert turn_of("tests/later/test_a.py::test_b") == len(ORDER)
