"""Where a ticket could go: devices that may be lent from, and how much waiting could ever bring."""

from collections.abc import Iterable

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets.budget import on_demand, pinned_overcommit, share
from arbiter.core.tickets.companions import end_with_primary
from arbiter.core.types import DeviceKind
from arbiter.units import Bytes, DeviceId, Instant, after, since

COMPUTE = frozenset({DeviceKind.GPU, DeviceKind.CPU})


def compute_books(mind: CoreState, node: Node) -> list[DeviceAccount]:
    books = mind.ledger.books
    return [books[d] for d in node.computing if d in books]


def on_demand_of(book: DeviceAccount) -> Bytes:
    """The most that waiting can ever bring: pinned models are never victims (SPEC B2)."""
    return on_demand(book.budget_bytes, book.pinned_bytes)


def flag_pinned(mind: CoreState, devices: Iterable[DeviceId]) -> None:
    """The table or a node has changed: more may be pinned now than a device can lend."""
    for device in devices:
        flag_pinned_on(mind, mind.ledger.books[device], Bytes(0))


def flag_pinned_on(mind: CoreState, book: DeviceAccount, more: Bytes) -> None:
    """What a pinned model needs is known once it asks, which it does at start (SPEC B2)."""
    pinned = Bytes(book.pinned_bytes + more)
    if over := pinned_overcommit(book.budget_bytes, pinned):
        lent = book.budget_bytes
        mind.tell("pinned_overcommit", size=over, device=book.device, pinned=pinned, budget=lent)


def cap_pins(mind: CoreState, devices: Iterable[DeviceId]) -> None:
    """At most a share of a device is pinned (SPEC C8). What was pinned first stays so; what comes
    on top of that is a victim like any other."""
    for device in devices:
        if (book := mind.ledger.books.get(device)) is None:
            continue
        most, total = share(book.budget_bytes, mind.settings.pinned_most_fraction), 0
        pinned = (e for e in book.entries.values() if e.pinned and e.lives_in is None)
        for entry in sorted(pinned, key=lambda e: (e.opened, e.ticket)):
            size = end_with_primary(mind, entry, device)
            if total + size > most:
                mind.pin(entry, False)
                mind.tell("pin_over_cap", entry, size=size, device=device, cap=most)
            else:
                total += size


def is_readable(mind: CoreState, node: Node, device: DeviceId, now: Instant) -> bool:
    """Its memory was read in this epoch and lately, and no engine that nobody claimed may still be
    growing on it."""
    if node.heard is None or since(node.heard, now) >= mind.settings.terms.reading:
        return False
    return device in node.readings and now >= _unclaimed_until(mind, node, device)


def _unclaimed_until(mind: CoreState, node: Node, device: DeviceId) -> Instant:
    if not node.unclaimed:
        return Instant(0)
    alarm = mind.settings.terms.reclaim_alarm
    seen = [e.first_seen for e in node.unclaimed.values() if device in e.measured]
    return after(max([mind.settled_at, *seen]), alarm) if seen else Instant(0)


def readable_devices(mind: CoreState, node: Node) -> list[DeviceAccount]:
    """Of those that compute. The line is looked at again when claims to another are over."""
    books = compute_books(mind, node)
    for book in books:
        over_at = _unclaimed_until(mind, node, book.device)
        if mind.now < over_at:
            mind.alarms.set(("line", node.node), over_at)
    return [b for b in books if is_readable(mind, node, b.device, mind.now)]
