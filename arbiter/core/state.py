"""What the arbiter knows between two events, and what it has decided during this one.

The rules are functions over a Mind, one file per idea. They read it, move tickets through
`state.ledger`, and say what must be done with `state.decide`. Plain data: it pickles half way.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, LogEvent, Refuse
from arbiter.core.records.accounts import Accounts
from arbiter.core.records.estimates import Estimates, ModelKey
from arbiter.core.records.eviction_history import EvictionHistory
from arbiter.core.records.ledger import Ledger
from arbiter.core.records.registry import Registry
from arbiter.core.records.request_queue import RequestQueue
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.records.timers import Timers
from arbiter.core.records.usage_rates import HourlyUsage, UsageRates
from arbiter.core.settings import Settings
from arbiter.core.view import Policies
from arbiter.errors import RequestError, TicketClosed
from arbiter.units import (
    Bytes,
    DeviceId,
    Epoch,
    HolderId,
    Instant,
    NodeId,
    Span,
    TicketId,
    after,
)


@dataclass(slots=True)
class Holder:
    holder: HolderId
    node: NodeId
    capability: str
    heard: Instant
    is_driver: bool = False


@dataclass(slots=True)
class Unclaimed:
    """An engine measured on a node whose ticket nobody has named."""

    measured: Sizes
    first_seen: Instant
    is_ending: bool = False  # told, and ended with each reading until it is gone


@dataclass(slots=True)
class Node:
    node: NodeId
    devices: dict[DeviceId, types.DeviceSpec]
    heard: Instant | None = None  # last full reading in this epoch
    silent_told: bool = False
    readings: dict[DeviceId, ev.DeviceReading] = field(default_factory=dict)
    unclaimed: dict[TicketId, Unclaimed] = field(default_factory=dict)
    unreadable: dict[DeviceId, str] = field(default_factory=dict)  # its devices, and the cause
    inexact: frozenset[DeviceId] = frozenset()  # of its devices, see rules.inexact
    computing: tuple[DeviceId, ...] = ()  # of its devices, those that compute

    def __post_init__(self) -> None:
        hosts = types.DeviceKind.HOST
        self.computing = tuple(d for d, spec in self.devices.items() if spec.kind is not hosts)


@dataclass(slots=True)
class PressureState:
    """How short of real memory a device is, and what was done about it (C5)."""

    level: types.Level = types.Level.NOMINAL  # the worst of these two
    measured: types.Level = types.Level.NOMINAL
    pushed: types.Level = types.Level.NOMINAL
    pushed_until: Instant | None = None
    free_bytes: Bytes = Bytes(0)
    acts_at: Instant | None = None  # the next tick
    nothing_left: bool = False  # told once, until the level changes


@dataclass(slots=True)
class Failure:
    """A model that did not load: nobody tries again before `until`."""

    cause: str
    times_count: int
    until: Instant


@dataclass(slots=True)
class EvictedFor:
    """Models that made room for a load which has not succeeded yet (A12)."""

    models: dict[tuple[HolderId, str], TicketId] = field(default_factory=dict)
    restore_at: Instant | None = None  # the load failed for memory; unless it is tried again


EvictedForKey = tuple[HolderId, str]  # for whom: holder and model
Foresight = Callable[[str, str, Instant], Instant | None]  # capability and model


def model_label(capability: str, model: str) -> str:
    return f"{capability}/{model}"


class CoreState:
    def __init__(
        self,
        settings: Settings,
        policies: Policies,
        epoch: Epoch,
        known_holders: frozenset[HolderId],
        now: Instant,
    ) -> None:
        self.settings, self.policies, self.epoch = settings, policies, epoch
        self.ledger = Ledger()
        self.registry = Registry(tuple(sorted(policies.roles)))
        self.estimates = Estimates(settings)
        self.rates = UsageRates(settings.rate_window)
        self.lasting_rates = UsageRates(settings.lasting_window)
        self.hours = HourlyUsage(now)
        self.evictions = EvictionHistory()
        self.rankings: dict[DeviceId, Any] = {}  # of large devices; see ranking.Ranking
        self.foresight: Foresight | None = None  # a replay's knowledge of when a model is next used
        self.accounts = Accounts(settings.quota_window, settings.accounts_most_count)
        self.tenants = {terms.tenant: terms for terms in settings.tenants}
        self.timers = Timers()
        self.queue = RequestQueue(policies.admit)
        self.holders: dict[HolderId, Holder] = {}
        self.nodes: dict[NodeId, Node] = {}
        self.uses_this_event: list[
            tuple[tuple[str, str], NodeId]
        ] = []  # in this event; see preload
        self.last_used: tuple[tuple[str, str], Instant] | None = None
        self.transition_counts: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
        self.prefetched: dict[tuple[str, str], Instant] = {}  # brought in unasked, not used yet
        self.floors: dict[tuple[str, str], types.Floor] = {}  # by capability and model
        self.wanted: dict[tuple[str, str], None] = {}  # to be loaded by the first who can
        self.removing: dict[tuple[str, str], None] = {}  # no longer in the table, still held
        self.growing: dict[TicketId, None] = {}  # residents that wait for more, in order
        self.pressure: dict[DeviceId, PressureState] = {}
        self.failures: dict[tuple[str, str], Failure] = {}
        self.last_home: dict[tuple[NodeId, str, str], DeviceId] = {}  # of capability and model
        self.evicted_for: dict[EvictedForKey, EvictedFor] = {}
        self.active: dict[str, Instant] = {}  # capability: a ticket or holder of it last seen
        self.answers: OrderedDict[TicketId, RequestError] = OrderedDict()
        self.broken_loads: OrderedDict[TicketId, Ticket] = OrderedDict()
        self.awaited = set(known_holders)  # of the last epoch, not back yet
        self.fresh: list[TicketId] = []  # joined the line in this step
        self.born = now
        self.settled_at = after(now, settings.timeouts.rejoin if known_holders else Span(0))
        self.closing_by: Instant | None = None
        self.stale_count = 0
        self.now = now
        self.out: list[Decision] = []

    # -- saying --------------------------------------------------------------------------------

    def decide(self, decision: Decision) -> None:
        self.out.append(decision)

    def log(
        self,
        kind: str,
        entry: Ticket | None = None,
        *,
        size: Bytes | None = None,
        took: Span | None = None,
        **data: str | int | float | bool | None,
    ) -> None:
        """One line of the event log."""
        ticket = None
        if entry is not None:
            ticket = entry.ticket
            data = {
                "holder": entry.holder,
                "capability": entry.capability,
                "model": entry.model,
                **data,
            }
        self.decide(LogEvent(kind, data, ticket, size, took))

    def answer_error_finally(self, ticket: TicketId, error: RequestError) -> None:
        """An answer for good: asking again under this ticket repeats it."""
        self.remember(ticket, error)
        self.answer_error(ticket, error)

    def answer_error(self, ticket: TicketId, error: RequestError) -> None:
        self.decide(Refuse(ticket, error))
        self.decide(LogEvent("ticket_refused", {"code": error.code, "cause": str(error)}, ticket))

    def remember(self, ticket: TicketId, error: RequestError) -> None:
        self.answers[ticket] = error
        if len(self.answers) > self.settings.remembered_count:
            self.answers.popitem(last=False)

    # -- finding -------------------------------------------------------------------------------

    def live(self, ticket: TicketId, *states: State, by: HolderId | None = None) -> Ticket | None:
        """The ticket if it is in one of these states, and of the holder that speaks of it, if that
        is known; otherwise the message is stale: counted."""
        entry = self.ledger.find(ticket)
        if entry and entry.state in states and by in (None, entry.holder):
            return entry
        self.stale_count += 1
        return None

    @property
    def is_settled(self) -> bool:
        """Grants may be made: every holder of the last epoch is back, or was waited for."""
        return not self.awaited or self.now >= self.settled_at

    @property
    def gave_up_waiting(self) -> bool:
        """For holders of the last epoch that are not known to be dead: on a busy machine one comes
        back later than grants wait for it, and finds its engines still there."""
        lost_at = after(self.born, self.settings.timeouts.lost)
        return self.now >= (lost_at if self.awaited else self.settled_at)

    def is_silent(self, holder: HolderId) -> bool:
        known = self.holders.get(holder)
        return known is None or self.now - known.heard >= self.settings.timeouts.silent

    def key_of(self, entry: Ticket) -> ModelKey:
        return ModelKey(entry.capability, entry.model, entry.settings_key)

    def changed(self) -> list[NodeId]:
        """Where something may be decided now that could not be before."""
        changed = self.ledger.changed | self.queue.changed
        return sorted(changed) if changed else []

    def take_changed(self) -> list[NodeId]:
        changed = self.changed()
        self.ledger.changed, self.queue.changed = set(), set()
        return changed

    # -- small moves that several rules share ---------------------------------------------------

    def set_timer(self, entry: Ticket, at: Instant) -> None:
        self.timers.set(("ticket", entry.ticket), at)

    def move(self, entry: Ticket, to: State, granted: Sizes | None = None) -> None:
        was, label = entry.state, model_label(entry.capability, entry.model)
        self.ledger.move(entry, to, self.now, granted)
        if (was is State.LOADING) != (to is State.LOADING):
            self.queue.loading(entry.node, label, 1 if to is State.LOADING else -1)
        self.note_active(entry.capability)

    def note_active(self, capability: str) -> None:
        """Its replicas are wanted for a while yet; the shell is woken when no longer."""
        self.active[capability] = self.now
        if spec := self.registry.specs.get(capability):
            self.timers.set(("scale", capability), after(self.now, spec.downscale_to_zero))

    def note_uses(self, entry: Ticket, times_count: int) -> None:
        name = (entry.capability, entry.model)
        self.rates.used(name, times_count, self.now)
        self.lasting_rates.used(name, times_count, self.now)
        self.hours.used(name, times_count, self.now)
        if self.settings.preload != "off":
            self.uses_this_event.append((name, entry.node))

    def unqueue(self, entry: Ticket) -> None:
        """Nobody waits for it any more."""
        self.queue.drop(entry.ticket)
        self.ledger.touch(entry)
        self.set_timer(entry, self.now)

    def close(self, entry: Ticket) -> None:
        """Off the books and out of the line; its id is never used again."""
        self.queue.drop(entry.ticket)
        self.move(entry, State.CLOSED)
        if entry.ticket not in self.answers:
            self.remember(entry.ticket, TicketClosed(entry.ticket))


# -------------------------------------------------------------------------------------------------
# Out of the line with an answer (C7): a new ticket is closed, a sleeper sleeps on.


def reject_queued(state: CoreState, entry: Ticket, error: RequestError) -> None:
    """A sleeper may ask again under the same ticket."""
    state.evicted_for.pop((entry.holder, entry.model), None)
    if entry.state is State.QUEUED:
        state.answer_error_finally(entry.ticket, error)
        state.close(entry)
    else:
        state.unqueue(entry)
        state.answer_error(entry.ticket, error)
