"""KV blocks of a slab's file that come back into its rows, each when a request first asks for it.

The scheduler's thread alone reserves rows and marks them READY. One thread beside it copies bytes
and checks them, because a block that vLLM was promised and that fails to load ends its engine.
Until then the request waits, and others go on; where a disk hangs, it has the rest computed.
"""

import time
from collections.abc import Callable, Iterable, KeysView
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import ReqContext

from arbiter.pool import Rows, SavedRows
from arbiter.pool.layout import Count, Removal

# Once a step, because the core asks again at once: 21,000 times while 56 MB came from a disk.
NAP_S = 0.0005
# A read of one block that takes longer is of a disk that hangs: a block of mid-chat has 2 MiB, and
# 3,600 tokens are computed in 3.3 s (docs/benchmarks.md). A disk that is only slow is waited for.
HANGS_S = 5.0
GIVE_UP_S = 0.05  # for the read of a block that has been computed meanwhile; one takes milliseconds


@dataclass(slots=True)
class _RestoredKeys:
    """The keys that were restored for one request, and the last key that it was told to wait for. A
    key is restored once for a request: else two requests that evict each other's rows would wait
    for ever."""

    keys: set[bytes] = field(default_factory=set)
    last: bytes = b""


class Restorer:
    """Brings blocks from a slab's file into its rows, each when a request first asks for it.
    `clock`: wall-clock seconds, as in the marks of `saved`. `monotonic`: seconds, for bounds."""

    def __init__(
        self,
        rows: Rows,
        saved: SavedRows,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows, self._saved, self._clock = rows, saved, clock
        self._monotonic = monotonic
        self._reading_since_s: float | None = None  # the thread reads a block; None: none
        self._coming: dict[bytes, Future[int | None]] = {}
        self._thread = ThreadPoolExecutor(1, "restore")
        self._may_nap = True

    @property
    def is_busy(self) -> bool:
        """Whether rows are on their way, and the disk does not hang."""
        return bool(self._coming) and not self._hangs

    @property
    def _hangs(self) -> bool:
        since_s = self._reading_since_s
        return since_s is not None and self._monotonic() - since_s > HANGS_S

    @property
    def coming(self) -> KeysView[bytes]:
        """The keys of rows that are on their way, also of those for which no request waits any
        more."""
        return self._coming.keys()

    def awaits(self, key: bytes, request: ReqContext) -> bool:
        """Whether a request is to wait for a row that is being read; begins to read the row if the
        file has it. After the read the row is READY, or there is none where it failed."""
        future = self._coming.get(key)
        if future is None:
            self._begin(key, request)
        elif self._is_done(future):
            self._finish(key)
        if key not in self._coming:
            return False
        _restored_by(request).last = key
        return not self._hangs

    def still_awaits(self, request: ReqContext) -> bool:
        """Whether the last row that a request waits for is still being read. While it is, the
        request need not ask for all of its rows again."""
        restored = request.get_state(_RestoredKeys)
        future = self._coming.get(restored.last) if restored else None
        return future is not None and not self._is_done(future) and not self._hangs

    def _is_done(self, future: Future[int | None]) -> bool:
        if self._may_nap:
            self._may_nap = False
            wait([future], NAP_S)
        return future.done()

    def end_step(self) -> None:
        """Marks what has come, also for requests that are gone."""
        self._may_nap = True
        for key in [key for key, future in self._coming.items() if future.done()]:
            self._finish(key)

    def give_up(self, keys: Iterable[bytes]) -> None:
        """Reads none of these keys any more: the device computes their blocks anew, because a block
        before them was a miss. vLLM asks once to store a computed block, so its row must be free or
        READY by then. A row into which a slow disk is still reading stays reserved."""
        for key in [key for key in keys if key in self._coming]:
            if self._coming[key].cancel():
                del self._coming[key]
                self._rows.abandon(key)
            elif not self._hangs and wait([self._coming[key]], GIVE_UP_S).done:
                self._finish(key)

    def forget_tenant(self, removal: Removal) -> None:
        """Restores no more rows that leave with a tenant. A read that is under way ends without a
        READY row."""
        self._saved.forget_tenant(removal)

    def stop(self) -> None:
        """Returns when no thread writes to a row any more, except where a read hangs on the disk:
        that row stays among those that are being read. All rows of reads that were stopped stay
        reserved."""
        for key, future in list(self._coming.items()):
            if future.cancel() or (not self._hangs and wait([future], HANGS_S).done):
                del self._coming[key]

    def close(self) -> None:
        self.stop()
        self._thread.shutdown()
        self._saved.close()

    def _begin(self, key: bytes, request: ReqContext) -> None:
        mark = self._saved.mark(key)
        if mark is None or mark.expires_s <= self._clock():
            return
        if key in self._rows or self._rows.is_reserved(key) or key in _restored_by(request).keys:
            return
        if self._hangs:
            return
        _restored_by(request).keys.add(key)
        keep = request._offload_key_positions
        reserved = self._rows.reserve([key], keep=keep.keys(), tenant=mark.tenant)
        for row in reserved.rows.values():
            target = self._rows.slab.row(row)
            self._coming[key] = self._thread.submit(self._read, key, target)

    def _read(self, key: bytes, target: memoryview) -> int | None:
        """Reads a block, in the thread. Returns the nanoseconds that it took; None: its bytes are
        not those saved."""
        self._reading_since_s, began_ns = self._monotonic(), time.monotonic_ns()
        try:
            is_whole = self._saved.read(key, target)
        finally:
            self._reading_since_s = None
        return time.monotonic_ns() - began_ns if is_whole else None

    def _finish(self, key: bytes) -> None:
        """Marks the row as restored, or gives it up where its read failed. Waits for a read that
        has begun, which takes some milliseconds."""
        mark = self._saved.mark(key)
        took_ns = self._coming.pop(key).result()
        if took_ns is not None and mark is not None:
            self._rows.mark_restored(mark)
            self._rows.count(Count.RESTORE_NS, took_ns)
        else:
            self._rows.abandon(key)


def _restored_by(request: ReqContext) -> _RestoredKeys:
    restored = request.get_state(_RestoredKeys)
    if restored is None:
        restored = _RestoredKeys()
        request.set_state(restored)
    return restored
