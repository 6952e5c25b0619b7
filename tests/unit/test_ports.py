"""Ports of tests: no process is given one unasked, and no two tests have the same."""

import subprocess
import sys
from pathlib import Path

from tests.support.ports import EPHEMERAL, FIRST, LAST, free_port, outside

ROOT = Path(__file__).parents[2]
PRINT = "from tests.support.ports import free_port; print(*(free_port() for _ in range(20)))"
RAYS_WORKERS = range(10_002, 20_000)


def test_port_is_none_that_the_kernel_or_ray_gives_a_process_by_itself() -> None:
    low, high = (int(end) for end in EPHEMERAL.read_text().split())
    for port in (free_port(), *outside(low, high), *outside(30_000, 40_000)):
        assert FIRST <= port <= LAST and port not in RAYS_WORKERS
    assert not set(outside(30_000, 40_000)) & {*range(30_000, 40_001)}
    assert [*outside(1_024, 65_535)] == [*range(FIRST, LAST + 1)], "better than none"


def test_processes_side_by_side_have_different_ports_though_none_listens_yet() -> None:
    mine = {free_port() for _ in range(5)}
    command = [sys.executable, "-c", PRINT]
    beside = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    theirs = {int(word) for word in beside.stdout.split()}
    assert (len(mine), len(theirs)) == (5, 20) and not mine & theirs
