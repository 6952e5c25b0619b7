"""The sessions of holders: each lasts from a `join` to the next one of its holder, or to the
holder's death. A call of a holder without one, or of another epoch, has to rejoin.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from arbiter.core import events as ev
from arbiter.errors import StaleEpoch
from arbiter.protocol import ray_internals
from arbiter.server.shell import Shell
from arbiter.server.store import ExpectedHolder, Store
from arbiter.units import Epoch, HolderId

OVER_KEPT = 1_024  # a holder's two calls of a session come within its start; 100 kB
HANDLE_S = 10.0  # a holder's actor answers its first call within its own start


class HolderSessions:
    """Keeps which holder has joined this epoch, by its latest session. `start` begins a task that
    lasts as long as the arbiter at most."""

    def __init__(
        self, shell: Shell, store: Store, start: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._shell, self._store, self._start = shell, store, start
        self._current: dict[HolderId, str] = {}  # the last session of each holder
        self._ends: dict[str, asyncio.Event] = {}  # of those awaited; set when they are over
        self._over: OrderedDict[str, None] = OrderedDict()  # the newest

    def join(self, joined: ev.Joined, session_id: str, handles: list[Any], refs: list[Any]) -> None:
        """Begins a session, and ends an earlier one of the same holder. `handles` and `refs` as
        the actor's `join` has them."""
        self._shell.calls_count += 1
        holder = joined.holder
        process = joined.pid, joined.start_ticks
        self._store.add_member(ExpectedHolder(holder, joined.node, *process, joined.is_driver))
        self._shell.open_mail(holder)
        before, self._current[holder] = self._current.get(holder), session_id
        if before:
            self._end(before)
        self._start(self._watch_holder(holder, session_id, handles, refs))
        self._shell.feed(joined)

    async def ended(self, session_id: str) -> None:
        """Waits for the end of a session, which may be begun later than this call."""
        if session_id in self._over:
            return
        try:
            await self._ends.setdefault(session_id, asyncio.Event()).wait()
        finally:
            self._ends.pop(session_id, None)

    def _end(self, session_id: str) -> None:
        """Ends a session. The call that waits for the end may have been lost, as that of a holder
        which died just then, so only the newest OVER_KEPT ended sessions are kept for such
        calls."""
        self._over[session_id] = None
        if len(self._over) > OVER_KEPT:
            self._over.popitem(last=False)
        if end := self._ends.get(session_id):
            end.set()

    def check(self, epoch: Epoch, holder: HolderId) -> None:
        """Raises StaleEpoch for a holder that must join first."""
        self._shell.calls_count += 1
        if epoch != self._shell.epoch or not self._shell.has_mail(holder):
            raise StaleEpoch(epoch, self._shell.epoch)

    def check_mail(self, epoch: Epoch, holder: HolderId) -> None:
        """Refuses the calls by which a session lives to a holder that must rejoin, and no others:
        the holder is alive and on the books, so its other calls go on."""
        if self._shell.must_rejoin(holder):
            raise StaleEpoch(epoch, self._shell.epoch)

    async def _watch_holder(
        self, holder: HolderId, session_id: str, handles: list[Any], refs: list[Any]
    ) -> None:
        """Ends when the holder's process does: in 10-25 ms if its actor was called once, because
        that subscribes us to the actor's state, else in 2 s."""
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(HANDLE_S):
                for handle in handles:
                    await handle.__ray_ready__.remote()
        if await ray_internals.owner_died(refs[0]) and self._current.get(holder) == session_id:
            self.lost(holder)

    def lost(self, holder: HolderId) -> None:
        """Ends the session of a holder that is dead, or counts as dead."""
        if session_id := self._current.pop(holder, None):
            self._end(session_id)
        self._store.drop_holder(holder)
        self._shell.close_mail(holder)
        self._shell.feed(ev.HolderLost(holder))
