"""A node dies, and takes its devices, engines and holders off the books."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.spec("A19")
def test_a_dead_nodes_devices_and_tickets_leave_and_the_rest_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.node_loss"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert "ok" in done.stdout.split(), done.stderr[-3_000:]
