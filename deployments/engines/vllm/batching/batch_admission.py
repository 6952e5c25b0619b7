"""Batch admission: which waiting requests enter the engine's batch next. It is fair between tenants
and adapters, takes the most urgent first, and has the adapters in a batch fit its slots.

Pure: `plan` sees which requests run and which wait, and names those that enter.

While the slots hold all adapters, or none is asked for, the order is: the most urgent priority; the
tenant that was served least; its adapter that was served least; arrival
(deployments.engines.vllm.batching.token_counters). A request past its deadline never enters. Once
BYPASSES requests have entered past a less urgent priority, the first request of that priority is
next.

Beyond the slots, requests of adapters that already run enter before those of the same tenant that
need a slot, which fills the batch; a free slot goes to the adapter with the longest queue. This is
bounded: a request older than `ageing_s` counts as if its adapter ran. While it finds no slot, the
least busy adapter whose own requests come later *drains*: none of its requests enters until its
slot is free. An adapter keeps its slot for `turn_s` at least, so that slots do not change hands
with every request. Without this rule a cold adapter waited 7.9 s under a flood on hot ones, with it
2.0 s."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from arbiter.core.types import Priority
from deployments.engines.vllm.batching.token_counters import PROMPT_WEIGHT, FairShare

BASE = ""  # the bare base model takes no slot

# Measured with 48 clients on 4 hot adapters: 1 s of waiting costs nothing in throughput.
AGEING_S = 1.0
TURN_S = 1.0  # the same second, seen from the adapter that others wait for
BYPASSES = 8  # as the arbiter's queue has it (C6)
_NEXT = 0  # more urgent than any priority

_Rank = tuple[float, float, float, float, float]
_LAST: _Rank = (inf, inf, inf, inf, inf)


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits to enter the batch."""

    key: int
    adapter: str
    since_s: float
    tenant: str = ""
    priority: int = Priority.NORMAL
    tokens: int = 1  # of its prompt
    expires_s: float = inf  # its deadline, on the clock of `since_s`


@dataclass(frozen=True, slots=True)
class View:
    """What runs in the engine and what waits. `waiting` is in the order of arrival."""

    slots: int
    window: int  # the most requests in the engine at once
    running: Mapping[str, int]  # requests in the engine by adapter, none of them zero
    waiting: Sequence[WaitingRequest]
    now_s: float
    ageing_s: float = AGEING_S
    pinned: frozenset[str] = frozenset()  # adapters that keep their slot without a request
    shares: FairShare = field(default_factory=FairShare)
    bypassed: Mapping[int, int] = field(default_factory=dict)  # by priority, see `next_bypassed`
    slotted_s: Mapping[str, float] = field(default_factory=dict)  # since when an adapter has a slot
    turn_s: float = TURN_S


@dataclass(frozen=True, slots=True)
class Plan:
    """Keys of the requests that enter now, in this order, and the bypasses counted with them."""

    entering: list[int]
    bypassed: dict[int, int]


def plan(view: View) -> Plan:
    """The view stays as it is; what enters is on the caller to note."""
    batch = _Batch.of(view)
    entering: list[int] = []
    if batch.room:
        batch.drain_adapters()
    while batch.room and (queue := batch.next_queue()):
        entering.append(batch.admit(queue).key)
    return Plan(entering, dict(batch.bypassed))


@dataclass(slots=True)
class _Queue:
    """Requests of one priority, tenant and adapter, which enter in the order of arrival."""

    priority: int
    tenant: str
    adapter: str
    requests: deque[WaitingRequest] = field(default_factory=deque)

    @property
    def since_s(self) -> float:
        return self.requests[0].since_s


@dataclass(slots=True)
class _SlottedQueue:
    """What waits for an adapter that has a slot."""

    first: _Rank = _LAST
    queued: int = 0

    def note(self, rank: _Rank, queue: _Queue) -> None:
        self.first = min(self.first, rank)
        self.queued += len(queue.requests)


@dataclass(slots=True)
class _Batch:
    """The view as it changes while requests enter."""

    view: View
    running: Counter[str]  # of a pinned adapter perhaps zero
    queues: list[_Queue]  # none of them empty
    shares: FairShare
    bypassed: Counter[int]
    fits: bool  # the slots hold all adapters that run or are asked for
    draining: set[str] = field(default_factory=set)  # adapters of which no request enters

    @classmethod
    def of(cls, view: View) -> "_Batch":
        queues: dict[tuple[int, str, str], _Queue] = {}
        for one in view.waiting:
            if one.expires_s > view.now_s:
                key = one.priority, one.tenant, one.adapter
                queues.setdefault(key, _Queue(*key)).requests.append(one)
        running = Counter(dict.fromkeys(view.pinned, 0) | dict(view.running))
        adapters = {queue.adapter for queue in queues.values()} | running.keys()
        fits = len(adapters - {BASE}) <= view.slots
        priorities = {queue.priority for queue in queues.values()}
        bypassed = Counter({p: n for p, n in view.bypassed.items() if p in priorities})
        shares = view.shares.copy({queue.tenant for queue in queues.values()})
        return cls(view, running, list(queues.values()), shares, bypassed, fits)

    @property
    def room(self) -> int:
        return max(0, self.view.window - self.running.total())

    @property
    def free_slots(self) -> int:
        return self.view.slots - len(self.running.keys() - {BASE})

    def needs_slot(self, adapter: str) -> bool:
        return adapter != BASE and adapter not in self.running

    def can_enter(self, queue: _Queue) -> bool:
        if self.needs_slot(queue.adapter):
            return self.free_slots > 0
        return queue.adapter not in self.draining

    def next_queue(self) -> _Queue | None:
        able = [queue for queue in self.queues if self.can_enter(queue)]
        urgent = self.next_bypassed()
        return min(able, key=lambda q: self.rank(q, urgent), default=None)

    def admit(self, queue: _Queue) -> WaitingRequest:
        """Takes the first request of the queue into the batch, on its tenant's account."""
        for late in {other.priority for other in self.queues if other.priority > queue.priority}:
            self.bypassed[late] += 1
        if self.bypassed[queue.priority] and queue is self.first_of(queue.priority):
            self.bypassed[queue.priority] = 0
        one = queue.requests.popleft()
        if not queue.requests:
            self.queues.remove(queue)
        self.running[one.adapter] += 1
        self.shares.charge(one.tenant, one.adapter, PROMPT_WEIGHT * one.tokens)
        return one

    # -- the order -----------------------------------------------------------------------------

    def rank(self, queue: _Queue, urgent: Sequence[_Queue]) -> _Rank:
        """Queues with the least go first. `urgent`: those that were bypassed often enough."""
        priority = _NEXT if any(queue is one for one in urgent) else queue.priority
        tenant, adapter = self.shares.of(queue.tenant, queue.adapter)
        if not self.fits and self.needs_slot(queue.adapter) and not self.is_aged(queue):
            return priority, tenant, 1, -len(queue.requests), queue.since_s
        return priority, tenant, 0, adapter, queue.since_s

    def is_aged(self, queue: _Queue) -> bool:
        return self.view.now_s - queue.since_s > self.view.ageing_s

    def first_of(self, priority: int) -> _Queue:
        """The queue of this priority that is next, whether or not it can enter now."""
        rivals = [queue for queue in self.queues if queue.priority == priority]
        return min(rivals, key=lambda q: self.rank(q, ()))

    def next_bypassed(self) -> list[_Queue]:
        """Returns, of each priority that was bypassed BYPASSES times, the queue that is next. Only
        this one: its count begins anew with its own entry, so that nothing else of its priority,
        which found a place more easily, uses up its turn."""
        waiting = {queue.priority for queue in self.queues}
        often = [p for p in waiting if self.bypassed[p] >= BYPASSES]
        return [self.first_of(priority) for priority in often]

    # -- slots that must fall free -------------------------------------------------------------

    def drain_adapters(self) -> None:
        """Chooses, for each adapter whose request must have a slot and finds none, an adapter that
        drains. The number of its running requests then only falls, and its slot gets free."""
        if self.fits:
            return
        slotted, askers = self._slotted_and_askers()
        most = self.free_slots + len(slotted)
        for place, (rank, queue) in enumerate(sorted(askers, key=lambda a: a[0])[:most]):
            if place < self.free_slots:
                continue
            able = [
                a
                for a in slotted
                if a not in self.draining and self._gives_way(a, slotted[a], rank, queue)
            ]
            busy = sorted(able, key=lambda a: (self.running[a], slotted[a].queued, a))
            self.draining.update(busy[:1])

    def _slotted_and_askers(self) -> "tuple[dict[str, _SlottedQueue], list[tuple[_Rank, _Queue]]]":
        """What waits for each adapter that may give its slot away, and of each adapter that lacks
        one the first queue that may claim one: aged, or more urgent than what waits for a slotted
        adapter."""
        urgent = self.next_bypassed()
        slotted = {
            name: _SlottedQueue() for name in self.running.keys() - {BASE} - self.view.pinned
        }
        lacking: dict[str, tuple[_Rank, _Queue]] = {}
        for queue in self.queues:
            rank = self.rank(queue, urgent)
            if queue.adapter in slotted:
                slotted[queue.adapter].note(rank, queue)
            elif self.needs_slot(queue.adapter):
                if rank < lacking.get(queue.adapter, (_LAST, queue))[0]:
                    lacking[queue.adapter] = rank, queue
        least_urgent = max((one.first[0] for one in slotted.values() if one.queued), default=_NEXT)
        claims = lacking.values()
        return slotted, [c for c in claims if self.is_aged(c[1]) or c[1].priority < least_urgent]

    def _gives_way(
        self, adapter: str, slotted: "_SlottedQueue", rank: "_Rank", asker: _Queue
    ) -> bool:
        """Whether an adapter gives its slot to the asker: at once where that is more urgent, else
        once the asker has waited for long enough, the adapter had its slot for long enough, and it
        is the asker's turn."""
        if asker.priority < slotted.first[0]:
            return True
        had_s = self.view.now_s - self.view.slotted_s.get(adapter, -inf)
        return self.is_aged(asker) and had_s >= self.view.turn_s and rank[:4] <= slotted.first[:4]
