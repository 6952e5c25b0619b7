"""The wait for a place in one engine's batch: what `admission.plan` decides, done with futures.

A request may be cancelled at any moment. Before its turn it just leaves the queue; when `plan` has
given it a place that its task has not taken yet, it gives the place back.
"""

import asyncio
import itertools
import time
from collections import Counter

from arbiter.errors import RequestError
from deployments.engines.vllm.admission import View, Waiting, plan

# Requests that wait for their turn in one engine. The front bounds what comes in; this bounds what
# one engine keeps, because with 2,000 waiting a step takes 1 ms of planning (measured).
MAX_WAITING = 2_000


class AdaptersBusy(RequestError):
    """All slots are in use, or the queue for them is full."""

    status_code, code = 503, "adapters_busy"

    def __init__(self, name: str, slots: int, waited_s: float, retry_after_s: float) -> None:
        super().__init__(name, slots, waited_s, retry_after_s)
        self.name, self.slots, self.waited_s = name, slots, waited_s
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return (
            f"adapter {self.name!r} found all {self.slots} slots in use for {self.waited_s:.1f} s;"
            f" ask again in {self.retry_after_s:.0f} s, or give the model more slots"
        )


class BatchGate:
    """The requests in the engine and those that wait for it; `plan` decides which enter."""

    def __init__(self, slots: int, window: int, wait_s: float) -> None:
        self.slots, self.window, self.wait_s = slots, window, wait_s
        self.running: Counter[str] = Counter()
        self.pinned: frozenset[str] = frozenset()
        self._waiting: dict[int, tuple[Waiting, asyncio.Future[None]]] = {}
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, adapter: str, name: str) -> None:
        """Returns once the request has a place. Raises AdaptersBusy after `wait_s`, or at once when
        MAX_WAITING requests wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise AdaptersBusy(name, self.slots, 0.0, self.wait_s)
        one = Waiting(next(self._numbers), adapter, time.monotonic())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[one.key] = one, turn
        self._admit()
        try:
            async with asyncio.timeout(self.wait_s):
                await turn
        except TimeoutError:
            self._give_up(one, turn)
            raise AdaptersBusy(name, self.slots, self.wait_s, self.wait_s / 2) from None
        except asyncio.CancelledError:
            self._give_up(one, turn)
            raise

    def leave(self, adapter: str) -> None:
        self.running[adapter] -= 1
        if not self.running[adapter]:
            del self.running[adapter]
        self._admit()

    def _give_up(self, one: Waiting, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            return self.leave(one.adapter)
        self._waiting.pop(one.key, None)
        self._admit()

    def _admit(self) -> None:
        if not self._waiting:
            return
        # A cancelled request stays here until its task has run, and must get no place.
        waiting = [one for one, turn in self._waiting.values() if not turn.done()]
        now_s = time.monotonic()
        view = View(self.slots, self.window, self.running, waiting, now_s, pinned=self.pinned)
        for key in plan(view):
            one, turn = self._waiting.pop(key)
            self.running[one.adapter] += 1
            turn.set_result(None)
