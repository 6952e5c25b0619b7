"""A command in a process group of its own that still has the terminal, as a shell lets it."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

TERMINAL = 0  # standard input


@contextlib.contextmanager
def foreground(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Gives the terminal to the command's group, if this process has one and is in its foreground,
    and takes it back. The kernel stops what reads a terminal in the background."""
    ours = os.getpgrp()
    if not _is_in_foreground(ours):
        yield
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # which stops what gives it away, too
    try:
        os.tcsetpgrp(TERMINAL, process.pid)
        os.killpg(process.pid, signal.SIGCONT)  # it may have read before
        yield
    finally:
        with contextlib.suppress(OSError):  # it was hung up
            os.tcsetpgrp(TERMINAL, ours)
        signal.signal(signal.SIGTTOU, before)


def _is_in_foreground(group: int) -> bool:
    """Says so of a process group; False where there is no terminal, or not this session's."""
    try:
        return os.tcgetpgrp(TERMINAL) == group
    except OSError:
        return False


def was_suspended(process: subprocess.Popen[bytes]) -> bool:
    """Says whether Ctrl-Z has stopped a command that runs, each time once."""
    stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG)
    return stopped is not None and stopped.si_status == signal.SIGTSTP
