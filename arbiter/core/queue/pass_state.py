"""What one look at a node's line knows: what is free, promised, reserved, and held for one that is
due (SPEC C6, C10)."""

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
    """One look at one node's line."""

    node: Node
    books: dict[DeviceId, DeviceAccount]  # of its trusted devices that compute
    largest_bytes: Bytes  # budget
    most_bytes: Bytes  # that waiting can ever bring on one device
    open_bytes: Bytes  # the same for whom nothing is reserved, or less
    reserves: dict[str, Bytes]  # of each device, by tenant
    promised: defaultdict[DeviceId, int] = field(default_factory=lambda: defaultdict(int))
    held: set[DeviceId] = field(default_factory=set)  # for one that is due
    hopeless: list[tuple[Bytes, Priority, str]] = field(default_factory=list)
    most_urgent: Priority | None = None  # of all in the line, once somebody asked
    is_waiting: bool = False  # somebody is left in the line
    is_over: bool = False  # somebody has become due: the order has changed
    judged_count: int = 0  # of the hopeless, when the rest was last judged
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

    def open_to(self, mind: CoreState, entry: Ticket) -> list[DeviceAccount]:
        """Where a load of it may begin, once there is room."""
        return [
            book
            for device, book in self.books.items()
            if device not in self.held and not pressure.is_closed_to(mind, entry, device)
        ]

    def is_hopeless(self, need: Bytes, priority: Priority, standing: str) -> bool:
        """One before it that asked for no more, and was no less urgent, could not load."""
        for least, most_urgent, whose in self.hopeless:
            if need >= least and priority >= most_urgent and standing == whose:
                return True
        return False

    def is_rest_hopeless(self, walked: QueueEntry, mind: CoreState) -> bool:
        """So is everybody behind: none is more urgent, none asks for less. Asked anew only when
        one more could not load; those that are due stand in front and are looked at. Where tenants
        differ, what one of them lacks another may have."""
        if walked.is_due or len(self.hopeless) == self.judged_count:
            return False
        self.judged_count = len(self.hopeless)
        crowd = mind.line.crowd(self.node.node)
        if mind.tenants and not crowd.is_of_one_standing():
            return False
        need, priority, _ = self.hopeless[-1]
        if any(count > 0 and urgent < priority for urgent, count in self.unwalked.items()):
            return False
        return crowd.needs_at_least(need, mind.estimates.version)

    def passes_over(self, waiting: QueueEntry, version: int) -> bool:
        """Most of a long line: what such a one needs is known, and hopeless."""
        waiter = waiting.waiter
        if waiting.version != version or waiting.is_due or waiter.is_asleep:
            return False
        return self.is_hopeless(waiting.need_bytes, waiter.priority, waiting.standing)

    def wait(self, waiting: QueueEntry, devices: list[DeviceId]) -> None:
        """One that is due holds every device it could use."""
        self.is_waiting = True
        if waiting.is_due:
            self.held.update(devices)


# -------------------------------------------------------------------------------------------------
# Who is overtaken by a grant (SPEC C6): so often, and then it is due and overtaken no more.


def count_bypasses(mind: CoreState, look: GrantPass, turn: int, home: Sizes) -> None:
    """Those who had asked before and could have used these bytes: perhaps a long line, so what most
    of them need not be asked is asked last."""
    most = max(on_demand_of(mind.ledger.books[d]) for d in home)
    silent: dict[HolderId, bool] = {}  # each holder is asked for once
    for other in mind.line.at(look.node.node):
        waiter, holder = other.waiter, other.holder
        if holder not in silent:
            silent[holder] = mind.is_silent(holder)
        if waiter.turn > turn or other.is_due or silent[holder]:
            continue
        is_plain = not (waiter.is_asleep or other.is_of_gang)
        if other.need_bytes <= most if is_plain else _could_use(mind, waiter.ticket, home, most):
            mind.line.overtaken(other, mind.settings.bypass_count)
            look.is_over = look.is_over or other.is_due


def _could_use(mind: CoreState, ticket: TicketId, home: Sizes, most: Bytes) -> bool:
    """A sleeper, or one of several that only make sense together."""
    entry, waiting = mind.ledger.find(ticket), mind.line.find(ticket)
    assert entry is not None and waiting is not None
    if entry.state is State.ASLEEP:
        return bool(entry.home.keys() & home.keys())
    if entry.state is not State.QUEUED or gangs.members(mind, entry) is None:
        return False  # it has bytes of its own to come, or does not compete
    return waiting.need_bytes <= most
