"""The wait for a place in one engine's batch: what `admission.plan` decides, done with futures.

A request may be cancelled at any moment. Before its turn it just leaves the queue; when `plan` has
given it a place that its task has not taken yet, it gives the place back.
"""

import asyncio
import itertools
import time
from collections import Counter
from math import inf

from arbiter.core.types import Priority
from arbiter.errors import QueueFull, RequestError
from deployments.engines.vllm.batch_admission import BASE, View, WaitingRequest, plan
from deployments.engines.vllm.token_counters import ANSWER_WEIGHT, PROMPT_WEIGHT, FairShare

# Requests that wait for their turn in one engine. The front bounds what comes in; this bounds what
# one engine keeps, because with 2,000 waiting a plan takes 0.7 ms for 32 adapters, 5 ms for 1,000
# (measured).
MAX_WAITING = 2_000

# Requests that enter beyond a full batch, so that the next step has a request for each place that
# gets free.
AHEAD = 4

RETRY_S = 1.0  # until some of those in the batch have ended


class AdaptersBusy(RequestError):
    """All slots are in use."""

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


class RequestExpired(RequestError):
    """The request's deadline passed before the engine began with it; it has cost no compute."""

    status_code, code = 503, "deadline_unmet"

    def __init__(self, name: str, waited_s: float, retry_after_s: float) -> None:
        super().__init__(name, waited_s, retry_after_s)
        self.name, self.waited_s, self.retry_after_s = name, waited_s, retry_after_s

    def __str__(self) -> str:
        return (
            f"{self.name} had not begun with the request at its deadline, {self.waited_s:.1f} s"
            f" after it came; ask again in {self.retry_after_s:.0f} s or allow a later deadline"
        )


class BatchGate:
    """The requests in the engine and those that wait for it; `plan` decides which enter."""

    def __init__(self, slots: int, window: int, wait_s: float = inf) -> None:
        self.slots, self.window, self.wait_s = slots, window, wait_s
        self.running: Counter[str] = Counter()
        self.pinned: frozenset[str] = frozenset()
        self.shares = FairShare()
        self.expired = 0
        self._slotted_s: dict[str, float] = {}  # of adapters that run: since when
        self._bypassed: dict[int, int] = {}
        self._waiting: dict[int, tuple[WaitingRequest, asyncio.Future[None]]] = {}
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(
        self,
        adapter: str,
        name: str,
        *,
        tenant: str = "",
        priority: int = Priority.NORMAL,
        tokens: int = 1,
        expires_s: float = inf,
    ) -> WaitingRequest:
        """Returns once the request has a place, which `leave` gives back. `tokens`: of its prompt.
        `expires_s`: its deadline, on the monotonic clock. Raises AdaptersBusy after `wait_s`
        without a slot, RequestExpired at the deadline, and QueueFull at once when MAX_WAITING
        requests wait."""
        since_s = time.monotonic()
        if since_s >= expires_s:
            raise self._expiry(name, 0.0)
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(name, MAX_WAITING, MAX_WAITING, RETRY_S)
        key = next(self._numbers)
        one = WaitingRequest(key, adapter, since_s, tenant, priority, tokens, expires_s)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = one, turn
        self.shares.arrived(tenant, adapter)
        self._admit()
        self._bound_wait(one, name, turn)
        try:
            async with asyncio.timeout(_finite(expires_s - since_s)):
                await turn
        except TimeoutError:
            self._give_up(one, turn)
            raise self._expiry(name, expires_s - since_s) from None
        except (AdaptersBusy, asyncio.CancelledError):
            self._give_up(one, turn)
            raise
        return one

    def _bound_wait(self, one: WaitingRequest, name: str, turn: asyncio.Future[None]) -> None:
        """Refuses the request after `wait_s` in which its adapter got no slot. The base and an
        adapter that has a slot wait for a place alone, and one gets free with each request that
        ends."""

        def look() -> None:
            if one.adapter in self.running or one.adapter in self.pinned:
                self._bound_wait(one, name, turn)
            elif not turn.done():
                turn.set_exception(AdaptersBusy(name, self.slots, self.wait_s, self.wait_s / 2))

        if one.adapter != BASE and self.wait_s < inf and not turn.done():
            timer = asyncio.get_running_loop().call_later(self.wait_s, look)
            turn.add_done_callback(lambda _: timer.cancel())

    def check_deadline(self, one: WaitingRequest, name: str) -> None:
        """Checks a request that has a place and waited for something else there. Raises
        RequestExpired."""
        now_s = time.monotonic()
        if now_s >= one.expires_s:
            raise self._expiry(name, now_s - one.since_s)

    def answered(self, one: WaitingRequest, tokens: int) -> None:
        """Notes tokens of the answer on the account of its tenant and adapter."""
        self.shares.charge(one.tenant, one.adapter, ANSWER_WEIGHT * tokens)

    def leave(self, one: WaitingRequest) -> None:
        self.running[one.adapter] -= 1
        if not self.running[one.adapter]:
            del self.running[one.adapter]
            self._slotted_s.pop(one.adapter, None)
        self._admit()

    def facts(self) -> dict[str, int | dict[str, int]]:
        """Requests by what became of them, and the weighted tokens that each tenant was served."""
        return {
            "running": self.running.total(),
            "waiting": self.waiting,
            "expired": self.expired,
            "served": dict(self.shares.tenants.served),
        }

    def _expiry(self, name: str, waited_s: float) -> RequestExpired:
        self.expired += 1
        return RequestExpired(name, waited_s, RETRY_S)

    def _give_up(self, one: WaitingRequest, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled() and not turn.exception():
            return self.leave(one)
        del self._waiting[one.key]
        self.shares.left(one.tenant, one.adapter)
        self._admit()

    def _admit(self) -> None:
        if not self._waiting or self.running.total() >= self.window:
            return
        # A cancelled request stays here until its task has run, and must get no place.
        waiting = [one for one, turn in self._waiting.values() if not turn.done()]
        now_s = time.monotonic()
        view = View(
            self.slots,
            self.window,
            self.running,
            waiting,
            now_s,
            pinned=self.pinned,
            shares=self.shares,
            bypassed=self._bypassed,
            slotted_s=self._slotted_s,
        )
        admission = plan(view)
        self._bypassed = admission.bypassed
        for key in admission.entering:
            one, turn = self._waiting.pop(key)
            self.running[one.adapter] += 1
            if one.adapter != BASE:
                self._slotted_s.setdefault(one.adapter, now_s)
            self.shares.left(one.tenant, one.adapter)
            self.shares.charge(one.tenant, one.adapter, PROMPT_WEIGHT * one.tokens)
            turn.set_result(None)


def _finite(seconds: float) -> float | None:
    return None if seconds == inf else seconds
