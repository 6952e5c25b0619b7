"""Keeps queued tickets: per node, in the grant order, which a policy gives (C6).

A ticket competes only with tickets of its own node, because its holder loads there. Later tickets
may bypass it for a number of times and for a time, which are settings. Then the ticket is *aged*,
and stands before every ticket that is not.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from arbiter.core.types import ModelName, Priority
from arbiter.core.view import Key, QueuedRequest
from arbiter.units import Bytes, HolderId, Instant, NodeId, TicketId

NO_HOLDER = HolderId("")
# Before every priority: an asleep ticket is tried by itself, because it wakes where it is.
WAKE_URGENCY = 0


@dataclass(slots=True)
class QueueEntry:
    """Describes one queued ticket and its place."""

    request: QueuedRequest
    key: Key  # its place in the order
    model: ModelName  # what the per-model bound counts
    node: NodeId
    deadline: Instant | None
    holder: HolderId = NO_HOLDER
    is_plain: bool = True  # a new load that is of no gang
    is_first: bool = False  # the lease of `arbiter free`, which stands before all others
    predicted_at: Instant | None = None  # when it should serve, as estimated when it joined
    bypassed_count: int = 0
    is_aged: bool = False
    need_bytes: Bytes = Bytes(0)  # by the estimates of `estimates_version`
    quota_group: str = ""  # of its tenant: see quotas.quota_group
    tenant: str = ""  # the tenant that asked, whose turn a grant costs
    work_bytes: float = 0.0  # its need by the share of its tenant: see Accounts.virtual_start_of
    estimates_version: int = -1  # that gave `need_bytes`; -1: none has yet
    is_held: bool = False  # outside its hours: not tried (C13)
    ages_from: Instant | None = None  # when its hours began; None: it ages from its request on

    def note_hours(self, *, is_held: bool, now: Instant) -> None:
        """Notes whether it is held outside its hours. Its wait counts anew once it is not."""
        if self.is_held and not is_held:
            self.ages_from = now
        self.is_held = is_held

    def expect(self, serves_at: Instant) -> None:
        """Notes when it should serve, as estimated when it joins."""
        self.predicted_at = serves_at

    def note_need(self, need: Bytes, version: int) -> None:
        """Notes what it needs by this version of the estimates."""
        self.need_bytes = need
        self.estimates_version = version


@dataclass(slots=True)
class QueueStats:
    """Keeps what is known of all queued tickets of one node, so that a long queue need not be
    walked."""

    urgencies: Counter[int] = field(default_factory=Counter)  # tickets by `urgency_of`
    estimates_version: int = -1
    known_count: int = 0  # tickets whose need is known by that version of the estimates
    least_bytes: Bytes = Bytes(0)  # no ticket whose need is known needs less
    quota_groups: Counter[str] = field(default_factory=Counter)  # tickets by quota group
    holders: dict[HolderId, int] = field(default_factory=dict)  # tickets by holder
    held_count: int = 0  # tickets that are held outside their hours

    def count(self, queued: QueueEntry, more: int) -> None:
        """Counts a ticket that joins (1) or leaves (-1)."""
        self.urgencies[urgency_of(queued.request)] += more
        self.quota_groups[queued.quota_group] += more
        self.held_count += more * queued.is_held
        if theirs := self.holders.get(queued.holder, 0) + more:
            self.holders[queued.holder] = theirs
        else:
            del self.holders[queued.holder]
        if queued.estimates_version == self.estimates_version:
            self.known_count += more
            self.least_bytes = min(self.least_bytes, queued.need_bytes)

    def note_need(self, queued: QueueEntry, need: Bytes, version: int) -> None:
        """Notes what a ticket needs by this version of the estimates; a newer version makes all
        other needs unknown."""
        if version != self.estimates_version:
            self.estimates_version = version
            self.known_count = 0
            self.least_bytes = need
        self.known_count += queued.estimates_version != version
        self.least_bytes = min(self.least_bytes, need)
        queued.need_bytes = need
        queued.estimates_version = version

    def needs_at_least(self, need: Bytes, version: int) -> bool:
        """Says whether every ticket needs at least `need` bytes; False while one's need is not
        known by this version of the estimates."""
        is_known = self.estimates_version == version and self.known_count == self.urgencies.total()
        return is_known and self.least_bytes >= need

    def is_of_one_quota_group(self) -> bool:
        """Says whether all tickets are of one tenant with a quota, or all of tenants without."""
        return sum(1 for count in self.quota_groups.values() if count) == 1


def urgency_of(request: QueuedRequest) -> int:
    """Returns the priority as a number; a wake comes before every priority."""
    return WAKE_URGENCY if request.is_asleep else int(request.priority)  # an enum hashes slowly


class RequestQueue:
    """Orders queued tickets per node and keeps the indexes that rules ask for."""

    def __init__(self, place_of: Callable[[QueuedRequest], Key]) -> None:
        self._place_of = place_of
        self._queued: dict[TicketId, QueueEntry] = {}
        self._order: dict[NodeId, list[tuple[Key, TicketId, QueueEntry]]] = {}  # no two tickets tie
        self._walked: set[NodeId] = set()  # nodes of which `walk` goes through the order now
        self._stats: dict[NodeId, QueueStats] = {}
        self._of_model: dict[ModelName, dict[TicketId, None]] = {}
        self._of_model_on: dict[tuple[NodeId, ModelName], dict[TicketId, None]] = {}
        self._nodes_of_group: dict[str, Counter[NodeId]] = {}  # by quota group
        self._loads: Counter[tuple[NodeId, ModelName]] = Counter()  # in flight
        self._copies: dict[NodeId, frozenset[ModelName]] = {}  # whose files are in host RAM
        self._sequence = 0
        self.dirty: set[NodeId] = set()

    def clean(self) -> None:
        """Forgets which nodes were dirty: a grant pass looks at all of them now."""
        self.dirty = set()

    # -- coming and going ----------------------------------------------------------------------

    def add(
        self,
        ticket_id: TicketId,
        model: ModelName,
        node: NodeId,
        now: Instant,
        deadline: Instant | None = None,
        priority: Priority = Priority.NORMAL,
        *,
        holder: HolderId = NO_HOLDER,
        is_of_gang: bool = False,
        is_first: bool = False,
        is_asleep: bool = False,
        virtual_start_bytes: Bytes = Bytes(0),
        quota_group: str = "",
        tenant: str = "",
        work_bytes: float = 0.0,
    ) -> QueueEntry:
        """Queues a ticket and returns its entry. `is_asleep`: it waits to be woken. `is_first`: it
        stands before every ticket that is not, aged or not."""
        self._sequence += 1
        is_warm = is_asleep or self._is_warm(node, model)
        request = QueuedRequest(
            ticket_id, now, self._sequence, priority, is_warm, is_asleep, virtual_start_bytes
        )
        queued = QueueEntry(
            request,
            (),
            model,
            node,
            deadline,
            holder,
            not (is_asleep or is_of_gang),
            is_first,
            quota_group=quota_group,
            tenant=tenant,
            work_bytes=work_bytes,
        )
        self._queued[ticket_id] = queued
        self._of_model.setdefault(model, {})[ticket_id] = None
        self._of_model_on.setdefault((node, model), {})[ticket_id] = None
        self._count_in_group(queued, 1)
        self._insert(queued)
        return queued

    def drop(self, ticket_id: TicketId) -> None:
        """Takes a ticket out; safe for a ticket that is not queued."""
        if queued := self._queued.pop(ticket_id, None):
            self._remove(queued)
            model = queued.model
            place = (queued.node, model)
            del self._of_model[model][ticket_id], self._of_model_on[place][ticket_id]
            if not self._of_model_on[place]:
                del self._of_model_on[place]
            if not self._of_model[model]:
                del self._of_model[model]
            self._count_in_group(queued, -1)

    def _insert(self, queued: QueueEntry) -> None:
        request = queued.request
        place = (request.asked_at, request.sequence) if queued.is_aged else self._place_of(request)
        queued.key = (not queued.is_first, not queued.is_aged, *place)
        insort(self._own_order(queued.node), (queued.key, request.ticket, queued))
        if queued.node not in self._stats:
            self._stats[queued.node] = QueueStats()
        self._stats[queued.node].count(queued, 1)
        self.dirty.add(queued.node)

    def _remove(self, queued: QueueEntry) -> None:
        order = self._own_order(queued.node)
        del order[bisect_left(order, (queued.key, queued.request.ticket))]
        self._stats[queued.node].count(queued, -1)
        if not order:
            del self._order[queued.node], self._stats[queued.node]
        self.dirty.add(queued.node)

    def _own_order(self, node: NodeId) -> list[tuple[Key, TicketId, QueueEntry]]:
        """Returns the order of a node, which the caller may change: a copy of it while `walk` goes
        through it."""
        order = self._order.setdefault(node, [])
        if node in self._walked:
            self._walked.discard(node)
            order = self._order[node] = list(order)
        return order

    # -- moving up -----------------------------------------------------------------------------

    def raise_priority(self, ticket_id: TicketId, priority: Priority) -> None:
        """Moves a ticket up, because a more urgent request waits for it too."""
        queued = self._queued[ticket_id]
        self._change(queued, queued.request._replace(priority=priority))

    def extend_deadline(self, ticket_id: TicketId, deadline: Instant | None) -> None:
        """Lets a ticket wait until this deadline if that is later, because another request waits
        for it as well; None: as long as it takes."""
        queued = self._queued[ticket_id]
        if queued.deadline is not None and (deadline is None or deadline > queued.deadline):
            queued.deadline = deadline

    def change_quota_group(self, ticket_id: TicketId, quota_group: str) -> None:
        """Notes that a ticket is another tenant's; safe for a ticket that is not queued. Its place
        in the order stays that of the tenant that asked."""
        queued = self._queued.get(ticket_id)
        if queued is None or queued.quota_group == quota_group:
            return
        self._remove(queued)
        self._count_in_group(queued, -1)
        queued.quota_group = quota_group
        self._count_in_group(queued, 1)
        self._insert(queued)

    def _count_in_group(self, queued: QueueEntry, more: int) -> None:
        if queued.quota_group not in self._nodes_of_group:
            self._nodes_of_group[queued.quota_group] = Counter()
        where = self._nodes_of_group[queued.quota_group]
        where[queued.node] += more
        if not where[queued.node]:
            del where[queued.node]

    def hold(self, queued: QueueEntry, *, is_held: bool, now: Instant) -> None:
        """Notes whether a ticket is held outside its hours. Its wait counts anew once it is
        not."""
        self._stats[queued.node].held_count += is_held - queued.is_held
        queued.note_hours(is_held=is_held, now=now)

    def note_loading(self, node: NodeId, model: ModelName, more: int) -> None:
        """Notes that a load of a model begins (1) or ends (-1): tickets for it are warm meanwhile
        (C6)."""
        self._loads[node, model] += more
        if not self._loads[node, model]:
            del self._loads[node, model]
        self._update_warmth(node, model)

    def note_copies(self, node: NodeId, models: frozenset[ModelName]) -> None:
        """Notes the models whose files a node has in host RAM: tickets for these are warm (C6)."""
        before = self._copies.pop(node, frozenset())
        if models:
            self._copies[node] = models
        for model in sorted(before ^ models):
            self._update_warmth(node, model)

    def _is_warm(self, node: NodeId, model: ModelName) -> bool:
        has_load = (node, model) in self._loads
        return has_load or model in self._copies.get(node, frozenset())

    def _update_warmth(self, node: NodeId, model: ModelName) -> None:
        is_warm = self._is_warm(node, model)
        for ticket_id in list(self._of_model_on.get((node, model), ())):
            queued = self._queued[ticket_id]
            request = queued.request
            if not request.is_asleep and request.is_warm != is_warm:
                self._change(queued, request._replace(is_warm=is_warm))

    def count_bypasses(self, bypassed: list[QueueEntry], most_count: int) -> bool:
        """Counts for each of these that a later ticket was granted first; at `most_count` a ticket
        is aged. Says whether one was."""
        aged = []
        for queued in bypassed:
            queued.bypassed_count += 1
            if queued.bypassed_count >= most_count:
                aged.append(queued)
        for queued in aged:
            self.age(queued)
        return bool(aged)

    def age(self, queued: QueueEntry) -> None:
        """Puts a ticket before all that are not aged: no later ticket bypasses it any more."""
        if not queued.is_aged:
            self._remove(queued)
            queued.is_aged = True
            self._insert(queued)

    def _change(self, queued: QueueEntry, request: QueuedRequest) -> None:
        self._remove(queued)
        queued.request = request
        self._insert(queued)

    # -- looking -------------------------------------------------------------------------------

    def is_ahead(self, ticket_id: TicketId, other: TicketId) -> bool:
        """Says whether `ticket_id` comes before `other`; both wait on one node."""
        return (self._queued[ticket_id].key, ticket_id) < (self._queued[other].key, other)

    def find(self, ticket_id: TicketId) -> QueueEntry | None:
        """Returns the entry of a ticket; None when it is not queued."""
        return self._queued.get(ticket_id)

    def at(self, node: NodeId) -> list[QueueEntry]:
        """Returns the entries of a node, first to last."""
        return [queued for _, _, queued in self._order.get(node, ())]

    def asked_before(self, node: NodeId, sequence: int) -> list[QueueEntry]:
        """Returns the entries of a node that asked no later than the one of this sequence, first to
        last."""
        order = self._order.get(node, ())
        return [queued for _, _, queued in order if queued.request.sequence <= sequence]

    def walk(self, node: NodeId) -> Iterator[QueueEntry]:
        """Yields the entries of a node as they stand when the walk begins; an entry that has left
        meanwhile is left out. Most walks end soon, so the order is copied only when it changes
        under a walk."""
        is_first = node not in self._walked
        self._walked.add(node)
        try:
            for _, ticket_id, _ in self._order.get(node, ()):
                if queued := self._queued.get(ticket_id):
                    yield queued
        finally:
            if is_first:
                self._walked.discard(node)

    def nodes_of_quota_group(self, quota_group: str) -> list[NodeId]:
        """Returns the nodes on which a ticket of this quota group waits."""
        return list(self._nodes_of_group.get(quota_group, ()))

    def first(self, node: NodeId, count: int) -> list[QueueEntry]:
        """Returns the first entries of a node, at most `count`."""
        return [queued for _, _, queued in self._order.get(node, [])[:count]]

    def ahead_count(self, queued: QueueEntry) -> int:
        """Returns how many tickets stand before this entry on its node."""
        return bisect_left(self._order[queued.node], (queued.key, queued.request.ticket))

    def recompute_least_need(self, node: NodeId) -> None:
        """Computes the least need on a node anew, from all entries: the ticket that needed the
        least may have left."""
        stats = self.stats(node)
        needs = [
            entry.need_bytes
            for entry in self.at(node)
            if entry.estimates_version == stats.estimates_version
        ]
        stats.least_bytes = min(needs, default=Bytes(0))

    def stats(self, node: NodeId) -> QueueStats:
        """Returns the statistics of a node."""
        return self._stats.get(node) or QueueStats()

    def is_empty(self, node: NodeId) -> bool:
        """Says whether no ticket waits on a node."""
        return node not in self._order

    def of_model(self, model: ModelName) -> list[TicketId]:
        """Returns the queued tickets of a model."""
        return list(self._of_model.get(model, ()))

    def tickets(self) -> list[TicketId]:
        """Returns all queued tickets, first to last as if they stood in one queue."""
        return [t for _, t, _ in sorted(row for order in self._order.values() for row in order)]

    @property
    def nodes(self) -> list[NodeId]:
        """Returns the nodes on which a ticket waits."""
        return list(self._order)

    def has_free(self) -> bool:
        """Says whether some queued ticket, on any node, is not held outside its hours (C13)."""
        return len(self._queued) > sum(stats.held_count for stats in self._stats.values())

    def count(self, model: ModelName) -> int:
        """Returns how many tickets wait for a model."""
        return len(self._of_model.get(model, ()))

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, ticket_id: TicketId) -> bool:
        return ticket_id in self._queued
