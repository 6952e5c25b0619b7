"""What a process has open, as the kernel lists it. It goes on opening and closing meanwhile."""

import contextlib
import os
from pathlib import Path


def open_files(pid: int) -> dict[Path, str]:
    """Each descriptor's path in /proc and what it leads to, without those that were closed between
    the list and the look. Raises FileNotFoundError where there is no such process."""
    targets = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets[descriptor] = os.readlink(descriptor)
    return targets
