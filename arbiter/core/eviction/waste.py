"""Says how much a process holds beyond what a new load of its model would take (D7).

An allocator keeps what it once needed: the difference between what it reserved and what is in use.
The core cannot look into a process, so it compares two readings: what the model holds now, and its
peak up to the first reading that found it idle after a request. What it holds beyond that peak and
the usual headroom is waste; only a new process gives it back for certain.
"""

from collections.abc import Callable
from dataclasses import replace

from arbiter.core.eviction.eligibility import find_obstacle
from arbiter.core.eviction.ranking import price_victim
from arbiter.core.eviction.victim_set import choose
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.priced_victim import PricedVictim
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import inexact, quotas
from arbiter.core.tickets.lendable_devices import unpinned_bytes
from arbiter.core.types import Floor, ModelName, Priority
from arbiter.errors import UnknownCapability, UnknownModel
from arbiter.units import Bytes

# -- how much -------------------------------------------------------------------------------------


def settled_bytes(state: CoreState, ticket: Ticket) -> Bytes:
    """Returns what the model needed since its load, up to its first use: of this load, else of the
    last that was seen; 0 when none was."""
    load = ticket.load
    return (load.settled_bytes if load else None) or state.estimates.settled(ticket.model_key)


def next_grant_bytes(state: CoreState, ticket: Ticket) -> Bytes:
    """Returns what the model would be granted once compacted."""
    settled = settled_bytes(state, ticket)
    key = ticket.model_key
    return state.estimates.size_after_compaction(key, ticket.need, ticket.need_is_explicit, settled)


def wasted_bytes(state: CoreState, ticket: Ticket) -> Bytes:
    """Returns what a resident holds beyond what it would be granted once compacted; 0 where that is
    not known, because no load of it was seen to settle or no reading is its own."""
    is_known = ticket.state is State.RESIDENT and inexact.teaches(state, ticket)
    if not is_known or not settled_bytes(state, ticket):
        return Bytes(0)
    shared = sum(ticket.scratch_in_use(device) for device in ticket.home)
    return Bytes(max(0, ticket.measured_home_bytes - shared - next_grant_bytes(state, ticket)))


def note(state: CoreState, ticket: Ticket) -> None:
    """Notes, with each reading, whether a resident holds enough beyond its need."""
    is_enough = wasted_bytes(state, ticket) >= state.settings.compact_least_bytes
    state.compactions.note_waste(ticket.id, is_enough=is_enough)


def wasteful_tickets(state: CoreState) -> list[Ticket]:
    """Returns the residents that hold enough beyond their need, and forgets tickets that have
    left."""
    tickets = []
    for ticket_id in list(state.compactions.wasteful):
        ticket = state.ledger.find(ticket_id)
        if ticket is not None and ticket.state is State.RESIDENT:
            tickets.append(ticket)
        else:
            state.compactions.note_waste(ticket_id, is_enough=False)
    return tickets


# -- whether it may go ----------------------------------------------------------------------------

# What keeps a ticket from being freed and loaded again, in words. The first that holds is told.
OBSTACLES: tuple[tuple[Callable[[CoreState, Ticket], bool], str], ...] = (
    (lambda _, e: e.lease is not None, "it is a lease"),
    (lambda _, e: e.state is State.ASLEEP, "it is asleep, and its copy in host RAM stays"),
    (lambda _, e: e.state is not State.RESIDENT, "it is not resident"),
    (lambda s, e: e.pinned or s.floor_of(e.model_name) is not Floor.COLD, "it is pinned"),
    (lambda s, e: e.inflight > 0 or e.id in s.queue, "it is in use"),
    (lambda s, e: s.now < e.declined_until, "it was in use when it was last asked to leave"),
    (lambda _, e: bool(e.growth or (e.grown and e.grown.beyond_load_bytes)), "it has grown"),
    (lambda _, e: len(e.home) != 1, "it lies on several devices"),
    (lambda s, e: not _may_load_again(s, e), "it could not be loaded again now"),
)


def compaction_obstacle(
    state: CoreState, ticket: Ticket, asker: Ticket | None = None
) -> str | None:
    """Returns why a ticket may not be compacted now, for a queued ticket or for none; None when it
    may. Another queued ticket would take the room that it leaves, however much less urgent it is
    (C2)."""
    why = next((text for holds, text in OBSTACLES if holds(state, ticket)), None)
    own = None if asker is None else asker.id
    if why is None and any(w.request.ticket != own for w in state.queue.first(ticket.node, 2)):
        return "another ticket waits on its node, and would take its room"
    return why


def _may_load_again(state: CoreState, ticket: Ticket) -> bool:
    """Says whether its holder could load it again, into what it leaves."""
    book = state.ledger.books.get(next(iter(ticket.home)))
    fits = book is not None and next_grant_bytes(state, ticket) <= unpinned_bytes(book)
    is_heard = not state.is_silent(ticket.holder) and state.closing_by is None
    return fits and is_heard and may_load(state, ticket.model_name)


def may_load(state: CoreState, name: ModelName) -> bool:
    """Says whether the table lets a model load without a request, and it is not cooling down."""
    try:
        state.registry.find(name)
    except (UnknownCapability, UnknownModel):
        return False
    is_external = state.registry.specs[name.capability].is_external
    failure = state.failures.get(name)  # kept after its cool-down, which the next would double
    is_cooling_down = failure is not None and state.now < failure.until
    return not is_cooling_down and not is_external


# -- for whom -------------------------------------------------------------------------------------


def compaction_for(
    state: CoreState, book: DeviceAccount, asker: Ticket, short: Bytes, priority: Priority
) -> tuple[list[PricedVictim], list[PricedVictim]]:
    """Returns the models whose compaction frees bytes of a device for an asker, and the cheapest
    set of them that frees `short`, or none. Each may lawfully be revoked for it."""
    if not state.compactions.wasteful:
        return [], []
    spare = quotas.ReserveSlack(state, book, asker.client.tenant)
    options = []
    for ticket in wasteful_tickets(state):
        room = _room_made(state, book, ticket)
        if room <= 0 or compaction_obstacle(state, ticket, asker) is not None:
            continue
        if find_obstacle(state, ticket, asker, priority) is not None:
            continue
        if usable := spare.take(ticket, room):
            options.append(replace(price_victim(state, book, ticket), freed_bytes=usable))
    options.sort(key=lambda option: option.place)
    is_enough = sum(option.freed_bytes for option in options) >= short
    return options, choose(options, short) if is_enough else []


def _room_made(state: CoreState, book: DeviceAccount, ticket: Ticket) -> Bytes:
    """Returns what the books of a device gain. Another process of the same model would teach the
    peak again before the next load is granted, so then it is nothing."""
    if ticket.id not in book.tickets or book.device not in ticket.home:
        return Bytes(0)
    for other in state.ledger.books.values():
        if other.copies[ticket.model_name] > (ticket.id in other.tickets):
            return Bytes(0)
    return Bytes(ticket.charge(book.device) - next_grant_bytes(state, ticket))
