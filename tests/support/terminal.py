"""A program at a terminal: what it draws, and keys for it."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time

LINES, COLUMNS = 40, 140


class Terminal:
    """Runs Python with these words while the block lasts."""

    def __init__(self, words: list[str], env: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.last_said = ""  # while its end was waited for
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs,
            env=(os.environ if env is None else env) | {"TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(60)
        os.close(self._ours)

    def write(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read_until(self, words: str, within_s: float = 60.0) -> str:
        """What the program has written since, up to these words."""
        output, end = "", time.monotonic() + within_s
        while words not in output:
            left_s = end - time.monotonic()
            is_there = left_s > 0 and select.select([self._ours], [], [], left_s)[0]
            assert is_there, f"{words!r} did not come; there is {output!r}"
            output += os.read(self._ours, 65_536).decode(errors="replace")
        return output

    def exit_status(self, within_s: float = 60.0) -> int:
        """Waits for the end; what is still drawn is read, so that no full terminal stops it."""
        draining = threading.Thread(target=self._drain, daemon=True)
        draining.start()
        status = self._process.wait(within_s)
        draining.join(within_s)
        return status

    def _drain(self) -> None:
        try:
            while said := os.read(self._ours, 65_536):
                self.last_said += said.decode(errors="replace")
        except OSError:  # EIO: no process has the terminal any more
            return
