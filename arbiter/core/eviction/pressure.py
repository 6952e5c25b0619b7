"""Pressure (SPEC C5): real memory is short on a device or node, whatever the books say.

Three sources, the worst wins: readings of free bytes, the kernel's stalls (PSI), and levels that
somebody pushed, which last for a term. It acts only on the device it is felt on: low takes the
lowest idle resident, again with each tick that stays low; critical takes every idle one, and no new
load begins there. Text is spared, and so is what is pinned or in use.
"""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason
from arbiter.core.eviction.eligibility import may_leave
from arbiter.core.eviction.eviction import revoke
from arbiter.core.eviction.ranking import ranked_victims
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Ticket
from arbiter.core.state import CoreState, Node, PressureState
from arbiter.core.tickets.device_limits import compute_books
from arbiter.core.tickets.reclaim import charged
from arbiter.core.types import Level
from arbiter.core.view import MemoryReading
from arbiter.errors import UnderPressure
from arbiter.units import Bytes, DeviceId, HolderId, NodeId, after, host_device

# -- sources --------------------------------------------------------------------------------------


def on_reading(mind: CoreState, node: Node, stalled_fraction: float) -> None:
    """A reading has come."""
    for device, reading in node.readings.items():
        book = mind.ledger.books[device]
        reserve = Bytes(book.total_bytes - int(book.total_bytes * mind.settings.arena_fraction))
        is_ram = book.kind is not types.DeviceKind.GPU
        stalls = stalled_fraction if is_ram else 0.0
        gauge = MemoryReading(book.kind, reading.free_bytes, book.total_bytes, reserve, stalls)
        felt = _state_of(mind, device)
        felt.measured, felt.free_bytes = mind.policies.pressure(gauge), reading.free_bytes
        _update_level(mind, book, "measured")


def on_pushed(mind: CoreState, event: ev.PressurePushed) -> None:
    """By the API: somebody knows better. It ends by itself."""
    found = [b for b in mind.ledger.books.values() if event.where in (b.device, b.node)]
    if not found:
        mind.stale_count += 1
    for book in found:
        felt = _state_of(mind, book.device)
        felt.pushed, felt.pushed_until = event.level, after(mind.now, event.term)
        if event.free_bytes is not None:
            felt.free_bytes = event.free_bytes
        mind.alarms.set(("pressure", book.device), felt.pushed_until)
        _update_level(mind, book, "pushed")


def _state_of(mind: CoreState, device: DeviceId) -> PressureState:
    return mind.pressure.setdefault(device, PressureState())


def level_of(mind: CoreState, device: DeviceId) -> Level:
    felt = mind.pressure.get(device)
    return felt.level if felt else Level.NOMINAL


def is_nominal(mind: CoreState, node: NodeId) -> bool:
    """Everywhere on the node."""
    found = mind.nodes.get(node)
    return found is not None and all(level_of(mind, d) is Level.NOMINAL for d in found.devices)


# -- acting ---------------------------------------------------------------------------------------


def _update_level(mind: CoreState, book: DeviceAccount, source: str) -> None:
    """Told when it changes; acted on when it rises, and then at each tick."""
    felt = _state_of(mind, book.device)
    before, felt.level = felt.level, worst(mind, felt)
    if felt.level is before:
        return
    felt.nothing_left = False
    mind.ledger.changed.add(book.node)  # loads may begin there that could not, or the reverse
    level = felt.level.name.lower()
    mind.tell(
        "memory_pressure", size=felt.free_bytes, device=book.device, level=level, source=source
    )
    if felt.level > before:
        _relieve(mind, book, felt)


def worst(mind: CoreState, felt: PressureState) -> Level:
    is_current = felt.pushed_until is not None and mind.now < felt.pushed_until
    return max(felt.measured, felt.pushed) if is_current else felt.measured


def on_timer(mind: CoreState, name: str) -> None:
    """The tick, and the end of a pushed level."""
    book, felt = mind.ledger.books.get(DeviceId(name)), mind.pressure.get(DeviceId(name))
    if book is None or felt is None:
        mind.pressure.pop(DeviceId(name), None)  # it left with its node
        return
    _update_level(mind, book, "term")
    if felt.level is Level.NOMINAL or felt.acts_at is None:
        return
    if mind.now >= felt.acts_at:
        _relieve(mind, book, felt)
    else:
        mind.alarms.set(("pressure", book.device), felt.acts_at)


def _relieve(mind: CoreState, book: DeviceAccount, felt: PressureState) -> None:
    if _acts_elsewhere(mind, book):
        return
    felt.acts_at = after(mind.now, mind.settings.terms.pressure_tick)
    mind.alarms.set(("pressure", book.device), felt.acts_at)
    victims = candidates(mind, book)
    for victim in victims if felt.level is Level.CRITICAL else victims[:1]:
        revoke(mind, victim, Reason.PRESSURE, None)
    if not victims and not felt.nothing_left:
        felt.nothing_left = True
        held = Bytes(sum(charged(e) for e in book.entries.values()))
        level = felt.level.name.lower()
        mind.tell("pressure_nothing_left", size=held, device=book.device, level=level)


def candidates(mind: CoreState, book: DeviceAccount) -> list[Ticket]:
    """Idle, unpinned, and not text; the lowest first: by urgency, role, and the policy's price."""
    priced = [pair for b in _one_memory(mind, book) for pair in ranked_victims(mind, b)]
    priced.sort(key=lambda pair: (pair[1].rank[:3], pair[0].role_rank, pair[1].place))
    found = {entry.ticket: entry for entry, _ in priced}
    return [e for e in found.values() if may_leave(mind, e) and not is_spared(mind, e)]


def _one_memory(mind: CoreState, book: DeviceAccount) -> list[DeviceAccount]:
    """A CPU device and the host are two budgets of one RAM: the device acts for both."""
    host = mind.ledger.books.get(host_device(book.node))
    if book.kind is types.DeviceKind.CPU and host:
        return [book, host]
    return [book]


def _acts_elsewhere(mind: CoreState, book: DeviceAccount) -> bool:
    node = mind.nodes.get(book.node)
    specs = node.devices.values() if node else ()
    return book.kind is types.DeviceKind.HOST and any(s.kind is types.DeviceKind.CPU for s in specs)


def is_spared(mind: CoreState, entry: Ticket) -> bool:
    if entry.lease:
        return False
    spec = mind.registry.specs.get(entry.capability)
    return spec is not None and mind.policies.roles[spec.role].is_spared


def evict_next(mind: CoreState, busy: Ticket) -> None:
    """A victim was in use after all: another in its place, at once."""
    for device in sorted(busy.devices):
        book, felt = mind.ledger.books.get(device), mind.pressure.get(device)
        if book and felt and felt.level is not Level.NOMINAL:
            _relieve(mind, book, felt)


# -- loads ----------------------------------------------------------------------------------------


def is_closed_to(mind: CoreState, entry: Ticket, device: DeviceId) -> bool:
    """No load of it may begin there now."""
    return level_of(mind, device) is Level.CRITICAL and not is_spared(mind, entry)


def refusal_under_pressure(mind: CoreState, holder: HolderId, role: str) -> UnderPressure | None:
    """Refused while every device it could go to is critical."""
    known = mind.holders.get(holder)
    found = mind.nodes.get(known.node) if known else None
    if found is None or mind.policies.roles[role].is_spared:
        return None
    books = compute_books(mind, found)
    if not books or any(level_of(mind, b.device) is not Level.CRITICAL for b in books):
        return None
    freest = max((mind.pressure[b.device].free_bytes for b in books), default=Bytes(0))
    return UnderPressure(found.node, freest)
