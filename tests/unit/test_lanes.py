"""Slow tests are divided among two workers, each folder or file on one of them."""

import ast
from pathlib import Path

from tests.support.lanes import ORDER, OWN, OWN_FILES, piece_of, turn_of

ROOT = Path(__file__).parents[2]
OTHERS = {"unit", "style", "bugs", "support"}  # their order says nothing, or they have no tests


def test_a_piece_is_the_whole_of_the_graph_or_the_simulation_and_a_file_elsewhere() -> None:
    assert piece_of("tests/sim/test_sim.py::test_a[1]") == "tests/sim"
    assert piece_of("tests/graph/test_front.py::test_a[x::y]") == "tests/graph"
    one = "tests/integration/test_swaps.py"
    assert piece_of(f"{one}::test_a[x/y]") == piece_of(f"{one}::TestB::test_c") == one


def test_files_of_the_graph_that_start_a_system_of_their_own_are_one_piece() -> None:
    files = sorted((ROOT / "tests/graph").glob("test_*.py"))
    alone = [path.name for path in files if not {"graph", "client"} & wanted_by(path)]
    assert alone == sorted(OWN_FILES)
    assert {piece_of(f"tests/graph/{name}::test_a") for name in OWN_FILES} == {OWN}
    assert piece_of("tests/commands/test_additions.py::test_a") != OWN
    assert turn_of("tests/graph/test_additions.py::test_a") == ORDER.index(OWN)


def wanted_by(path: Path) -> set[str]:
    """The fixtures that a file's tests and fixtures ask for."""
    functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    asked = [f for f in functions if f.name.startswith("test_") or f.decorator_list]
    return {arg.arg for function in asked for arg in function.args.args}


def test_every_folder_of_long_pieces_has_its_turn() -> None:
    slow = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")} - OTHERS
    assert {f"tests/{name}" for name in slow} == set(ORDER) - {OWN}
    assert turn_of("tests/graph/test_front.py::test_a") == 0
    assert turn_of("tests/later/test_a.py::test_b") == len(ORDER)
