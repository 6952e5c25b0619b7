"""Keeps what the arbiter knows between two events, and what it has decided during this one.

The rules are functions over a CoreState, one file per idea. They read it, move tickets through
`state.ledger`, and say what must be done with `state.decide`. Plain data: it pickles half way.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, EventKind, LogEvent, Refuse
from arbiter.core.histogram import Histogram
from arbiter.core.records.accounts import Accounts
from arbiter.core.records.compactions import Compactions
from arbiter.core.records.estimates import Estimates
from arbiter.core.records.eviction_history import EvictionHistory
from arbiter.core.records.hours_readings import HoursReadings
from arbiter.core.records.ledger import Ledger
from arbiter.core.records.loading_times import LoadingTimes
from arbiter.core.records.registry import Registry
from arbiter.core.records.request_queue import RequestQueue
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.records.timers import Timers
from arbiter.core.records.trades import Trades
from arbiter.core.records.usage import Usage
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
    seconds,
    since,
)

# A load without a request is asked for again for so long after it was refused: two of the longest
# cool-downs. A person who asked for it by hand has looked again by then.
RETRIED_FOR = seconds(600)


@dataclass(slots=True)
class Holder:
    """Describes a holder that has joined, and when its last message arrived."""

    holder: HolderId
    node: NodeId
    capability: str
    heard_at: Instant
    is_driver: bool = False


@dataclass(slots=True)
class Unclaimed:
    """Describes an engine measured on a node whose ticket no holder has named."""

    measured: Sizes
    first_seen: Instant
    is_ending: bool = False  # logged, and killed again with each reading until it is gone


@dataclass(slots=True)
class Node:
    """Describes a node whose agent has introduced itself, with its agent's last reading."""

    node: NodeId
    devices: dict[DeviceId, types.DeviceSpec]
    heard_at: Instant | None = None  # last full reading in this epoch
    silent_told: bool = False  # that it is silent has been logged
    readings: dict[DeviceId, ev.DeviceReading] = field(default_factory=dict)
    unclaimed: dict[TicketId, Unclaimed] = field(default_factory=dict)
    unreadable: dict[DeviceId, str] = field(default_factory=dict)  # devices, with the cause
    inexact: frozenset[DeviceId] = frozenset()  # devices of which only a total is known: inexact.py
    computing: tuple[DeviceId, ...] = ()  # its devices but for host RAM
    may_gain_devices: bool = False  # a GPU of it has not answered yet, so its size is not known
    lost: frozenset[DeviceId] = frozenset()  # GPUs that fell off the bus, and may come back
    slabs: tuple[ev.SlabReading, ...] = ()  # of its pool (E1)
    contents: tuple[ev.ContentReading, ...] = ()  # what it did with each content (E7)
    copies: tuple[ev.HostCopyReading, ...] = ()  # of files, shared by its engines (D4)

    def __post_init__(self) -> None:
        hosts = types.DeviceKind.HOST
        self.computing = tuple(d for d, spec in self.devices.items() if spec.kind is not hosts)

    @property
    def has_lost_gpus(self) -> bool:
        """Says whether all its GPUs fell off the bus."""
        return not (self.computing or self.may_gain_devices)

    @property
    def pool_bytes(self) -> Bytes:
        """Returns the RAM that slabs take."""
        return Bytes(sum(slab.allocated_bytes for slab in self.slabs))


@dataclass(slots=True)
class PressureState:
    """Says how short of real memory a device is, and what was done about it (C5)."""

    level: types.Level = types.Level.NOMINAL  # the worst of these two
    measured: types.Level = types.Level.NOMINAL
    pushed: types.Level = types.Level.NOMINAL
    pushed_until: Instant | None = None
    free_bytes: Bytes = Bytes(0)
    stalled_fraction: float = 0.0  # of the last 10 s, in which some task waited for this memory
    acts_at: Instant | None = None  # the next tick
    nothing_left: bool = False  # that nothing may leave was logged, once until the level changes


@dataclass(slots=True)
class Failure:
    """Describes a model that did not load: no request tries it again before `until`."""

    cause: str
    times_count: int
    until: Instant


@dataclass(slots=True)
class EvictedFor:
    """Lists the models that made room for a load which has not succeeded yet (A12)."""

    models: dict[tuple[HolderId, str], TicketId] = field(default_factory=dict)
    # Set once the load has failed: they are loaded again then, unless it is tried again before
    restore_at: Instant | None = None


@dataclass(frozen=True, slots=True)
class AskedLoad:
    """Describes a load without a request that a holder was asked for and has not ended yet."""

    holder: HolderId
    asked_at: Instant  # when this holder was asked
    first_asked_at: Instant  # when the first holder was
    is_refused: bool = False  # the holder's ticket for it was refused: the next holder is asked


EvictedForKey = tuple[HolderId, str]  # the asker that room was made for: its holder and model
Foresight = Callable[[types.ModelName, Instant], Instant | None]  # when a model is next used


class CoreState:
    """Holds all that the rules read and change, by group. `foresight` is set in a replay only."""

    foresight: Foresight | None = None  # a replay's knowledge of when a model is next used

    def __init__(
        self,
        settings: Settings,
        policies: Policies,
        epoch: Epoch,
        known_holders: frozenset[HolderId],
        now: Instant,
    ) -> None:
        self.epoch = epoch
        # Configuration, what people set, and the hour as the clock on the wall has it
        self.settings = settings
        self.policies = policies
        self.registry = Registry(tuple(sorted(policies.roles)))  # with the floors of the table
        self.tenants = {limits.tenant: limits for limits in settings.tenants}
        self.floors: dict[types.ModelName, types.Floor] = {}  # that a person set
        self.hours_readings = HoursReadings()
        # The books
        self.ledger = Ledger()  # every ticket, and what is charged on each device
        self.queue = RequestQueue(policies.admit)
        self.holders: dict[HolderId, Holder] = {}
        self.nodes: dict[NodeId, Node] = {}
        self.pressure: dict[DeviceId, PressureState] = {}
        self.accounts = Accounts(settings.quota_window, settings.accounts_most_count)  # of clients
        # Answers, what explain says, and what is counted for people
        # The final errors of tickets that have ended, oldest first: a repeated request gets them
        self.answers: OrderedDict[TicketId, RequestError] = OrderedDict()
        self.evictions = EvictionHistory()
        self.rankings: dict[DeviceId, Any] = {}  # ranking.Ranking of each device
        self.request_times: dict[tuple[str, str], Histogram] = {}  # by capability and outcome
        self.stale_count = 0  # messages that were ignored, because their ticket had moved on
        # Time
        self.now = now
        self.began_at = now
        self.settled_at = after(now, settings.timeouts.rejoin if known_holders else Span(0))
        self.awaited = set(known_holders)  # holders of the last epoch that are not back yet
        self.closing_by: Instant | None = None  # what is in use then is killed; None: not closing
        self.timers = Timers()
        # When a ticket or a holder of each capability was last seen
        self.active: dict[str, Instant] = {}
        # What this event has brought so far
        self.decisions: list[Decision] = []
        self.queued_this_event: list[TicketId] = []
        self.uses_this_event: list[tuple[types.ModelName, NodeId]] = []
        # Prefetches that have become resident
        self.prefetched_this_event: list[tuple[types.ModelName, NodeId]] = []
        self._begin_learning(settings, now)
        self._begin_work()

    def _begin_learning(self, settings: Settings, now: Instant) -> None:
        """Begins with nothing known of models and their uses."""
        self.estimates = Estimates(settings)
        self.usage = Usage(settings.rate_window, settings.lasting_window, now)
        # The device that each model was on last, by node
        self.last_home: dict[tuple[NodeId, types.ModelName], DeviceId] = {}
        self.trades = Trades()
        self.loading_times = LoadingTimes()
        # Devices that spend more of their time loading than the bound allows, with that fraction
        self.thrashing: dict[DeviceId, float] = {}

    def _begin_work(self) -> None:
        """Begins with no work under way."""
        # Models to load without a request for which no holder is there yet
        self.awaiting_holder: dict[types.ModelName, None] = {}
        # Loads without a request that a holder was asked for and that have not ended
        self.asked_loads: dict[types.ModelName, AskedLoad] = {}
        # Models prefetched and not used yet: until then a load of the model counts as a prefetch
        self.prefetched: dict[types.ModelName, Instant] = {}
        # Models that are no longer in the table and still have a ticket
        self.removing: dict[types.ModelName, None] = {}
        # Models that were removed, with when their last ticket had closed: agents are told of them
        self.removed_models: dict[types.ModelName, Instant] = {}
        # Residents that wait for more memory, in the order in which they asked
        self.growing: dict[TicketId, None] = {}
        self.compactions = Compactions()
        # What made room for loads that have not succeeded yet
        self.evicted_for: dict[EvictedForKey, EvictedFor] = {}
        # What left for a lease of `arbiter free`, and is loaded again once that lease is over
        self.freed_for: dict[TicketId, dict[types.ModelName, None]] = {}
        # Models that cool down after a failed load
        self.failures: dict[types.ModelName, Failure] = {}
        # Tickets whose engine died while it loaded: their holders may yet tell why
        self.broken_loads: OrderedDict[TicketId, Ticket] = OrderedDict()

    # -- saying --------------------------------------------------------------------------------

    def decide(self, decision: Decision) -> None:
        """Adds a decision to those of this event."""
        self.decisions.append(decision)

    def log(
        self,
        kind: EventKind,
        ticket: Ticket | None = None,
        *,
        size: Bytes | None = None,
        took: Span | None = None,
        **data: str | int | float | bool | None,
    ) -> None:
        """Writes one line of the event log, with the holder and model of its ticket."""
        ticket_id = None
        if ticket is not None:
            ticket_id = ticket.id
            data = {
                "holder": ticket.holder,
                "capability": ticket.capability,
                "model": ticket.model,
                **data,
            }
        self.decide(LogEvent(kind, data, ticket_id, size, took))

    def answer_error_finally(self, ticket_id: TicketId, error: RequestError) -> None:
        """Answers a ticket with an error for good: asking again under this ticket repeats the
        error. A copy that was never raised is kept (`ArbiterError.unraised`)."""
        self.keep_answer(ticket_id, error.unraised())
        self.answer_error(ticket_id, error)

    def note_refused(
        self, holder: HolderId, name: types.ModelName, retry_after_s: float | None
    ) -> None:
        """Notes that a holder was refused a model, which it may have been asked to load. No client
        is there to ask again for such a load, so the core asks again once the refusal's time is
        over, for `RETRIED_FOR` at most: a model that is wanted keeps a replica. A prefetch is not
        asked for again."""
        load = self.asked_loads.get(name)
        if load is None or load.holder != holder:
            return
        self.asked_loads[name] = replace(load, is_refused=True)
        if retry_after_s is None or self.is_prefetch(name, load.asked_at):
            return
        again_at = after(self.now, seconds(retry_after_s))
        if since(load.first_asked_at, again_at) < RETRIED_FOR:
            self.awaiting_holder[name] = None
            self.timers.set(("floors", ""), again_at)

    def answer_error(self, ticket_id: TicketId, error: RequestError) -> None:
        """Answers a ticket with an error; the ticket may ask again."""
        self.decide(Refuse(ticket_id, error))
        self.decide(
            LogEvent(EventKind.TICKET_REFUSED, {"code": error.code, "cause": str(error)}, ticket_id)
        )

    def keep_answer(self, ticket_id: TicketId, error: RequestError) -> None:
        """Keeps the final answer of a ticket, so that a repeated request gets it again. The oldest
        answer beyond `remembered_count` is forgotten."""
        self.answers[ticket_id] = error
        if len(self.answers) > self.settings.remembered_count:
            self.answers.popitem(last=False)

    def is_prefetch(self, name: types.ModelName, asked_at: Instant) -> bool:
        """Says whether a load of a model that was asked for at an instant is its prefetch, which
        lasts for a term whether or not it led to a load."""
        until = self.prefetched.get(name)
        return until is not None and asked_at < until

    # -- finding -------------------------------------------------------------------------------

    def find_or_count_stale(
        self, ticket_id: TicketId, *states: State, by: HolderId | None = None
    ) -> Ticket | None:
        """Returns the ticket that a message is about, if it is in one of these states and held by
        `by`, the holder that sent the message (None: that is not known). Otherwise the
        message is stale: counts it and returns None."""
        ticket = self.ledger.find(ticket_id)
        if ticket and ticket.state in states and by in (None, ticket.holder):
            return ticket
        self.stale_count += 1
        return None

    @property
    def is_settled(self) -> bool:
        """Says whether grants may be made: every holder of the last epoch is back, or was waited
        for."""
        return not self.awaited or self.now >= self.settled_at

    @property
    def gave_up_waiting(self) -> bool:
        """Says whether holders of the last epoch that are not back count as dead. Grants begin
        sooner than that: on a busy machine a holder may come back after the first grants, and finds
        its engines still there."""
        lost_at = after(self.began_at, self.settings.timeouts.lost)
        return self.now >= (lost_at if self.awaited else self.settled_at)

    @property
    def holders_may_rejoin(self) -> bool:
        """Says whether a holder may come back that has tickets of the last epoch. A holder has the
        time to rejoin also where the state file does not name it, because the file was lost or
        could not be written."""
        is_awaited = bool(self.awaited) and not self.gave_up_waiting
        return is_awaited or self.now < after(self.began_at, self.settings.timeouts.rejoin)

    def is_silent(self, holder: HolderId) -> bool:
        """Says whether nothing was heard of a holder for so long that it would not take up a
        grant."""
        known = self.holders.get(holder)
        return known is None or self.now - known.heard_at >= self.settings.timeouts.silent

    def floor_of(self, name: types.ModelName) -> types.Floor:
        """Returns how far a model may fall: as a person set it, else as configured, else cold.
        Outside its hours it is cold (C13)."""
        if self.opens_at(name) is not None:
            return types.Floor.COLD
        floor = self.floors.get(name) or self.registry.configured_floors.get(name)
        return floor or types.Floor.COLD

    def is_pinned(self, name: types.ModelName) -> bool:
        """Says whether tickets of a model are pinned, by the table or by its floor. Raises
        UnknownCapability, UnknownModel."""
        is_pinned = self.registry.find(name).pinned or self.floor_of(name) is types.Floor.DEVICE
        return is_pinned and self.opens_at(name) is None

    def opens_at(self, name: types.ModelName) -> Instant | None:
        """Returns when the hours of a model begin; None while it may be loaded."""
        hours = self.registry.hours.get(name)
        return self.hours_readings.opens_at(hours) if hours else None

    def batch_hours_of(self, name: types.ModelName) -> str:
        """Returns the hours of batch work for a model; empty where it has none."""
        return self.registry.batch_hours.get(name, self.settings.batch_hours)

    def all_floors(self) -> dict[types.ModelName, types.Floor]:
        """Returns the floors that were set, and the configured ones above cold."""
        return (
            self.registry.configured_floors | self.floors
            if self.floors
            else dict(self.registry.configured_floors)
        )

    def mark_dirty(self, *nodes: NodeId) -> None:
        """Has these nodes looked at in this step's grant pass, because something that no book
        shows has changed there. What changes the ledger or the queue marks its node by itself."""
        self.ledger.mark_dirty(*nodes)

    def dirty_nodes(self) -> list[NodeId]:
        """Returns the nodes, sorted, on which something may be decided now that could not be
        before."""
        dirty = self.ledger.dirty | self.queue.dirty
        return sorted(dirty) if dirty else []

    def take_dirty_nodes(self) -> list[NodeId]:
        """Returns the dirty nodes, which count as clean from now on."""
        if taken := self.dirty_nodes():
            self.ledger.clean()
            self.queue.clean()
        return taken

    def forget_device(self, device: DeviceId) -> None:
        """Forgets a device that has left, on which nothing is charged any more: the account of its
        bytes, and all that was noted of it."""
        self.ledger.drop_device(device)
        for table in (self.rankings, self.pressure, self.thrashing):
            table.pop(device, None)
        self.loading_times.forget(device)
        self.compactions.forget_device(device)
        for home in [home for home, last in self.last_home.items() if last == device]:
            del self.last_home[home]

    # -- small moves that several rules share ---------------------------------------------------

    def set_timer(self, ticket: Ticket, at: Instant) -> None:
        """Has the time rules of a ticket run at this instant."""
        self.timers.set(("ticket", ticket.id), at)

    def move(
        self,
        ticket: Ticket,
        to: State,
        granted: Sizes | None = None,
        home: Sizes | None = None,
    ) -> None:
        """Changes the state of a ticket. See Ledger.move."""
        was = ticket.state
        if was is State.LOADING:
            self.loading_times.note(ticket.home, ticket.since, self.now)
        self.ledger.move(ticket, to, self.now, granted, home)
        if to in (State.ASLEEP, State.RECLAIMING):
            self.trades.note_left(ticket.id, ticket.model_name, self.now)
            if ticket.pinned:  # another ticket may be pinned in its place
                self.timers.set(("pins", ticket.node), self.now)
        elif was is State.DRAINING:
            self.trades.note_stayed(ticket.id)
        if (was is State.LOADING) != (to is State.LOADING):
            self.queue.note_loading(
                ticket.node, ticket.model_name, 1 if to is State.LOADING else -1
            )
            if was is State.QUEUED:
                self.estimates.load_begins(ticket.model_key, self.now)
        self.note_active(ticket.capability)

    def note_active(self, capability: str) -> None:
        """Notes that a capability was active now, so that its replicas stay wanted for
        `downscale_to_zero`. The shell is woken when that is over."""
        self.active[capability] = self.now
        if spec := self.registry.specs.get(capability):
            self.timers.set(("scale", capability), after(self.now, spec.downscale_to_zero))

    def note_uses(self, ticket: Ticket, times_count: int) -> None:
        """Counts uses of a ticket's model, for rates, for habits, and for prefetches."""
        name = ticket.model_name
        self.usage.note_uses(name, times_count, self.now)
        if self.settings.preload != "off":
            self.uses_this_event.append((name, ticket.node))

    def note_loaded(self, ticket: Ticket) -> None:
        """Counts the bytes of a load or a wake, by which the clock of turnovers goes on."""
        if lent_bytes := self.ledger.lent_bytes:
            self.usage.reuse.loaded(ticket.granted_home_bytes / lent_bytes)

    def drop_queued(self, ticket: Ticket) -> None:
        """Takes a ticket out of the queue without a grant, which costs its tenant nothing; safe for
        a ticket that is not queued."""
        if queued := self.queue.find(ticket.id):
            start = queued.request.virtual_start_bytes
            self.accounts.not_served(queued.tenant, start, queued.work_bytes)
            self.queue.drop(ticket.id)

    def unqueue(self, ticket: Ticket) -> None:
        """Takes a ticket that stays on the books out of the queue, because no caller waits for it
        any more."""
        self.drop_queued(ticket)
        self.ledger.touch(ticket)
        self.set_timer(ticket, self.now)

    def close(self, ticket: Ticket) -> None:
        """Takes a ticket off the books and out of the queue; its id is never used again."""
        self.drop_queued(ticket)
        self.compactions.note_waste(ticket.id, is_enough=False)
        self.move(ticket, State.CLOSED)
        if ticket.id not in self.answers:
            self.keep_answer(ticket.id, TicketClosed(ticket.id))


# -------------------------------------------------------------------------------------------------
# Out of the queue with an answer (C7): a new ticket is closed, an asleep one sleeps on.


def reject_queued(state: CoreState, ticket: Ticket, error: RequestError) -> None:
    """Takes a ticket out of the queue with an error. A new ticket is closed; an asleep ticket
    sleeps on and may ask again."""
    state.evicted_for.pop((ticket.holder, ticket.model), None)
    state.note_refused(ticket.holder, ticket.model_name, error.retry_after_s)
    if ticket.state is State.QUEUED:
        state.answer_error_finally(ticket.id, error)
        state.close(ticket)
    else:
        state.unqueue(ticket)
        state.answer_error(ticket.id, error)
