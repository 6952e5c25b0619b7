"""The pages of a slab's next extent, which a thread allocates while the writer goes on.

The kernel fills new pages with zeros: some 12 ms for 32 MiB, which an engine that fills several
extents a second would spend within its steps.
"""

import os
import threading

from arbiter.units import Bytes


class NextExtent:
    """Pages of a file behind what its writer counts as allocated. One thread asks and is told."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = self.end = Bytes(0)  # where such pages may be; 0: there are none
        self._is_there = False
        self._thread: threading.Thread | None = None

    def begin(self, start: Bytes, end: Bytes) -> None:
        """Returns at once. What was begun before must have been taken or cut."""
        self._start, self.end, self._is_there = start, end, False
        self._thread = threading.Thread(target=self._allocate, name="next-extent", daemon=True)
        self._thread.start()

    def _allocate(self) -> None:
        try:
            os.posix_fallocate(self._fd, self._start, self.end - self._start)
        except OSError:
            return  # no room now: the writer hears of it when it asks itself
        self._is_there = True

    def take(self, start: Bytes, end: Bytes) -> bool:
        """Whether a range has its pages by this; waits for a thread that is still at it."""
        self._wait()
        taken = self._is_there and (self._start, self.end) == (start, end)
        if taken:
            self._is_there, self.end = False, Bytes(0)
        return taken

    def cut(self) -> Bytes:
        """The end of the pages that may be there by this, which the caller gives back; 0: none are.
        Waits for a thread that is still at it."""
        self._wait()
        end, self._is_there, self.end = self.end, False, Bytes(0)
        return end

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
