"""The pages of a slab's next extent, which a thread allocates while the engine goes on.

The kernel fills new pages with zeros: some 12 ms for 32 MiB, which an engine that fills several
extents a second would spend within its steps. Pages that a killed engine had allocated so stay,
within its limit and on its account, until the slab has its next writer.
"""

import os
import threading
import time
from collections.abc import Callable

from arbiter.units import Bytes

# Where an extent follows the last one sooner than this, as at a GPU's rates, the next one is
# allocated ahead. A slab that grows more slowly has no page before it needs it.
SOON_S = 1.0


class NextExtent:
    """Allocates pages of a file behind those that its writer counts as allocated
    (arbiter.pool.slab.ExtentPreallocator). `clock`: seconds. All methods are called in the writer's
    thread."""

    def __init__(self, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._fd, self._clock = fd, clock
        self._grown_s = float("-inf")
        self._start = self.end = Bytes(0)
        self._is_there = False
        self._thread: threading.Thread | None = None

    def grown(self, start: Bytes, end: Bytes) -> None:
        """Begins to allocate the next extent, from `start` to `end`, if the slab grows fast.
        Returns at once."""
        now, before = self._clock(), self._grown_s
        self._grown_s = now
        if now - before < SOON_S and start < end:
            self._start, self.end, self._is_there = start, end, False
            thread = threading.Thread(target=self._allocate, name="next-extent", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no room for a thread: the writer allocates by itself
                self.end = Bytes(0)
            else:
                self._thread = thread

    def _allocate(self) -> None:
        try:
            os.posix_fallocate(self._fd, self._start, self.end - self._start)
        except OSError:
            return  # no room: the writer gets the error when it allocates the extent itself
        self._is_there = True

    def take(self, start: Bytes, end: Bytes) -> bool:
        """Returns whether this extent was allocated ahead. Waits for a thread that is still at
        it."""
        self._wait()
        taken = self._is_there and (self._start, self.end) == (start, end)
        self._is_there, self.end = False, Bytes(0)
        return taken

    def cut(self) -> Bytes:
        """Returns the end of what may be allocated ahead, which counts as taken back. Waits for a
        thread that is still at it."""
        self._wait()
        end, self._is_there, self.end = self.end, False, Bytes(0)
        return end

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
