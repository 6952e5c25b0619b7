"""Processes that hold RAM of a chosen kind and size, and what the kernel says of them."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from arbiter.units import KIB
from tests.support.open_files import open_files

# A fresh interpreter, so that next to nothing is shared with the test's.
_HOLD = """
import mmap, os, signal, sys
kind, mib = sys.argv[1], int(sys.argv[2])
if kind == "private":
    held = mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
else:
    held = os.memfd_create(kind)
    os.posix_fallocate(held, 0, mib << 20)
print(flush=True)
signal.pause()
"""


@contextlib.contextmanager
def holding(kind: str, mib: int) -> Iterator[int]:
    """The pid of a process with that much private memory, or with a memfd of that name."""
    command = [sys.executable, "-S", "-c", _HOLD, kind, str(mib)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline() == b"\n"
        yield process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def kernel_bytes(pid: int) -> int:
    """Resident pages that are no file's, and what it holds in memfds it has not mapped. By other
    files of /proc than the product reads."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = dict(line.split(":", 1) for line in lines)
    resident = sum(int(pairs[key].split()[0]) * KIB for key in ("RssAnon", "RssShmem"))
    files = {}
    for fd, target in open_files(pid).items():
        if target.startswith("/memfd:"):
            status = os.stat(fd)
            files[status.st_ino] = status.st_blocks * 512
    return resident + sum(files.values())
