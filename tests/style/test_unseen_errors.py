"""What goes wrong where no test looks fails the test in which it happens."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NEVER_CLOSED = """
    file = open("/dev/null")
    del file
"""
IN_A_FINALIZER = """
    class Raises:
        def __del__(self):
            raise ValueError("in a finalizer")

    one = Raises()
    del one
"""
IN_A_THREAD = """
    import threading

    def raises():
        raise ValueError("in a thread")

    thread = threading.Thread(target=raises)
    thread.start()
    thread.join()
"""
NEVER_AWAITED = """
    async def waits():
        pass

    waits()
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (NEVER_CLOSED, "ResourceWarning: unclosed file"),
        (IN_A_FINALIZER, "ValueError: in a finalizer"),
        (IN_A_THREAD, "ValueError: in a thread"),
        (NEVER_AWAITED, "coroutine 'test_that_fails.<locals>.waits' was never awaited"),
    ],
    ids=["never_closed", "in_a_finalizer", "in_a_thread", "never_awaited"],
)
def test_error_that_no_test_sees_fails_the_test_in_which_it_happens(
    tmp_path: Path, body: str, said: str
) -> None:
    file = tmp_path / "test_of_one_error.py"
    file.write_text(f"def test_that_fails():\n{body}")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-o", f"cache_dir={tmp_path}", str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert said in done.stdout
