"""Gives the terminal to a command in a process group of its own, as a shell does."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

TERMINAL = 0  # standard input


@contextlib.contextmanager
def foreground(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Gives the terminal to the command's process group while the block lasts, if this process has
    a terminal and is in its foreground. Without this the kernel would stop the command when it
    reads the terminal, as it does with every process in the background."""
    ours = os.getpgrp()
    if not _is_in_foreground(ours):
        yield
        return
    # The kernel sends SIGTTOU, which stops a process, also to a background process that sets the
    # terminal's group, as this one does at the end.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(TERMINAL, process.pid)
        os.killpg(process.pid, signal.SIGCONT)  # it was stopped if it has read the terminal already
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal was closed meanwhile
            os.tcsetpgrp(TERMINAL, ours)
        signal.signal(signal.SIGTTOU, before)


def _is_in_foreground(group: int) -> bool:
    """Whether a process group has the terminal; False where there is none, or where it is the
    terminal of another session."""
    try:
        return os.tcgetpgrp(TERMINAL) == group
    except OSError:
        return False


def was_suspended(process: subprocess.Popen[bytes]) -> bool:
    """Whether Ctrl-Z has stopped the command since the last call."""
    stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG)
    return stopped is not None and stopped.si_status == signal.SIGTSTP
