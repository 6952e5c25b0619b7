"""The processes of the graph a benchmark has started, as the kernel lists them."""

import os
import time
from collections import defaultdict
from pathlib import Path

from arbiter.node import procfs

# By the beginning of a command line, the first that fits.
ROLES = {
    "ray::ServeReplica:front:": "front",
    "ray::ServeReplica:": "replica",
    "ray::ProxyActor": "proxy",
    "ray::ServeController": "Serve controller",
    "ray::ArbiterActor": "arbiter",
    "ray::NodeAgent": "node agent",
    "ray::IDLE": "idle Ray worker",
}
RAY = "Ray itself"  # gcs, raylet, dashboard, their helpers, and `serve run`

# A graph at rest takes a sixth of a core here; with the start of a process it is more than half.
QUIET_CORES, LOOK_S = 0.5, 1.0


def by_role(node: str) -> dict[str, list[int]]:
    """Pids of what descends from here, and of the zygote of `node`, which is not a child of ours,
    with its engines, which keep its command line."""
    everything = procfs.processes()
    pids: dict[str, list[int]] = defaultdict(list)
    for pid in procfs.descend({os.getpid()}, everything) - {os.getpid()}:
        pids[_role(_command(pid))].append(pid)
    for pid in everything:
        if f"/{node}/zygote.sock" in _command(pid):
            pids["engine" if _name(pid).startswith("engine") else "zygote"].append(pid)
    return dict(pids)


def has_replica() -> bool:
    """Whether a capability has a replica; one counts until it has ended."""
    return _has("replica")


def has_spare() -> bool:
    """A Ray worker at hand for the next replica."""
    return _has("idle Ray worker")


def _has(role: str) -> bool:
    return any(
        _role(_command(pid)) == role for pid in procfs.descend({os.getpid()}, procfs.processes())
    )


def wait_for_quiet(within_s: float) -> bool:
    """False: the machine did not fall quiet, by all that runs on it."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        before_s = _busy_s()
        time.sleep(LOOK_S)
        if _busy_s() - before_s < QUIET_CORES * LOOK_S:
            return True
    return False


def _busy_s() -> float:
    """Processor time of the whole machine since it started: all but idle and waiting for a disk
    (proc(5)); a guest's is within its user's."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _role(line: str) -> str:
    return next((name for start, name in ROLES.items() if line.startswith(start)), RAY)


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ")


def _name(pid: int) -> str:
    return _read(pid, "comm")


def _read(pid: int, what: str) -> str:
    """Empty when the process has gone."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
