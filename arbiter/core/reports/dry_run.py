"""Says what a request would bring about, and changes nothing (K3).

The answer is the core's own: a copy of the state is given the request, and what it decides is read.
So a dry run needs no rule of its own and cannot disagree with what a request then gets. A copy
takes 22 ms with 500 models resident (benchmarks/dry_run.py).
"""

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, EventKind, Grant, LogEvent, Reason, Refuse, Tier
from arbiter.core.eviction.ranking import effective_priority, reload_span
from arbiter.core.queue import freeing, wait_estimate
from arbiter.core.records.eviction_history import EvictionHistory
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.reports.explain import explain
from arbiter.core.reports.plan import (
    COMPACTED,
    Answer,
    Plan,
    PlanQuestion,
    PlanVictim,
    StayingTicket,
    stays_sentence,
    victim_sentence,
)
from arbiter.core.state import CoreState
from arbiter.core.tickets import leases
from arbiter.core.tickets.lendable_devices import COMPUTE, compute_books, unpinned_bytes
from arbiter.core.types import LEASE
from arbiter.core.view import Policies
from arbiter.errors import QuotaExceeded, RequestError
from arbiter.units import Bytes, HolderId, Instant, NodeId, Span, TicketId, human, since
from arbiter.units import seconds as span_of

TICKET, HOLDER = TicketId("dry run"), HolderId("dry run")  # no client and no replica has such names
# Nodes tried, the likeliest first, each with a copy of its own: the arbiter answers nothing else
# meanwhile. The best answer counts.
ATTEMPTS_COUNT = 4

Step = Callable[[CoreState, ev.Event, Instant], list[Decision]]  # `Arbiter.handle` on a state


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Describes the holder and the node with which one attempt is made."""

    holder: HolderId
    node: NodeId
    is_new: bool  # this holder has not joined


def plan(state: CoreState, question: PlanQuestion, now: Instant, step: Step) -> Plan:
    """Returns what the request would bring about at `now`. `state` stays as it is."""
    resident = _find_ticket(state, question)
    if resident and resident.state is State.RESIDENT and resident.id not in state.queue:
        return _resident(state, question, resident)
    attempts = _attempts(state, question, resident)
    if not attempts:
        sentences = ("No node agent has introduced a device that it could go to.",)
        return _waiting(question, None, None, sentences)
    frozen = _freeze(state)
    plans = []
    for attempt in attempts[:ATTEMPTS_COUNT]:
        plans.append(_try(state, frozen, question, attempt, resident, now, step))
        if plans[-1].answer is Answer.NOW:
            break
    best = min(plans, key=_rank)
    if best.answer is Answer.NOW or len(attempts) <= ATTEMPTS_COUNT:
        return best
    left_out = f"Of {len(attempts)} nodes only the {ATTEMPTS_COUNT} with the most room were tried."
    return replace(best, sentences=(*best.sentences, left_out))


def _rank(candidate: Plan) -> tuple[int, int, int]:
    """Orders plans, best first: by answer, by what reloads cost, by the wait."""
    reload_ns = sum(v.reload for v in candidate.victims)
    return [*Answer].index(candidate.answer), reload_ns, candidate.wait or 0


# -- who asks, and the copy ------------------------------------------------------------------------


def _find_ticket(state: CoreState, question: PlanQuestion) -> Ticket | None:
    """Returns the ticket that a request for this model would find, that which is soonest ready;
    None when there is none."""
    order = (State.RESIDENT, State.LOADING, State.ASLEEP, State.QUEUED, State.DRAINING)
    tickets = [
        t
        for t in state.ledger.tickets(*order)
        if not t.lease
        and t.model_name == question.name
        and question.holder in (None, t.holder)
        and question.node in (None, t.node)
    ]
    return min(tickets, key=lambda t: order.index(t.state), default=None)


def _attempts(state: CoreState, question: PlanQuestion, resident: Ticket | None) -> list[_Attempt]:
    """Returns the holders and nodes that the request could go to, those with the most room first:
    holders that have joined, or where there is none a new holder on each node."""
    if resident is not None:
        return [_Attempt(resident.holder, resident.node, False)]
    able: dict[NodeId, _Attempt] = {}
    for holder in state.holders.values():
        is_asked = question.holder in (None, holder.holder) and question.node in (None, holder.node)
        is_able = holder.capability == question.capability and not question.lease
        if is_asked and is_able and (question.holder or not state.is_silent(holder.holder)):
            able.setdefault(holder.node, _Attempt(holder.holder, holder.node, False))
    nodes = [n for n in sorted(state.nodes) if question.node in (None, n)]
    unjoined = [_Attempt(question.holder or HOLDER, node, True) for node in nodes]
    return sorted([*able.values()] or unjoined, key=lambda a: _by_room(state, question, a.node))


def _by_room(state: CoreState, question: PlanQuestion, name: NodeId) -> tuple[bool, int, NodeId]:
    """Orders nodes: those that can ever lend as much, then by what is free there."""
    node = state.nodes.get(name)
    books = compute_books(state, node) if node else []
    total = max if question.split is types.Split.NONE else sum
    most, free = total([0, *map(unpinned_bytes, books)]), total([0, *(b.free_bytes for b in books)])
    return most < question.need.device_bytes, -free, name


def _freeze(state: CoreState) -> bytes:
    """Returns the state as bytes, from which each copy is made, without what no request reads: the
    evictions and answers remembered for people, but for the answers that gangs wait for."""
    bare = copy.copy(state)
    queued = (state.ledger.find(ticket_id) for ticket_id in state.queue.tickets())
    gangs = [t.gang for t in queued if t and t.gang]
    named = [t for gang in gangs for t in gang if t in state.answers]
    bare.answers = OrderedDict((t, state.answers[t]) for t in named)
    bare.evictions = EvictionHistory()
    bare.foresight = None  # a function of the replay around this state
    bare.decisions = []
    frozen = io.BytesIO()
    _Freezer(frozen, state.policies).dump(bare)
    return frozen.getvalue()


def _shared(policies: Policies) -> dict[str, object]:
    """Returns what copies share, by name: the policies, each of which others may hold as well."""
    return {"policies": policies} | {f.name: getattr(policies, f.name) for f in fields(policies)}


class _Freezer(pickle.Pickler):
    """Leaves policies out, which a copy shares: a policy may be any function."""

    def __init__(self, to: io.BytesIO, policies: Policies) -> None:
        super().__init__(to, pickle.HIGHEST_PROTOCOL)
        self._names = {id(policy): name for name, policy in _shared(policies).items()}

    def reducer_override(self, obj: object) -> Any:
        name = self._names.get(id(obj))
        return NotImplemented if name is None else (_find_shared, (name,))


def _find_shared(name: str) -> object:
    """Stands for the policy of this name in frozen bytes; `_Thawer` looks it up itself."""
    raise LookupError(name)


class _Thawer(pickle.Unpickler):
    """Puts the policies back that `_Freezer` left out."""

    def __init__(self, frozen: bytes, policies: Policies) -> None:
        super().__init__(io.BytesIO(frozen))
        self._policies = _shared(policies)

    def find_class(self, module: str, name: str) -> object:
        if name == _find_shared.__name__:
            return self._policies.__getitem__
        return super().find_class(module, name)


def _try(
    state: CoreState,
    frozen: bytes,
    question: PlanQuestion,
    attempt: _Attempt,
    resident: Ticket | None,
    now: Instant,
    step: Step,
) -> Plan:
    """Gives the request to one copy of the state, from one attempt, and returns what came of it."""
    copied: CoreState = _Thawer(frozen, state.policies).load()
    copied.foresight = state.foresight
    if attempt.is_new:
        role = LEASE if question.lease else question.capability
        step(copied, ev.Joined(attempt.holder, attempt.node, role, ()), now)
    ticket_id, need = (resident.id, resident.need) if resident else (TICKET, question.need)
    request = _request(question, attempt, ticket_id, need)
    decisions = step(copied, request, now)
    return _AttemptResult(state, copied, question, attempt, request.ticket, decisions).plan()


def _request(
    question: PlanQuestion, attempt: _Attempt, ticket_id: TicketId, need: types.Need
) -> ev.Requested:
    """Returns the event by which the request reaches the core."""
    return ev.Requested(
        ticket_id,
        attempt.holder,
        question.capability,
        question.model,
        need,
        question.settings_key,
        question.need_is_explicit,
        priority=question.priority,
        client=question.client,
        split=question.split,
        lease=question.lease,
    )


# -- what came of it -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AttemptResult:
    """Makes a plan from what the copy of one attempt has decided."""

    state: CoreState  # as it is
    copied: CoreState  # as it would be
    question: PlanQuestion
    attempt: _Attempt
    ticket: TicketId
    decisions: list[Decision]

    def plan(self) -> Plan:
        """Returns the answer."""
        for decision in self.decisions:
            if isinstance(decision, Grant) and decision.ticket == self.ticket:
                return self._granted(decision)
            if isinstance(decision, Refuse) and decision.ticket == self.ticket:
                return self._refused(decision.error)
        ticket = self.copied.ledger.find(self.ticket)
        assert ticket is not None, "a request was neither answered nor queued"
        if victims := tuple(self._victims()):
            return self._evicting(ticket, victims)
        sentences = explain(self.copied, self.ticket, self.copied.now).sentences
        return self._plan(
            Answer.NOT_BEFORE, sentences=sentences, wait=self._wait(ticket), ticket=ticket
        )

    def _granted(self, grant: Grant) -> Plan:
        """Returns the plan of a request that is granted at once."""
        ticket = self.copied.ledger.find(self.ticket)
        assert ticket is not None
        on = ", ".join(f"{human(d.size_bytes)} on {d.device}" for d in grant.devices)
        return self._plan(
            Answer.NOW,
            sentences=(f"Now: {on}; nothing leaves for it.",),
            wait=Span(0),
            load=grant.predicted,
            goes_to=grant.devices,
            ticket=ticket,
        )

    def _refused(self, error: RequestError) -> Plan:
        """Returns the plan of a request that is refused, for now or for good."""
        passes = error.retry_after_s is not None and not _is_beyond_bound(error)
        wait = span_of(error.retry_after_s) if passes and error.retry_after_s else None
        answer = Answer.NOT_BEFORE if passes else Answer.NEVER
        return self._plan(answer, sentences=(f"{error}.",), wait=wait, code=error.code)

    def _evicting(self, ticket: Ticket, victims: tuple[PlanVictim, ...]) -> Plan:
        """Returns the plan of a request for which others leave."""
        return self._plan(
            Answer.AFTER_EVICTING,
            sentences=tuple(victim_sentence(v) for v in victims),
            wait=self._wait(ticket),
            goes_to=self._promised(ticket),
            victims=victims,
            ticket=ticket,
        )

    def _plan(
        self,
        answer: Answer,
        *,
        sentences: tuple[str, ...],
        wait: Span | None,
        load: Span | None = None,
        goes_to: tuple[types.DeviceBytes, ...] = (),
        victims: tuple[PlanVictim, ...] = (),
        code: str | None = None,
        ticket: Ticket | None = None,
    ) -> Plan:
        """Returns a plan of this attempt. `ticket`: the request's, in the copy; None where it was
        refused."""
        if load is None:
            load = wait_estimate.load_span(self.copied, ticket) if ticket else Span(0)
        stays = self._stays(ticket)
        return Plan(
            answer,
            self.question.capability,
            self.question.model,
            self._need(ticket),
            self.attempt.node,
            goes_to,
            victims,
            wait,
            load,
            is_resident=False,
            starts_replica=self.attempt.is_new and not self.question.lease,
            code=code,
            sentences=(*sentences, *map(stays_sentence, stays)),
            stays=stays,
        )

    def _stays(self, ticket: Ticket | None) -> tuple[StayingTicket, ...]:
        """Returns what `arbiter free` would leave where it is; nothing for any other request."""
        terms, copied = self.question.lease, self.copied
        if terms is None or not terms.frees:
            return ()
        request = _request(self.question, self.attempt, self.ticket, self.question.need)
        asker = ticket or leases.new_ticket(
            copied, copied.holders[self.attempt.holder], request, terms
        )
        return tuple(
            StayingTicket(t.id, t.model, self._listed(t), why)
            for t, why in freeing.staying(copied, asker)
            if not t.leaving
        )

    def _need(self, ticket: Ticket | None) -> Bytes:
        """Returns the bytes that the request would be granted, as far as the grant pass has
        computed them."""
        queued = self.copied.queue.find(self.ticket)
        if ticket is not None and ticket.home:
            return ticket.granted_home_bytes
        declared_bytes = ticket.need.device_bytes if ticket else self.question.need.device_bytes
        return (queued.need_bytes if queued else None) or declared_bytes

    def _wait(self, ticket: Ticket) -> Span | None:
        """Returns until its load may begin, as the core would tell its holder."""
        queued = self.copied.queue.find(self.ticket)
        if not self.copied.is_settled:
            return since(self.copied.now, self.copied.settled_at)
        if queued is None:
            return None
        until_served = wait_estimate.estimated_wait(self.copied, ticket, queued)
        if until_served is None:
            return None
        return Span(max(0, until_served - wait_estimate.load_span(self.copied, ticket)))

    def _promised(self, ticket: Ticket) -> tuple[types.DeviceBytes, ...]:
        """Returns where room is made: its home when it wakes, else the devices of its evictions."""
        if ticket.home:
            return tuple(types.DeviceBytes(d, size) for d, size in sorted(ticket.home.items()))
        devices = sorted({c.device for c in self.copied.evictions.about(self.ticket)})
        if len(devices) != 1:  # an exclusion group, or several parts, whose sizes only a grant says
            return ()
        return (types.DeviceBytes(devices[0], self._need(ticket)),)

    def _victims(self) -> Iterator[PlanVictim]:
        """Yields the models that would leave for the request: those revoked, and prefetches
        abandoned."""
        events = [d for d in self.decisions if isinstance(d, LogEvent)]
        revoked = [
            d.ticket
            for d in events
            if d.kind is EventKind.EVICTION and d.data.get("waiting") == self.ticket
        ]
        for ticket_id in [*revoked, *self._abandoned()]:
            before = self.state.ledger.find(ticket_id) if ticket_id else None
            if before is not None:
                yield self._victim(before)

    def _abandoned(self) -> list[TicketId]:
        """Returns prefetches that would be given up for it."""
        was = {t.id for t in self.state.ledger.tickets(State.LOADING) if t.is_prefetch}
        ending = self.copied.ledger.tickets(State.RECLAIMING)
        return [t.id for t in ending if t.id in was and t.leaving is Reason.WITHDRAWN]

    def _listed(self, ticket: Ticket) -> tuple[types.DeviceBytes, ...]:
        """Returns what a ticket is charged on devices that compute."""
        books = self.copied.ledger.books
        devices = [d for d in sorted(ticket.devices) if d in books and books[d].kind in COMPUTE]
        return tuple(types.DeviceBytes(d, ticket.charge(d)) for d in devices)

    def _victim(self, before: Ticket) -> PlanVictim:
        """Describes a model that would leave, as it is before that."""
        state = self.state
        left = self.copied.ledger.find(before.id)
        sleeps = left is not None and left.revocation and left.revocation.to is Tier.ASLEEP
        is_compacted = left is not None and left.leaving is Reason.COMPACT
        goes = COMPACTED if is_compacted else (Tier.ASLEEP if sleeps else Tier.GONE).value
        return PlanVictim(
            before.id,
            before.capability,
            before.model,
            before.state.value,
            self._listed(before),
            goes,
            reload_span(state, before),
            before.inflight,
            Span(0) if before.inflight else since(before.last_used, self.copied.now),
            effective_priority(state, before).name.lower(),
            before.client.tenant,
            before.client.name,
        )


def _is_beyond_bound(error: RequestError) -> bool:
    """Says whether a tenant asks for more than it may ever have: time does not mend that."""
    return isinstance(error, QuotaExceeded) and error.wants > error.bound


def _resident(state: CoreState, question: PlanQuestion, resident: Ticket) -> Plan:
    """Returns the plan of a request whose model is resident."""
    home = tuple(types.DeviceBytes(d, size) for d, size in sorted(resident.home.items()))
    sentences = (f"It is resident ({resident.id}), and serves at once.",)
    none: tuple[PlanVictim, ...] = ()
    return Plan(
        Answer.NOW,
        question.capability,
        question.model,
        resident.granted_home_bytes,
        resident.node,
        home,
        none,
        Span(0),
        Span(0),
        is_resident=True,
        starts_replica=False,
        code=None,
        sentences=sentences,
    )


def _waiting(
    question: PlanQuestion, node: NodeId | None, wait: Span | None, sentences: tuple[str, ...]
) -> Plan:
    """Returns the plan of a request that no attempt could be made for."""
    return Plan(
        Answer.NOT_BEFORE,
        question.capability,
        question.model,
        question.need.device_bytes,
        node,
        (),
        (),
        wait,
        Span(0),
        is_resident=False,
        starts_replica=False,
        code=None,
        sentences=sentences,
    )
