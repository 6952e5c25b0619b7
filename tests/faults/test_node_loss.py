"""A node dies, and takes its devices, engines and holders off the books."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def end_session(session: int) -> None:
    """Its Ray, which a process that is killed does not take with it; workers have groups of their
    own."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.spec("A19")
def test_a_dead_nodes_devices_and_tickets_leave_and_the_rest_goes_on() -> None:
    cluster = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.node_loss"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, wrong = cluster.communicate(timeout=150)
    finally:
        cluster.kill()
        cluster.wait()
        end_session(cluster.pid)
    assert "ok" in said.split(), wrong[-3_000:]
