"""The workers of `make test`, as pytest starts them."""

import os
import subprocess
import sys
from pathlib import Path

WITHIN_S = 100.0
ROOT = Path(__file__).parents[2]
ENDS_ITS_WORKER = """
import os
def test_first(): pass
def test_that_ends_its_worker(tmp_path_factory):
    if not os.path.exists(os.environ["DIED"]):
        open(os.environ["DIED"], "w").close()
        os._exit(1)
def test_last(): pass
"""


def test_all_tests_run_and_the_run_ends_though_a_worker_dies(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    (tmp_path / "test_d_dies.py").write_text(ENDS_ITS_WORKER)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "tests.support.lanes", "."],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "DIED": str(tmp_path / "died"), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 1
    assert "1 failed, 15 passed" in done.stdout, done.stdout
