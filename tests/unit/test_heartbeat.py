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


class Config:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def get_terminal_writer(self) -> Writer:
        return self._writer


@pytest.mark.spec("M1")
def test_running_test_is_named_again_and_again() -> None:
    writer = Writer()
    made = Heartbeat(Config(writer), silence_s=0.01)  # type: ignore[arg-type]
    made.pytest_runtest_logstart("tests/test_long.py::test_slow")
    assert writer.has_two.wait(60)
    made.pytest_unconfigure()
    assert writer.lines[-1].endswith("tests/test_long.py::test_slow")


def test_each_test_that_runs_is_named_and_no_other() -> None:
    writer = Writer()
    made = Heartbeat(Config(writer), silence_s=0.01)  # type: ignore[arg-type]
    for name in ("test_first", "test_over", "test_slow"):
        made.pytest_runtest_logstart(name)
    made.pytest_runtest_logfinish("test_over")
    writer.lines.clear()
    writer.has_two.clear()
    assert writer.has_two.wait(60)
    made.pytest_unconfigure()
    named = [line.split()[-1] for line in writer.lines]
    last = len(named) - 1 - named[::-1].index("test_slow")
    assert named[last - 1] == "test_first"


def test_failure_is_named_at_once_and_a_passed_test_is_not() -> None:
    writer = Writer()
    made = Heartbeat(Config(writer), silence_s=60)  # type: ignore[arg-type]
    for name, outcome in (("test_good", "passed"), ("test_bad", "failed")):
        report = pytest.TestReport(name, ("", 0, ""), {}, outcome, None, "call")  # type: ignore[arg-type]
        made.pytest_runtest_logreport(report)
    made.pytest_unconfigure()
    assert writer.lines == ["  FAILED call  test_bad"]
