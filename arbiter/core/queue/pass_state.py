"""Keeps what one pass over a node's queue knows: what is free, promised, reserved, and held for
aged tickets (C6, C10).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from arbiter.core.eviction import pressure
from arbiter.core.eviction.eviction import returning_bytes
from arbiter.core.queue import gangs
from arbiter.core.queue.outcome import Outcome
from arbiter.core.queue.placement_memo import PlacementMemo
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets import quotas
from arbiter.core.tickets.lendable_devices import compute_books, unpinned_bytes
from arbiter.core.types import Priority
from arbiter.units import Bytes, DeviceId


@dataclass(frozen=True, slots=True)
class Limits:
    """Says what one ticket may have on the devices of its node: numbers, computed once for a try.

    `most_by_device` covers every device that computes; it is empty where nothing bounds the need,
    because no tenant has limits and any ticket may have as much. The others cover only devices that
    may be lent from now: `free_by_device` is free and usable, `room_by_device` counts what is on
    its way back as well. Both leave out what the pass has promised and what is reserved for other
    tenants."""

    need_bytes: Bytes
    most_by_device: Sizes  # what waiting can ever bring
    free_by_device: dict[DeviceId, int]
    room_by_device: dict[DeviceId, int]

    @property
    def most_bytes(self) -> Bytes:
        """Returns the most on any one device; the need itself where nothing bounds it, or no
        device is known."""
        return max(self.most_by_device.values(), default=self.need_bytes)

    def fits(self, device: DeviceId, size: int) -> bool:
        """Says whether so much may be granted on a device now."""
        return self.free_by_device[device] >= size

    def may_ever_fit(self, device: DeviceId) -> bool:
        """Says whether waiting may bring the need on a device."""
        return self.need_bytes <= self.most_by_device.get(device, self.need_bytes)

    def missing(self, device: DeviceId) -> Bytes:
        """Returns what the need lacks on a device beyond what is on its way back."""
        return Bytes(self.need_bytes - self.room_by_device[device])


@dataclass(slots=True)
class GrantPass:
    """Keeps what one pass over one node's queue knows."""

    node: Node
    books: dict[DeviceId, DeviceAccount]  # of its readable devices that compute
    most_bytes: Bytes  # that waiting can ever bring on one device
    open_bytes: Bytes  # the same for a tenant that has no reserve, or less
    reserves: dict[str, Bytes]  # of each device, by tenant
    memo: PlacementMemo
    promised: defaultdict[DeviceId, Counter[str]]  # bytes, by tenant
    reserved_devices: set[DeviceId] = field(default_factory=set)  # for an aged ticket
    reserved_roles: set[str] = field(default_factory=set)  # exclusion groups, for an aged ticket
    most_urgent: Priority | None = None  # of all in the queue, once an aged ticket asked
    has_waiting: bool = False  # a ticket is left in the queue
    order_changed: bool = False  # a ticket has aged by a grant

    def room(self, device: DeviceId, ticket: Ticket) -> int:
        """Returns the bytes that are free on a device or on their way back, promised to no ticket
        and reserved for no tenant other than the ticket's."""
        book, promised = self.books[device], self.promised[device]
        tenant = ticket.client.tenant
        reserved_bytes = quotas.reserved_for_others(
            self.reserves, book, tenant, promised, has_left=True
        )
        return book.free_bytes + returning_bytes(book) - promised.total() - reserved_bytes

    def limits(self, state: CoreState, ticket: Ticket, need: Bytes) -> Limits:
        """Returns what this ticket may have as things are. It is stale once something was
        revoked."""
        tenant = ticket.client.tenant
        free = {}
        room = {}
        for device, book in self.books.items():
            room[device] = self.room(device, ticket)
            reserved_bytes = quotas.reserved_for_others(self.reserves, book, tenant)
            free[device] = min(book.free_bytes - reserved_bytes, room[device])
        most: Sizes = {}
        if state.tenants or need > self.open_bytes:
            most = self.most_for(state, tenant)
        return Limits(need, most, free, room)

    def most_for(self, state: CoreState, tenant: str) -> Sizes:
        """Returns what waiting can ever bring this tenant on each device that computes."""
        return quotas.at_most(state, tenant, compute_books(state, self.node))

    def open_to(self, state: CoreState, ticket: Ticket) -> list[DeviceAccount]:
        """Returns the accounts of devices on which a load of this ticket may begin, once there is
        room."""
        return [
            book
            for device, book in self.books.items()
            if device not in self.reserved_devices
            and not pressure.is_closed_to(state, ticket, device)
        ]

    def defer(self, queued: QueueEntry, devices: Iterable[DeviceId]) -> Outcome:
        """Leaves a ticket in its place. If it is aged, it holds `devices`, whose bytes it waits
        for, against later tickets; none where it waits for something else."""
        self.has_waiting = True
        if queued.is_aged:
            self.reserved_devices.update(devices)
        return Outcome.DEFERRED


# -------------------------------------------------------------------------------------------------
# Which tickets a grant bypasses (C6): so often, and then a ticket is aged and bypassed no more.


def count_bypasses(state: CoreState, pass_: GrantPass, sequence: int, home: Sizes) -> None:
    """Counts a bypass for tickets that asked before the granted one and could have used these
    bytes. The queue may be long, so each holder is asked for once, and each ticket for little."""
    node = pass_.node.node
    most = max(unpinned_bytes(state.ledger.books[d]) for d in home)
    answering = {h for h in state.queue.stats(node).holders if not state.is_silent(h)}
    bypassed = [
        other
        for other in state.queue.asked_before(node, sequence)
        if not (other.is_aged or other.is_held)
        and other.holder in answering
        and (other.need_bytes <= most if other.is_plain else _could_use(state, other, home, most))
    ]
    if state.queue.count_bypasses(bypassed, state.settings.bypass_count):
        pass_.order_changed = True


def _could_use(state: CoreState, queued: QueueEntry, home: Sizes, most: Bytes) -> bool:
    """Says whether an asleep ticket, or a member of a gang, could have used these bytes."""
    ticket = state.ledger.find(queued.request.ticket)
    assert ticket is not None
    if ticket.state is State.ASLEEP:
        return bool(ticket.home.keys() & home.keys())
    if ticket.state is not State.QUEUED or gangs.members(state, ticket) is None:
        return False  # it has bytes of its own to come, or does not compete
    return queued.need_bytes <= most
