"""A pytest plugin of `make test`: a test that takes long is named, so that no run looks hung. A
failure is named at once, so that its cause can be looked for before a long run ends.

pytest -p tests.support.heartbeat
"""

import threading
import time

import pytest

SILENCE_S = 10.0


class Heartbeat:
    """Names the running tests each time none began for so long."""

    def __init__(self, config: pytest.Config, silence_s: float = SILENCE_S) -> None:
        self._writer = config.get_terminal_writer()
        self._silence_s = silence_s
        self._began_s = {"collecting": time.monotonic()}  # of each that runs; xdist runs several
        self._next = threading.Event()
        self._is_over = False
        threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        while not self._is_over:
            if self._next.wait(self._silence_s):
                self._next.clear()
                continue
            now_s = time.monotonic()
            self._writer.line()
            for nodeid, began_s in list(self._began_s.items()):
                self._writer.line(f"  ... {now_s - began_s:4.0f} s  {nodeid}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began_s.pop("collecting", None)
        self._began_s[nodeid] = time.monotonic()
        self._next.set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._writer.line()
            self._writer.line(f"  FAILED {report.when}  {report.nodeid}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._began_s.pop(nodeid, None)

    def pytest_unconfigure(self) -> None:
        self._is_over = True
        self._next.set()


@pytest.hookimpl(trylast=True)  # the terminal is configured by another plugin
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist has no terminal
        config.pluginmanager.register(Heartbeat(config))
