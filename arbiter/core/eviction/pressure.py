"""Acts on pressure (C5): real memory is short on a device or node, whatever the books say.

A drafter goes first (F9): its target goes on without it, text included.

There are three sources, and the worst wins: readings of free bytes, the kernel's stalls (PSI), and
levels pushed from outside, which last for a term. Pressure acts only on the device that has it: low
takes the lowest idle resident, again with each tick that stays low; critical takes every idle
resident, empties the caches of those that stay, and no new load begins there. Text is spared, and
so is what is pinned or in use.
"""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import DropDrafter, EventKind, PurgeCaches, Reason
from arbiter.core.eviction.eligibility import may_leave
from arbiter.core.eviction.eviction import revoke
from arbiter.core.eviction.ranking import ranked_victims
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, Node, PressureState
from arbiter.core.tickets.lendable_devices import compute_books
from arbiter.core.tickets.reclaim import charged
from arbiter.core.types import Level
from arbiter.core.view import MemoryReading
from arbiter.errors import UnderPressure
from arbiter.units import Bytes, DeviceId, HolderId, NodeId, after, host_device, since

# -- sources --------------------------------------------------------------------------------------


def on_reading(state: CoreState, node: Node, stalled_fraction: float) -> None:
    """Takes a device's level from its new reading."""
    for device, reading in node.readings.items():
        book = state.ledger.books[device]
        reserve = Bytes(book.total_bytes - int(book.total_bytes * state.settings.arena_fraction))
        is_ram = book.kind is not types.DeviceKind.GPU
        stalls = stalled_fraction if is_ram else 0.0
        marks = state.settings.pressure_marks
        sizes = reading.free_bytes, book.total_bytes, reserve
        gauge = MemoryReading(book.kind, *sizes, stalls, marks)
        pressure_state = _state_of(state, device)
        pressure_state.measured = state.policies.pressure(gauge)
        pressure_state.free_bytes = reading.free_bytes
        pressure_state.stalled_fraction = stalls
        _update_level(state, book, "measured")


def on_pushed(state: CoreState, event: ev.PressurePushed) -> None:
    """Takes a level pushed from outside, which ends by itself."""
    books = [b for b in state.ledger.books.values() if event.where in (b.device, b.node)]
    if not books:
        state.stale_count += 1
    for book in books:
        pressure_state = _state_of(state, book.device)
        pressure_state.pushed = event.level
        pressure_state.pushed_until = after(state.now, event.term)
        if event.free_bytes is not None:
            pressure_state.free_bytes = event.free_bytes
        state.timers.set(("pressure", book.device), pressure_state.pushed_until)
        _update_level(state, book, "pushed")


def _state_of(state: CoreState, device: DeviceId) -> PressureState:
    """Returns what is known of a device's pressure, which rules may change."""
    return state.pressure.setdefault(device, PressureState())


def level_of(state: CoreState, device: DeviceId) -> Level:
    """Returns the pressure level of a device."""
    pressure_state = state.pressure.get(device)
    return pressure_state.level if pressure_state else Level.NOMINAL


def stalled_fraction(state: CoreState, device: DeviceId) -> float:
    """Returns the share of the last ten seconds in which some task waited for this RAM."""
    pressure_state = state.pressure.get(device)
    return pressure_state.stalled_fraction if pressure_state else 0.0


def is_nominal(state: CoreState, node: NodeId) -> bool:
    """Says whether no device of the node has pressure."""
    node_state = state.nodes.get(node)
    return node_state is not None and all(
        level_of(state, d) is Level.NOMINAL for d in node_state.devices
    )


# -- acting ---------------------------------------------------------------------------------------


def _update_level(state: CoreState, book: DeviceAccount, source: str) -> None:
    """Logs a change of level, and acts when the level rises; later ticks act again."""
    pressure_state = _state_of(state, book.device)
    before = pressure_state.level
    pressure_state.level = worst(state, pressure_state)
    if pressure_state.level is before:
        return
    pressure_state.nothing_left = False
    state.mark_dirty(book.node)  # loads may begin there that could not, or the reverse
    level = pressure_state.level.name.lower()
    state.log(
        EventKind.MEMORY_PRESSURE,
        size=pressure_state.free_bytes,
        device=book.device,
        level=level,
        source=source,
    )
    if pressure_state.level > before:
        _relieve(state, book, pressure_state)


def worst(state: CoreState, pressure_state: PressureState) -> Level:
    """Returns the worse of the measured level and a pushed level that is still in force."""
    is_current = pressure_state.pushed_until is not None and state.now < pressure_state.pushed_until
    return (
        max(pressure_state.measured, pressure_state.pushed)
        if is_current
        else pressure_state.measured
    )


def on_timer(state: CoreState, name: str) -> None:
    """Runs the tick of a device under pressure, and ends a pushed level."""
    book = state.ledger.books.get(DeviceId(name))
    pressure_state = state.pressure.get(DeviceId(name))
    if book is None or pressure_state is None:
        state.pressure.pop(DeviceId(name), None)  # it left with its node
        return
    _update_level(state, book, "term")
    if pressure_state.level is Level.NOMINAL or pressure_state.acts_at is None:
        return
    if state.now >= pressure_state.acts_at:
        _relieve(state, book, pressure_state)
    else:
        state.timers.set(("pressure", book.device), pressure_state.acts_at)


def _relieve(state: CoreState, book: DeviceAccount, pressure_state: PressureState) -> None:
    """Takes back what the present level demands: drafters first, then one idle model at a low
    level, all of them and the caches of the others at a critical level."""
    if _cpu_device_acts_for(state, book):
        return
    pressure_state.acts_at = after(state.now, state.settings.timeouts.pressure_tick)
    state.timers.set(("pressure", book.device), pressure_state.acts_at)
    _take_back(state, book, pressure_state)
    if pressure_state.level is Level.CRITICAL:
        _purge(state, book)


def _take_back(state: CoreState, book: DeviceAccount, pressure_state: PressureState) -> None:
    """Asks for the drafters and models that the present level demands."""
    with_drafter, victims = _with_drafter(state, book), candidates(state, book)
    for ticket in with_drafter:
        ticket.note_drafter_revoked(state.now)
        state.decide(DropDrafter(ticket.holder, ticket.model))
        state.log(EventKind.DRAFTER_REVOKED, ticket, size=ticket.drafter_bytes)
    if pressure_state.level is not Level.CRITICAL:
        del victims[0 if with_drafter else 1 :]
    for victim in victims:
        revoke(state, victim, Reason.PRESSURE, None)
    if not victims and not with_drafter and not pressure_state.nothing_left:
        pressure_state.nothing_left = True
        held = Bytes(sum(charged(t) for t in book.tickets.values()))
        level = pressure_state.level.name.lower()
        state.log(EventKind.PRESSURE_NOTHING_LEFT, size=held, device=book.device, level=level)


def _purge(state: CoreState, book: DeviceAccount) -> None:
    """Empties the caches of what stays resident. Under low pressure they keep what has not expired,
    and what has expired leaves by itself."""
    held = {name: t for b in _books_of_one_memory(state, book) for name, t in b.tickets.items()}
    for ticket_id, ticket in sorted(held.items()):
        if ticket.state is State.RESIDENT and ticket.lease is None:
            state.decide(PurgeCaches(ticket_id, ticket.holder))


def _with_drafter(state: CoreState, book: DeviceAccount) -> list[Ticket]:
    """Returns the residents of a device that can give a drafter back and were not asked to lately.
    A holder whose requests in flight outlive its barrier keeps the drafter, and is asked again."""
    patience = state.settings.timeouts.load
    return [
        ticket
        for ticket in book.tickets.values()
        if ticket.drafter_bytes
        and ticket.state is State.RESIDENT
        and not ticket.pinned
        and (
            ticket.drafter_revoked_at is None
            or since(ticket.drafter_revoked_at, state.now) >= patience
        )
    ]


def candidates(state: CoreState, book: DeviceAccount) -> list[Ticket]:
    """Returns idle, unpinned tickets of capabilities that are not spared, the lowest first: by
    priority, role, and the policy's price."""
    priced = [pair for b in _books_of_one_memory(state, book) for pair in ranked_victims(state, b)]
    priced.sort(key=lambda pair: (pair[1].rank[:3], pair[0].role_rank, pair[1].place))
    by_ticket = {ticket.id: ticket for ticket, _ in priced}
    return [t for t in by_ticket.values() if may_leave(state, t) and not is_spared(state, t)]


def _books_of_one_memory(state: CoreState, book: DeviceAccount) -> list[DeviceAccount]:
    """Returns the accounts whose budgets lie in the same memory: of a CPU device itself and the
    host's RAM, of any other device its own."""
    host = state.ledger.books.get(host_device(book.node))
    if book.kind is types.DeviceKind.CPU and host:
        return [book, host]
    return [book]


def _cpu_device_acts_for(state: CoreState, book: DeviceAccount) -> bool:
    """Says whether the CPU device of its node relieves the pressure of this account: the account is
    of host RAM, which is the CPU device's as well."""
    node = state.nodes.get(book.node)
    specs = node.devices.values() if node else ()
    return book.kind is types.DeviceKind.HOST and any(s.kind is types.DeviceKind.CPU for s in specs)


def is_spared(state: CoreState, ticket: Ticket) -> bool:
    """Says whether pressure never takes a ticket, because its role is spared."""
    if ticket.lease:
        return False
    spec = state.registry.specs.get(ticket.capability)
    return spec is not None and state.policies.roles[spec.role].is_spared


def evict_next(state: CoreState, busy: Ticket) -> None:
    """Takes another ticket at once in place of a victim that was in use after all. At a critical
    level every idle ticket was asked, and the tick empties caches again."""
    for device in sorted(busy.devices):
        book = state.ledger.books.get(device)
        pressure_state = state.pressure.get(device)
        if book is None or pressure_state is None or pressure_state.level is Level.NOMINAL:
            continue
        if not _cpu_device_acts_for(state, book):
            _take_back(state, book, pressure_state)


# -- loads ----------------------------------------------------------------------------------------


def is_closed_to(state: CoreState, ticket: Ticket, device: DeviceId) -> bool:
    """Says whether no load of a ticket may begin on a device now."""
    return level_of(state, device) is Level.CRITICAL and not is_spared(state, ticket)


def refusal(state: CoreState, holder: HolderId, role: str) -> UnderPressure | None:
    """Returns the error for a request for a model of this role, while the pressure on every device
    that it could go to is critical; None when it may join the queue."""
    holder_state = state.holders.get(holder)
    node = state.nodes.get(holder_state.node) if holder_state else None
    if node is None or state.policies.roles[role].is_spared:
        return None
    books = compute_books(state, node)
    if not books or any(level_of(state, b.device) is not Level.CRITICAL for b in books):
        return None
    freest = max((state.pressure[b.device].free_bytes for b in books), default=Bytes(0))
    return UnderPressure(node.node, freest)
