"""Ports on which nothing else begins to listen until the test does.

A port that the kernel chose and that is closed again is soon another process's: the kernel gives it
to the next connection, and Ray's workers take theirs from a range of their own.
"""

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Above `ray start`'s workers, which take 10002 to 19999, and below the agents that follow 52365:
# https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations
FIRST, LAST = 20_000, 52_364
_held: list[int] = []  # for as long as this process lives


def free_port() -> int:
    """A port that no connection is given by itself, on which no process listens, and that no other
    test process of this machine has. Raises LookupError."""
    low, high = (int(end) for end in EPHEMERAL.read_text().split())
    for port in outside(low, high):
        if _hold(port) and _is_free(port):
            return port
    raise LookupError(f"no port of {FIRST} to {LAST} outside {low} to {high} is free")


def outside(low: int, high: int) -> Iterator[int]:
    """Ports that the kernel does not choose from; all of ours where it chooses from all of them."""
    candidates = range(FIRST, LAST + 1)
    apart = itertools.chain(range(FIRST, min(low, LAST + 1)), range(max(high + 1, FIRST), LAST + 1))
    return iter([*apart] or candidates)


def _hold(port: int) -> bool:
    """Whether the name is this process's: the kernel gives it to one, until that one has ended."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0test-port-{port}")
    except OSError:
        name.close()
        return False
    _held.append(name.detach())
    return True


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
