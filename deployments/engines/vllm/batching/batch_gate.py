"""The wait for a place in one engine's batch: `batch_admission.plan` decides, futures wait.

A request may be cancelled at any moment. Before its turn it just leaves the queue; when `plan` has
given it a place that its task has not taken yet, it gives the place back.
"""

import asyncio
import itertools
import time
from collections import Counter
from math import inf
from typing import NamedTuple

from arbiter.core.types import Priority
from arbiter.errors import QueueFull, RequestError
from deployments.engines.vllm.batching.batch_admission import BASE, View, WaitingRequest, plan
from deployments.engines.vllm.batching.token_counters import ANSWER_WEIGHT, PROMPT_WEIGHT, FairShare

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
    """The deadline passed before the engine began with the request; it has cost no step."""

    status_code, code = 503, "deadline_unmet"

    def __init__(self, name: str, waited_s: float, retry_after_s: float) -> None:
        super().__init__(name, waited_s, retry_after_s)
        self.name, self.waited_s, self.retry_after_s = name, waited_s, retry_after_s

    def __str__(self) -> str:
        return (
            f"{self.name} had not begun with the request at its deadline, {self.waited_s:.1f} s"
            f" after it came; ask again in {self.retry_after_s:.0f} s or allow a later deadline"
        )


class _Waiting(NamedTuple):
    request: WaitingRequest
    name: str
    entered: asyncio.Future[None]


class BatchGate:
    """The requests in an engine's batch and those that wait for it; `plan` decides which enter.

    `slots`: for adapters. `window`: how many requests may be in the batch, or ahead of it.
    `wait_s`: how long a request waits for a slot."""

    def __init__(self, slots: int, window: int, wait_s: float = inf) -> None:
        self.slots, self.window, self.wait_s = slots, window, wait_s
        self.running: Counter[str] = Counter()
        self.pinned: frozenset[str] = frozenset()
        self.shares = FairShare()
        self.expired = 0
        self._slotted_s: dict[str, float] = {}  # of adapters that run: since when
        self._bypassed: dict[int, int] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._counts: Counter[tuple[int, str]] = Counter()  # of these, by priority and tenant
        self._placed: set[int] = set()  # keys of the requests that have a place
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
        without a slot, RequestExpired at the deadline, and QueueFull when MAX_WAITING requests
        wait: at once, or when a request comes to which this one must give way."""
        since_s = time.monotonic()
        if since_s >= expires_s:
            raise self._expiry(name, 0.0)
        if len(self._waiting) >= MAX_WAITING and not self._make_room(tenant, priority):
            raise QueueFull(name, MAX_WAITING, MAX_WAITING, RETRY_S)
        key = next(self._numbers)
        request = WaitingRequest(key, adapter, since_s, tenant, priority, tokens, expires_s)
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = _Waiting(request, name, entered)
        self._counts[priority, tenant] += 1
        self.shares.begin_wait(tenant, adapter)
        self._admit()
        self._bound_wait(request, name, entered)
        try:
            async with asyncio.timeout(_finite(expires_s - since_s)):
                await entered
        except TimeoutError:
            self._give_up(request, entered)
            raise self._expiry(name, expires_s - since_s) from None
        except (AdaptersBusy, QueueFull, asyncio.CancelledError):
            self._give_up(request, entered)
            raise
        return request

    def _make_room(self, tenant: str, priority: int) -> bool:
        """Refuses a waiting request in place of a new one of this tenant and priority, and returns
        whether there is any that must give way: of the least urgent priority, of the tenant with
        the most requests there, the newest. It gives way to a more urgent request, and to one of a
        tenant that has fewer requests there, also with the new one."""
        least = max((each for each, _ in self._counts), default=priority)
        here = {name: count for (each, name), count in self._counts.items() if each == least}
        largest = max(here, key=here.__getitem__, default=tenant)
        has_fewer = here.get(tenant, 0) + 1 < here.get(largest, 0)
        if priority > least or (priority == least and not has_fewer):
            return False
        for last in reversed(self._waiting.values()):
            is_of_these = (last.request.priority, last.request.tenant) == (least, largest)
            if is_of_these and not last.entered.done():
                self._remove(last.request)
                error = QueueFull(last.name, MAX_WAITING, MAX_WAITING, RETRY_S)
                last.entered.set_exception(error)
                return True
        return False

    def _remove(self, request: WaitingRequest) -> None:
        del self._waiting[request.key]
        kind = request.priority, request.tenant
        self._counts[kind] -= 1
        if not self._counts[kind]:
            del self._counts[kind]
        self.shares.end_wait(request.tenant, request.adapter)

    def _bound_wait(
        self, request: WaitingRequest, name: str, entered: asyncio.Future[None]
    ) -> None:
        """Refuses the request after `wait_s` in which its adapter got no slot. A request for the
        base, or for an adapter that has a slot, waits for a place in the batch alone. It is not
        refused, because a place gets free with each request that ends."""

        def look() -> None:
            if request.adapter in self.running or request.adapter in self.pinned:
                self._bound_wait(request, name, entered)
            elif not entered.done():
                entered.set_exception(AdaptersBusy(name, self.slots, self.wait_s, self.wait_s / 2))

        if request.adapter != BASE and self.wait_s < inf and not entered.done():
            timer = asyncio.get_running_loop().call_later(self.wait_s, look)
            entered.add_done_callback(lambda _: timer.cancel())

    def check_deadline(self, request: WaitingRequest, name: str) -> None:
        """Checks a request that has a place and waited for something else there. Raises
        RequestExpired."""
        now_s = time.monotonic()
        if now_s >= request.expires_s:
            raise self._expiry(name, now_s - request.since_s)

    def answered(self, request: WaitingRequest, tokens: int) -> None:
        """Notes tokens of the answer on the account of its tenant and adapter."""
        self.shares.charge(request.tenant, request.adapter, ANSWER_WEIGHT * tokens)

    def leave(self, request: WaitingRequest) -> None:
        """Gives back the place of a request, if it has one."""
        if request.key not in self._placed:
            return
        self._placed.discard(request.key)
        self.running[request.adapter] -= 1
        if not self.running[request.adapter]:
            del self.running[request.adapter]
            self._slotted_s.pop(request.adapter, None)
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

    def _give_up(self, request: WaitingRequest, entered: asyncio.Future[None]) -> None:
        if entered.done() and not entered.cancelled() and not entered.exception():
            return self.leave(request)
        if request.key in self._waiting:  # else it gave way to another
            self._remove(request)
            self._admit()

    def _admit(self) -> None:
        if not self._waiting or self.running.total() >= self.window:
            return
        # A cancelled request stays here until its task has run, and must get no place.
        waiting = [w.request for w in self._waiting.values() if not w.entered.done()]
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
            request, entered = self._waiting[key].request, self._waiting[key].entered
            self._remove(request)
            self._placed.add(key)
            self.running[request.adapter] += 1
            if request.adapter != BASE:
                self._slotted_s.setdefault(request.adapter, now_s)
            self.shares.charge(request.tenant, request.adapter, PROMPT_WEIGHT * request.tokens)
            entered.set_result(None)


def _finite(seconds: float) -> float | None:
    return None if seconds == inf else seconds
