"""A test that takes long is named while it runs."""

import threading

import pytest

from tests.support.heartbeat import Heartbeat


class Writer:
    """A terminal that tells when it was written to twice."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.has_two = threading.Event()

    def line(self, text: str = "") -> None:
        self.lines += [text] if text else []
        if sum("test_slow" in line for line in self.lines) > 1:
            self.has_two.set()


@pytest.mark.spec("M1")
def test_running_test_is_named_again_and_again() -> None:
    writer = Writer()

    class Config:
        def get_terminal_writer(self) -> Writer:
            return writer

    made = Heartbeat(Config(), silence_s=0.01)  # type: ignore[arg-type]
    made.pytest_runtest_logstart("tests/test_long.py::test_slow")
    assert writer.has_two.wait(10)
    made.pytest_unconfigure()
    assert writer.lines[-1].endswith("tests/test_long.py::test_slow")
