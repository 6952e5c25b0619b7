"""The event log: a ring of the newest lines, each with a sequence number, and the
subscribers that wait for the next (K1). Optionally also a file of JSON lines.
"""

import asyncio
import contextlib
import heapq
import json
import logging
import os
import time
from collections import deque
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from arbiter.core.decisions import EventKind, LogEvent
from arbiter.protocol.messages import Plain
from arbiter.units import Epoch, in_seconds

logger = logging.getLogger("arbiter")

# Newest lines kept: an hour at one a second, about 2 MB. Those of single requests are kept apart,
# so that no flood of them pushes out why a model left.
LINES_MOST = 4_096
REQUESTS = frozenset(
    {
        *(EventKind.CAPABILITY_RUN, EventKind.REMOTE_EGRESS, EventKind.REMOTE_ANSWER),
        *(EventKind.JOB_ACCEPTED, EventKind.JOB_BEGUN, EventKind.JOB_ENDED),
    }
)
FILE_MOST_BYTES = 64 << 20  # then the file starts over, its predecessor kept as `.1`


class EventLog:
    """Keeps the newest LINES_MOST lines of one epoch, and apart from them as many about single
    requests. `path`: a file of JSON lines that gets every line as well; None: no file."""

    def __init__(self, epoch: Epoch, path: Path | None = None) -> None:
        self._epoch = epoch
        self._lines: deque[Plain] = deque(maxlen=LINES_MOST)
        self._requests: deque[Plain] = deque(maxlen=LINES_MOST)
        self._path = path
        self._file: TextIO | None = None
        self._grown = asyncio.Event()
        # Above every number of an earlier epoch, so that a subscriber resumes where it stopped:
        # epochs differ by at least one and none tells a million things between two saves.
        self.sequence = int(epoch) * 1_000_000

    def tell(self, event: LogEvent) -> None:
        """Adds a line with the next sequence number, and wakes the subscribers."""
        self.sequence += 1
        line: Plain = {"seq": self.sequence, "epoch": int(self._epoch), "unix_s": time.time()}
        line |= {"kind": str(event.kind), "ticket": event.ticket, "size_bytes": event.size_bytes}
        line |= {"took_s": None if event.took is None else in_seconds(event.took)}
        line |= event.data
        (self._requests if event.kind in REQUESTS else self._lines).append(line)
        self._grown.set()
        self._grown = asyncio.Event()
        if self._path:
            self._write(line, self._path)

    async def after(self, sequence: int, wait_s: float) -> list[Plain]:
        """Lines after `sequence`; waits for one at most `wait_s`."""
        if self.sequence <= sequence:
            try:
                async with asyncio.timeout(wait_s):
                    await self._grown.wait()
            except TimeoutError:
                return []
        newest = (_after(lines, sequence) for lines in (self._lines, self._requests))
        return list(heapq.merge(*newest, key=_sequence))

    def _write(self, line: Plain, path: Path) -> None:
        """Appends a line to the file. A full disk costs the line, not the arbiter."""
        try:
            file = self._opened(path)
            if file.tell() > FILE_MOST_BYTES:
                path.replace(path.with_suffix(path.suffix + ".1"))
                file = self._opened(path)
            file.write(json.dumps(line) + "\n")
        except OSError as error:
            logger.error("event %s is not in the file: %s", line["seq"], error)
            self.close()  # and the file is opened anew for the next line

    def close(self) -> None:
        """Closes the file, which the next line would open again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what cannot be written is lost
                file.close()

    def _opened(self, path: Path) -> TextIO:
        """Returns the file, opened once, and again when it was moved away. Raises OSError."""
        if self._file is not None:
            if path.exists() and os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                return self._file
            self._file.close()
        self._file = path.open("a", buffering=1)  # a line at a time, so that it can be followed
        return self._file


def _sequence(line: Plain) -> int:
    sequence: int = line["seq"]
    return sequence


def _after(lines: deque[Plain], sequence: int) -> list[Plain]:
    """Returns the lines after `sequence`, of which a subscriber that keeps up lacks the last few:
    it looks at no others."""
    newest = list(takewhile(lambda line: _sequence(line) > sequence, reversed(lines)))
    return newest[::-1]
