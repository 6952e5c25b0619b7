"""A script that starts a Ray cluster of its own, because a process can be in one cluster only."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHIN_S = 150.0


def run(module: str, *arguments: str, root: Path = ROOT) -> None:
    """Runs a module of the repository or of a copy of it. Fails unless it prints `ok`."""
    script = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, wrong = script.communicate(timeout=WITHIN_S)
    finally:
        script.kill()
        script.wait()
        _end_session(script.pid)
    assert "ok" in said.split(), wrong[-3_000:]


def _end_session(session: int) -> None:
    """Its Ray, which a process that is killed does not take with it; workers have groups of their
    own."""
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
