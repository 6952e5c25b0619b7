"""Progress on a terminal or in a log: what is being done, for how long, and never silence.

Only the standard library is imported, because tools/install.py prints by it before anything is
installed.

    steps = Steps()
    with steps.step("engines") as note:
        note("Installing vllm")
"""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

SILENCE_S = 5.0  # between two lines of a step, where there is no terminal to draw on
DRAW_S = 0.5  # between two drawings on a terminal
NOTE_CHARS = 60
WHAT_CHARS = 30
LAST_LINES = 20  # of a program that failed

Note = Callable[[str], None]


def is_verbose() -> bool:
    """Says whether programs print what they print: VERBOSE=1."""
    return os.environ.get("VERBOSE", "0") not in ("", "0")


class ProgramFailed(Exception):
    """A program ended with another status than 0. `last`: the end of what it printed."""

    def __init__(self, program: str, status: int, last: str, log: Path) -> None:
        super().__init__(program, status, last, log)
        self.program, self.status, self.last, self.log = program, status, last, log

    def __str__(self) -> str:
        return f"{self.last}\n{self.program} ended with {self.status}; all it printed: {self.log}"


class Steps:
    """One line per step: it grows on a terminal, and is repeated elsewhere while the step lasts."""

    def __init__(self, out: TextIO | None = None, silence_s: float = SILENCE_S) -> None:
        self._out = out or sys.stderr
        self._draws = self._out.isatty() and not is_verbose()
        self._pause_s = DRAW_S if self._draws else silence_s
        self._lock = threading.Lock()

    @contextmanager
    def step(self, what: str) -> Iterator[Note]:
        """Tells that it goes on until the block ends, and how long it took. `note`: what it is at
        now."""
        began_s, ended, now = time.monotonic(), threading.Event(), [""]

        def tell() -> None:
            while not ended.wait(self._pause_s):
                self._say("...", what, began_s, now[0], is_over=False)

        def note(text: str) -> None:
            now[0] = text

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        mark = "failed"
        try:
            yield note
            mark = "ok"
        finally:
            ended.set()
            teller.join()
            self._say(mark, what, began_s, now[0] if mark == "ok" else "", is_over=True)

    def _say(self, mark: str, what: str, began_s: float, note: str, *, is_over: bool) -> None:
        short = note if len(note) <= NOTE_CHARS else note[: NOTE_CHARS - 3] + "..."
        took_s = time.monotonic() - began_s
        line = f"  {mark:6} {what:{WHAT_CHARS}} {took_s:6.1f} s  {short}".rstrip()
        with self._lock:
            begin, end = ("\r\x1b[K", "\n" if is_over else "") if self._draws else ("", "\n")
            self._out.write(f"{begin}{line}{end}")
            self._out.flush()


def run(
    command: Sequence[str | Path],
    log: Path,
    note: Note,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs a program; what it prints goes into the file, each line is noted, and with VERBOSE=1 it
    is printed as well. Raises ProgramFailed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    last: deque[str] = deque(maxlen=LAST_LINES)
    with (
        log.open("a") as log_file,
        subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=None if env is None else dict(env),
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log_file.write(line)
            last.append(line.rstrip())
            note(line.strip())
            if is_verbose():
                sys.stdout.write(line)
        status = process.wait()
    if status != 0:
        raise ProgramFailed(Path(str(command[0])).name, status, "\n".join(last), log)
