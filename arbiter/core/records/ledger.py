"""The books: who holds how many bytes where, in which state. No policy, no time, no I/O.

Identity, kept per device and checked for touched devices after every event:

    free + charged + foreign == budget

A ticket in a charged state is charged, on each device, the larger of what it was granted and what
it was measured to hold; so a child that takes more than it said is on the books as soon as seen.
`free` is negative while a device is overcommitted: a budget was lowered, a child took more, or
foreign memory grew. Bytes stay charged through RECLAIMING because drivers report memory back later
than a holder drops it (ollama waits for the same reason: server/sched.go).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from arbiter.core.records.holdings import Holdings
from arbiter.core.records.ticket import CHARGED, LEAVING, TRANSITIONS, Sizes, State, Ticket
from arbiter.core.types import Client, DeviceKind
from arbiter.errors import LedgerBroken
from arbiter.units import (
    Bytes,
    DeviceId,
    HolderId,
    Instant,
    NodeId,
    TicketId,
)

SUMMED_COUNT = 64  # tickets on a device; their sum takes about 20 us
UNREAD_COUNT = 64  # changes of a device beyond its tickets that are noted for nobody


@dataclass(slots=True)
class DeviceAccount:
    """One device."""

    device: DeviceId
    node: NodeId
    kind: DeviceKind
    total_bytes: Bytes
    budget_bytes: Bytes
    free_bytes: Bytes
    charged_bytes: Bytes = Bytes(0)
    foreign_bytes: Bytes = Bytes(0)  # the part that eats into the budget
    entries: dict[TicketId, Ticket] = field(default_factory=dict)  # those it is charged for
    leaving: dict[TicketId, Ticket] = field(default_factory=dict)  # DRAINING and RECLAIMING
    loading: dict[TicketId, Ticket] = field(default_factory=dict)
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)  # by capability and model
    pinned_bytes: Bytes = Bytes(0)  # of those charged
    held: Counter[str] = field(default_factory=Counter)  # bytes by tenant
    stale: set[TicketId] | None = None  # changed since they were ranked; None: no order is kept

    def note_stale(self, ticket: TicketId) -> None:
        """What ranks it has changed. Where nobody looks for long the order is given up."""
        if self.stale is not None:
            self.stale.add(ticket)
            if len(self.stale) > len(self.entries) + UNREAD_COUNT:
                self.stale = None


class Ledger:
    """Opened, moved, weighed and budgeted here and nowhere else."""

    def __init__(self) -> None:
        self.books: dict[DeviceId, DeviceAccount] = {}
        self.open_count: Counter[str] = Counter()  # tickets not closed, by capability
        self.holdings = Holdings()
        self._entries: dict[TicketId, Ticket] = {}
        self._held: dict[HolderId, dict[TicketId, Ticket]] = {}
        self._holding: dict[HolderId, dict[TicketId, Ticket]] = {}  # of those, past the line
        self.changed: set[NodeId] = set()  # since somebody last looked for what to decide
        self._touched: set[DeviceId] = set()
        self._short: dict[NodeId, set[DeviceId]] = {}

    # -- tickets -------------------------------------------------------------------------------

    def open(self, entry: Ticket) -> None:
        """A new ticket, QUEUED, or in the state its holder rejoined with."""
        assert entry.ticket not in self._entries
        self._entries[entry.ticket] = entry
        self._held.setdefault(entry.holder, {})[entry.ticket] = entry
        if entry.state is not State.QUEUED:
            self._holding.setdefault(entry.holder, {})[entry.ticket] = entry
        self.open_count[entry.capability] += 1
        self._count(entry, 1)

    def move(self, entry: Ticket, to: State, now: Instant, granted: Sizes | None = None) -> None:
        """The only way a ticket changes state. `granted` replaces what it was granted before."""
        if to not in TRANSITIONS[entry.state]:
            raise LedgerBroken(f"{entry.ticket}: {entry.state.value} -> {to.value}")
        if entry.state is State.QUEUED:
            self._holding.setdefault(entry.holder, {})[entry.ticket] = entry
        self._count(entry, -1)
        entry.state, entry.since = to, now
        self.changed.add(entry.node)
        if granted is not None:
            entry.granted = granted
        self._count(entry, 1)
        if to is State.CLOSED:
            self._forget(entry)

    def weigh(self, entry: Ticket, measured: Sizes) -> None:
        """What the node agent saw this ticket's processes hold."""
        if measured == entry.measured:
            return
        self._count(entry, -1)
        entry.measured = measured
        self._count(entry, 1)

    def pin(self, entry: Ticket, is_pinned: bool) -> None:
        """The configuration has changed its state about it."""
        if entry.ticket not in self._entries:
            entry.pinned = is_pinned
        elif is_pinned is not entry.pinned:
            self._count(entry, -1)
            entry.pinned = is_pinned
            self._count(entry, 1)

    def bill_to(self, entry: Ticket, client: Client) -> None:
        """What it holds is on this client's account from now on."""
        self._count(entry, -1)
        entry.client = client
        self._count(entry, 1)

    def share_scratch(self, entry: Ticket, lock: str, size: Bytes) -> None:
        """The configuration says under which dispatch lock it computes."""
        if entry.ticket not in self._entries:
            entry.dispatch_lock, entry.shared_scratch_bytes = lock, size
        elif (lock, size) != (entry.dispatch_lock, entry.shared_scratch_bytes):
            self._count(entry, -1)
            entry.dispatch_lock, entry.shared_scratch_bytes = lock, size
            self._count(entry, 1)

    def touch(self, entry: Ticket) -> None:
        """Something that ranks it has changed, its bytes have not."""
        for device in entry.devices:
            if book := self.books.get(device):
                book.note_stale(entry.ticket)

    def resize(self, entry: Ticket, granted: Sizes) -> None:
        """A resident was granted more, or gave some back."""
        self._count(entry, -1)
        entry.granted = granted
        self._count(entry, 1)

    def leave(self, entry: Ticket, device: DeviceId) -> None:
        """The device is gone, and with it the ticket's bytes there."""
        self._count(entry, -1)
        entry.granted = {d: size for d, size in entry.granted.items() if d != device}
        entry.measured = {d: size for d, size in entry.measured.items() if d != device}
        self._count(entry, 1)

    def find(self, ticket: TicketId) -> Ticket | None:
        return self._entries.get(ticket)

    def entries(self, *states: State) -> list[Ticket]:
        """In the order they were opened, filtered by state when any is given."""
        return [e for e in self._entries.values() if not states or e.state in states]

    def held_by(self, holder: HolderId) -> list[Ticket]:
        return list(self._held.get(holder, {}).values())

    def holding(self, holder: HolderId) -> Mapping[TicketId, Ticket]:
        """Those of its tickets that are charged: the rest waits in the line, perhaps very long."""
        return self._holding.get(holder, {})

    def _forget(self, entry: Ticket) -> None:
        del self._entries[entry.ticket]
        for index in (self._held, self._holding):
            index.get(entry.holder, {}).pop(entry.ticket, None)
            if not index.get(entry.holder):
                index.pop(entry.holder, None)
        self.open_count[entry.capability] -= 1

    def _count(self, entry: Ticket, sign: int) -> None:
        """Put the ticket's charge on its devices' books, or take it off."""
        for device in entry.devices:
            if book := self.books.get(device):
                self._post(book, entry, sign)

    def _post(self, book: DeviceAccount, entry: Ticket, sign: int) -> None:
        charge = entry.charge(book.device)
        if charge == 0:
            return
        book.charged_bytes = Bytes(book.charged_bytes + sign * charge)
        book.free_bytes = Bytes(book.free_bytes - sign * charge)
        book.copies[entry.capability, entry.model] += sign
        if entry.pinned:
            book.pinned_bytes = Bytes(book.pinned_bytes + sign * charge)
        if book.kind is not DeviceKind.HOST:
            self.holdings.post(entry.client, entry.ticket, sign * charge, book.held)
        if sign > 0:
            book.entries[entry.ticket] = entry
            if entry.state in LEAVING:
                book.leaving[entry.ticket] = entry
            elif entry.state is State.LOADING:
                book.loading[entry.ticket] = entry
        else:
            del book.entries[entry.ticket]
            book.leaving.pop(entry.ticket, None)
            book.loading.pop(entry.ticket, None)
            if not book.copies[entry.capability, entry.model]:
                del book.copies[entry.capability, entry.model]
        book.note_stale(entry.ticket)
        self._note(book)

    # -- devices -------------------------------------------------------------------------------

    def put_device(self, book: DeviceAccount) -> None:
        """A device appears, with what is already held on it, or changes its budget."""
        if old := self.books.get(book.device):
            grown = book.budget_bytes - old.budget_bytes
            old.kind, old.total_bytes = book.kind, book.total_bytes
            old.budget_bytes = book.budget_bytes
            old.free_bytes = Bytes(old.free_bytes + grown)
        else:
            self.books[book.device] = book
            for entry in self._entries.values():
                if book.device in entry.devices:
                    self._post(book, entry, 1)
        self._note(self.books[book.device])

    def drop_device(self, device: DeviceId) -> None:
        book = self.books.pop(device)
        assert not book.entries
        self._touched.discard(device)
        self._short.get(book.node, set()).discard(device)

    def set_foreign(self, device: DeviceId, foreign: Bytes) -> None:
        book = self.books[device]
        if foreign == book.foreign_bytes:
            return
        book.free_bytes = Bytes(book.free_bytes + book.foreign_bytes - foreign)
        book.foreign_bytes = foreign
        self._note(book)

    def _note(self, book: DeviceAccount) -> None:
        self._touched.add(book.device)
        self.changed.add(book.node)
        if book.free_bytes < 0:
            self._short.setdefault(book.node, set()).add(book.device)
        elif short := self._short.get(book.node):
            short.discard(book.device)

    def overcommitted(self, node: NodeId) -> list[DeviceAccount]:
        return [self.books[device] for device in sorted(self._short.get(node, ()))]

    # -- checks --------------------------------------------------------------------------------

    def check_touched(self) -> None:
        """Devices whose books changed since the last call. Of one with very many tickets the sum
        is left to the audit: it would cost each event as much as all of them."""
        touched, self._touched = self._touched, set()
        self.check({d for d in touched if len(self.books[d].entries) <= SUMMED_COUNT})
        for device in touched:
            self._check_sum(self.books[device], self.books[device].charged_bytes)

    def check(self, devices: set[DeviceId]) -> None:
        """Raises LedgerBroken where the identity does not hold."""
        for device in devices:
            book = self.books[device]
            charged = sum(e.charge(device) for e in book.entries.values())
            if charged != book.charged_bytes:
                raise LedgerBroken(f"{device}: charged {book.charged_bytes}, entries {charged}")
            self._check_sum(book, charged)

    def _check_sum(self, book: DeviceAccount, charged: int) -> None:
        free, foreign = book.free_bytes, book.foreign_bytes
        if free + charged + foreign != book.budget_bytes:
            raise LedgerBroken(
                f"{book.device}: free {free} + charged {charged} + foreign {foreign}"
                f" != budget {book.budget_bytes}"
            )


# -------------------------------------------------------------------------------------------------
# All the books from the tickets up, trusting no index: more than is checked after each event.


def audit(ledger: Ledger) -> None:
    """Raises LedgerBroken where an index differs from the tickets."""
    ledger.check(set(ledger.books))
    for book in ledger.books.values():
        _audit_book(ledger, book)
    if ledger.entries(State.CLOSED):
        raise LedgerBroken("a closed ticket is still on the books")
    for holder in {e.holder for e in ledger.entries()}:
        charged = {e.ticket for e in ledger.held_by(holder) if e.state in CHARGED}
        if charged != ledger.holding(holder).keys():
            raise LedgerBroken(f"{holder}: holding {sorted(charged)}, index differs")


def _audit_book(ledger: Ledger, book: DeviceAccount) -> None:
    device = book.device
    charged = {e.ticket for e in ledger.entries() if e.charge(device) > 0}
    if charged != book.entries.keys():
        raise LedgerBroken(f"{device}: index {sorted(book.entries)} != {sorted(charged)}")
    leaving = {t for t, e in book.entries.items() if e.state in LEAVING}
    if leaving != book.leaving.keys():
        raise LedgerBroken(f"{device}: leaving {sorted(book.leaving)} != {sorted(leaving)}")
    loading = {t for t, e in book.entries.items() if e.state is State.LOADING}
    if loading != book.loading.keys():
        raise LedgerBroken(f"{device}: loading {sorted(book.loading)} != {sorted(loading)}")
    pinned = sum(e.charge(device) for e in book.entries.values() if e.pinned)
    if pinned != book.pinned_bytes or book.copies.total() != len(book.entries):
        raise LedgerBroken(f"{device}: pinned {book.pinned_bytes}, entries {pinned}")
