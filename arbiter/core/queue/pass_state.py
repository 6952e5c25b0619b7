"""What one pass_ at a node's line knows: what is free, promised, reserved, and held for one that is
due (C6, C10)."""

from collections import defaultdict
from dataclasses import dataclass, field

from arbiter.core.eviction import pressure
from arbiter.core.eviction.eviction import returning_bytes
from arbiter.core.queue import gangs
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets import quotas
from arbiter.core.tickets.device_limits import on_demand_of
from arbiter.core.types import Priority
from arbiter.units import Bytes, DeviceId, HolderId, TicketId


@dataclass(slots=True)
class GrantPass:
    """One pass_ at one node's line."""

    node: Node
    books: dict[DeviceId, DeviceAccount]  # of its trusted devices that compute
    largest_bytes: Bytes  # budget
    most_bytes: Bytes  # that waiting can ever bring on one device
    open_bytes: Bytes  # the same for whom nothing is reserved, or less
    reserves: dict[str, Bytes]  # of each device, by tenant
    promised: defaultdict[DeviceId, int] = field(default_factory=lambda: defaultdict(int))
    reserved_devices: set[DeviceId] = field(default_factory=set)  # for one that is due
    unplaceable: list[tuple[Bytes, Priority, str]] = field(default_factory=list)
    most_urgent: Priority | None = None  # of all in the line, once somebody asked
    is_waiting: bool = False  # somebody is left in the line
    restart_needed: bool = False  # somebody has become due: the order has changed
    judged_count: int = 0  # of the unplaceable, when the rest was last judged
    unwalked: dict[int, int] = field(default_factory=dict)  # how urgent those are, see line.Crowd

    def room(self, device: DeviceId, entry: Ticket) -> int:
        """What is free there or coming, promised to nobody and reserved for no other tenant."""
        book = self.books[device]
        kept = quotas.kept(self.reserves, book, entry.client.tenant, has_left=True)
        return book.free_bytes + returning_bytes(book) - self.promised[device] - kept

    def fits(self, device: DeviceId, need: int, entry: Ticket) -> bool:
        book = self.books[device]
        kept = quotas.kept(self.reserves, book, entry.client.tenant)
        return min(book.free_bytes - kept, self.room(device, entry)) >= need

    def open_to(self, state: CoreState, entry: Ticket) -> list[DeviceAccount]:
        """Where a load of it may begin, once there is room."""
        return [
            book
            for device, book in self.books.items()
            if device not in self.reserved_devices
            and not pressure.is_closed_to(state, entry, device)
        ]

    def is_unplaceable(self, need: Bytes, priority: Priority, quota_group: str) -> bool:
        """One before it that asked for no more, and was no less urgent, could not load."""
        for least, most_urgent, whose in self.unplaceable:
            if need >= least and priority >= most_urgent and quota_group == whose:
                return True
        return False

    def can_stop(self, walked: QueueEntry, state: CoreState) -> bool:
        """So is everybody behind: none is more urgent, none asks for less. Asked anew only when
        one more could not load; those that are due stand in front and are looked at. Where tenants
        differ, what one of them lacks another may have."""
        if walked.is_aged or len(self.unplaceable) == self.judged_count:
            return False
        self.judged_count = len(self.unplaceable)
        stats = state.queue.stats(self.node.node)
        if state.tenants and not stats.is_of_one_quota_group():
            return False
        need, priority, _ = self.unplaceable[-1]
        if any(count > 0 and urgent < priority for urgent, count in self.unwalked.items()):
            return False
        return stats.needs_at_least(need, state.estimates.version)

    def can_skip(self, waiting: QueueEntry, version: int) -> bool:
        """Most of a long line: what such a one needs is known, and unplaceable."""
        request = waiting.request
        if waiting.version != version or waiting.is_aged or request.is_asleep:
            return False
        return self.is_unplaceable(waiting.need_bytes, request.priority, waiting.quota_group)

    def defer(self, waiting: QueueEntry, devices: list[DeviceId]) -> None:
        """One that is due holds every device it could use."""
        self.is_waiting = True
        if waiting.is_aged:
            self.reserved_devices.update(devices)


# -------------------------------------------------------------------------------------------------
# Who is overtaken by a grant (C6): so often, and then it is due and overtaken no more.


def count_bypasses(state: CoreState, pass_: GrantPass, turn: int, home: Sizes) -> None:
    """Those who had asked before and could have used these bytes: perhaps a long line, so what most
    of them need not be asked is asked last."""
    most = max(on_demand_of(state.ledger.books[d]) for d in home)
    silent: dict[HolderId, bool] = {}  # each holder is asked for once
    for other in state.queue.at(pass_.node.node):
        request, holder = other.request, other.holder
        if holder not in silent:
            silent[holder] = state.is_silent(holder)
        if request.sequence > turn or other.is_aged or silent[holder]:
            continue
        is_plain = not (request.is_asleep or other.is_of_gang)
        if other.need_bytes <= most if is_plain else _could_use(state, request.ticket, home, most):
            state.queue.count_bypass(other, state.settings.bypass_count)
            pass_.restart_needed = pass_.restart_needed or other.is_aged


def _could_use(state: CoreState, ticket: TicketId, home: Sizes, most: Bytes) -> bool:
    """A sleeper, or one of several that only make sense together."""
    entry, waiting = state.ledger.find(ticket), state.queue.find(ticket)
    assert entry is not None and waiting is not None
    if entry.state is State.ASLEEP:
        return bool(entry.home.keys() & home.keys())
    if entry.state is not State.QUEUED or gangs.members(state, entry) is None:
        return False  # it has bytes of its own to come, or does not compete
    return waiting.need_bytes <= most
