"""Keeps the books: how many bytes each ticket holds on which device, in which state. No policy, no
time, no I/O.

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
from typing import Any

from arbiter.core.records.holdings import Holdings
from arbiter.core.records.ticket import CHARGED, LEAVING, TRANSITIONS, Sizes, State, Ticket
from arbiter.core.types import Client, DeviceKind, ModelName
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
UNREAD_COUNT = 64  # changes of a device beyond its tickets that are noted without a reader


@dataclass(slots=True)
class DeviceAccount:
    """Keeps the account of one device."""

    device: DeviceId
    node: NodeId
    kind: DeviceKind
    total_bytes: Bytes
    budget_bytes: Bytes
    free_bytes: Bytes
    charged_bytes: Bytes = Bytes(0)
    foreign_bytes: Bytes = Bytes(0)  # the part that eats into the budget
    tickets: dict[TicketId, Ticket] = field(default_factory=dict)  # those it is charged for
    leaving: dict[TicketId, Ticket] = field(default_factory=dict)  # DRAINING and RECLAIMING
    loading: dict[TicketId, Ticket] = field(default_factory=dict)
    copies: Counter[ModelName] = field(default_factory=Counter)  # by capability and model
    pinned_bytes: Bytes = Bytes(0)  # of those charged
    held: Counter[str] = field(default_factory=Counter)  # bytes by tenant
    stale: set[TicketId] | None = None  # changed since they were ranked; None: no order is kept

    def note_stale(self, ticket_id: TicketId) -> None:
        """Notes that what ranks a ticket has changed. The order is given up where no search has
        used it for long."""
        if self.stale is not None:
            self.stale.add(ticket_id)
            if len(self.stale) > len(self.tickets) + UNREAD_COUNT:
                self.stale = None

    def begin_order(self) -> None:
        """Begins to note what changes, with every ticket there as changed: an order is kept."""
        self.stale = set(self.tickets)

    def take_stale(self) -> set[TicketId]:
        """Returns what has changed since the order was brought up to date, which it is now."""
        assert self.stale is not None
        taken = self.stale
        self.stale = set()
        return taken


class Ledger:
    """Opens tickets, moves them, charges them what was measured, and keeps the budgets. Nothing
    else changes the books."""

    def __init__(self) -> None:
        self.books: dict[DeviceId, DeviceAccount] = {}
        self.lent_bytes = Bytes(0)  # budgets of all devices that compute
        self.open_count: Counter[str] = Counter()  # tickets not closed, by capability
        self.holdings = Holdings()
        self._tickets: dict[TicketId, Ticket] = {}
        self._held: dict[HolderId, dict[TicketId, Ticket]] = {}
        self._holding: dict[HolderId, dict[TicketId, Ticket]] = {}  # of those, past the queue
        self._leases: dict[TicketId, Ticket] = {}
        self._of_model: dict[ModelName, dict[TicketId, Ticket]] = {}
        self.dirty: set[NodeId] = set()  # changed since the last grant pass there
        self._touched: set[DeviceId] = set()
        self._short: dict[NodeId, set[DeviceId]] = {}

    # -- tickets -------------------------------------------------------------------------------

    def open(self, ticket: Ticket) -> None:
        """Adds a new ticket, QUEUED, or in the state its holder rejoined with."""
        assert ticket.id not in self._tickets
        self._tickets[ticket.id] = ticket
        self._held.setdefault(ticket.holder, {})[ticket.id] = ticket
        if ticket.state is not State.QUEUED:
            self._holding.setdefault(ticket.holder, {})[ticket.id] = ticket
        if ticket.lease:
            self._leases[ticket.id] = ticket
        self._of_model.setdefault(ticket.model_name, {})[ticket.id] = ticket
        self.open_count[ticket.capability] += 1
        self._count(ticket, 1)

    def move(
        self,
        ticket: Ticket,
        to: State,
        now: Instant,
        granted: Sizes | None = None,
        home: Sizes | None = None,
    ) -> None:
        """Changes the state of a ticket, which nothing else does. `granted` replaces what it was
        granted before, `home` the devices it is awake on. Raises LedgerBroken for a transition
        that is not in TRANSITIONS."""
        if to not in TRANSITIONS[ticket.state]:
            raise LedgerBroken(f"{ticket.id}: {ticket.state.value} -> {to.value}")
        if ticket.state is State.QUEUED:
            self._holding.setdefault(ticket.holder, {})[ticket.id] = ticket
        self._count(ticket, -1)
        ticket.state = to
        ticket.since = now
        self.dirty.add(ticket.node)
        if granted is not None:
            ticket.granted = granted
        if home is not None:
            ticket.home = home
        self._count(ticket, 1)
        if to is State.CLOSED:
            self._forget(ticket)

    def set_measured(self, ticket: Ticket, measured: Sizes) -> None:
        """Charges what the node agent saw this ticket's processes hold."""
        if measured == ticket.measured:
            return
        self._count(ticket, -1)
        ticket.measured = measured
        self._count(ticket, 1)

    def pin(self, ticket: Ticket, is_pinned: bool) -> None:
        """Makes a ticket pinned or not, as the configuration says now."""
        if ticket.id not in self._tickets:
            ticket.pinned = is_pinned
        elif is_pinned is not ticket.pinned:
            self._count(ticket, -1)
            ticket.pinned = is_pinned
            self._count(ticket, 1)

    def bill_to(self, ticket: Ticket, client: Client) -> None:
        """Puts what a ticket holds on this client's account from now on."""
        if ticket.id not in self._tickets:
            ticket.client = client
            return
        self._count(ticket, -1)
        ticket.client = client
        self._count(ticket, 1)

    def share_scratch(self, ticket: Ticket, lock: str, size: Bytes) -> None:
        """Notes under which dispatch lock a ticket computes, and its part of the shared reserve."""
        if ticket.id not in self._tickets:
            ticket.dispatch_lock = lock
            ticket.shared_scratch_bytes = size
        elif (lock, size) != (ticket.dispatch_lock, ticket.shared_scratch_bytes):
            self._count(ticket, -1)
            ticket.dispatch_lock = lock
            ticket.shared_scratch_bytes = size
            self._count(ticket, 1)

    def touch(self, ticket: Ticket) -> None:
        """Notes that something which ranks a ticket has changed, though not its bytes."""
        for device in ticket.devices:
            if book := self.books.get(device):
                book.note_stale(ticket.id)

    def resize(self, ticket: Ticket, granted: Sizes, home: Sizes) -> None:
        """Charges a resident that was granted more, or gave some back, of which `home` is what it
        has while it is awake."""
        self._count(ticket, -1)
        ticket.granted = granted
        ticket.home = home
        self._count(ticket, 1)

    def leave(self, ticket: Ticket, device: DeviceId) -> None:
        """Takes a ticket's bytes on a device off the books, because the device is gone."""
        self._count(ticket, -1)
        ticket.granted = {d: size for d, size in ticket.granted.items() if d != device}
        ticket.measured = {d: size for d, size in ticket.measured.items() if d != device}
        self._count(ticket, 1)

    def mark_dirty(self, *nodes: NodeId) -> None:
        """Has the next grant pass look at these nodes."""
        self.dirty.update(nodes)

    def clean(self) -> None:
        """Forgets which nodes were dirty: a grant pass looks at all of them now."""
        self.dirty = set()

    def find(self, ticket_id: TicketId) -> Ticket | None:
        """Returns the ticket of this id; None when it is not on the books."""
        return self._tickets.get(ticket_id)

    @property
    def tickets_count(self) -> int:
        """Returns how many tickets are on the books, in any state."""
        return len(self._tickets)

    def tickets(self, *states: State) -> list[Ticket]:
        """Returns all tickets in the order they were opened, or those in the given states."""
        return [t for t in self._tickets.values() if not states or t.state in states]

    def held_by(self, holder: HolderId) -> list[Ticket]:
        """Returns all tickets of a holder, queued ones included."""
        return list(self._held.get(holder, {}).values())

    def holding(self, holder: HolderId) -> Mapping[TicketId, Ticket]:
        """Returns those of its tickets that are charged: the others wait in the queue, which may be
        very long."""
        return self._holding.get(holder, {})

    def of_model(self, name: ModelName) -> list[Ticket]:
        """Returns all tickets of a model, queued ones included."""
        return list(self._of_model.get(name, {}).values())

    def leases(self) -> list[Ticket]:
        """Returns all tickets of leases. One whose process keeps its memory has no holder any
        more."""
        return list(self._leases.values())

    def _forget(self, ticket: Ticket) -> None:
        """Takes a closed ticket out of every index."""
        del self._tickets[ticket.id]
        self._leases.pop(ticket.id, None)
        for index in (self._held, self._holding):
            index.get(ticket.holder, {}).pop(ticket.id, None)
            if not index.get(ticket.holder):
                index.pop(ticket.holder, None)
        del self._of_model[ticket.model_name][ticket.id]
        if not self._of_model[ticket.model_name]:
            del self._of_model[ticket.model_name]
        self.open_count[ticket.capability] -= 1

    def _count(self, ticket: Ticket, sign: int) -> None:
        """Puts the ticket's charge on its devices' books, or takes it off."""
        for device in ticket.devices:
            if book := self.books.get(device):
                self._post(book, ticket, sign)

    def _post(self, book: DeviceAccount, ticket: Ticket, sign: int) -> None:
        """Adds a ticket's charge to the account of a device (`sign` 1), or takes it off (-1)."""
        charge = ticket.charge(book.device)
        if charge == 0:
            return
        book.charged_bytes = Bytes(book.charged_bytes + sign * charge)
        book.free_bytes = Bytes(book.free_bytes - sign * charge)
        book.copies[ticket.model_name] += sign
        if ticket.pinned:
            book.pinned_bytes = Bytes(book.pinned_bytes + sign * charge)
        if book.kind is not DeviceKind.HOST:
            self.holdings.post(ticket.client, ticket.id, sign * charge, book.held)
        if sign > 0:
            book.tickets[ticket.id] = ticket
            if ticket.state in LEAVING:
                book.leaving[ticket.id] = ticket
            elif ticket.state is State.LOADING:
                book.loading[ticket.id] = ticket
        else:
            del book.tickets[ticket.id]
            book.leaving.pop(ticket.id, None)
            book.loading.pop(ticket.id, None)
            if not book.copies[ticket.model_name]:
                del book.copies[ticket.model_name]
        book.note_stale(ticket.id)
        self._note(book)

    # -- devices -------------------------------------------------------------------------------

    def put_device(self, book: DeviceAccount) -> None:
        """Adds a device with what is already held on it, or changes its budget."""
        if old := self.books.get(book.device):
            self._lend(old, -1)
            grown = book.budget_bytes - old.budget_bytes
            old.kind = book.kind
            old.total_bytes = book.total_bytes
            old.budget_bytes = book.budget_bytes
            old.free_bytes = Bytes(old.free_bytes + grown)
        else:
            self.books[book.device] = book
            for ticket in self._tickets.values():
                if book.device in ticket.devices:
                    self._post(book, ticket, 1)
        self._lend(self.books[book.device], 1)
        self._note(self.books[book.device])

    def drop_device(self, device: DeviceId) -> None:
        """Removes a device on which nothing is charged any more."""
        book = self.books.pop(device)
        assert not book.tickets
        self._lend(book, -1)
        self._touched.discard(device)
        if short := self._short.get(book.node):
            short.discard(device)
        if not any(other.node == book.node for other in self.books.values()):
            self._short.pop(book.node, None)

    def _lend(self, book: DeviceAccount, sign: int) -> None:
        """Adds the budget of a device that computes to all that can be lent, or takes it off."""
        if book.kind is not DeviceKind.HOST:
            self.lent_bytes = Bytes(self.lent_bytes + sign * book.budget_bytes)

    def set_foreign(self, device: DeviceId, foreign: Bytes) -> None:
        """Sets how many bytes of a device's budget belong to no ticket."""
        book = self.books[device]
        if foreign == book.foreign_bytes:
            return
        book.free_bytes = Bytes(book.free_bytes + book.foreign_bytes - foreign)
        book.foreign_bytes = foreign
        self._note(book)

    def _note(self, book: DeviceAccount) -> None:
        """Notes that the account of a device has changed: it is checked in this step, its node is
        dirty, and it may have become overcommitted."""
        self._touched.add(book.device)
        self.dirty.add(book.node)
        if book.free_bytes < 0:
            self._short.setdefault(book.node, set()).add(book.device)
        elif short := self._short.get(book.node):
            short.discard(book.device)

    def overcommitted(self, node: NodeId) -> list[DeviceAccount]:
        """Returns the devices of a node whose free bytes are negative."""
        return [self.books[device] for device in sorted(self._short.get(node, ()))]

    # -- checks --------------------------------------------------------------------------------

    def check_touched(self) -> None:
        """Checks the devices whose books changed since the last call. Of a device with very many
        tickets the sum is left to the audit: it would cost each event as much as all of them.
        Raises LedgerBroken."""
        touched = self._touched
        self._touched = set()
        self.check({d for d in touched if len(self.books[d].tickets) <= SUMMED_COUNT})
        for device in touched:
            self._check_sum(self.books[device], self.books[device].charged_bytes)

    def check(self, devices: set[DeviceId]) -> None:
        """Checks these devices. Raises LedgerBroken where the identity does not hold."""
        for device in devices:
            book = self.books[device]
            charged = sum(t.charge(device) for t in book.tickets.values())
            if charged != book.charged_bytes:
                raise LedgerBroken(f"{device}: charged {book.charged_bytes}, tickets {charged}")
            self._check_sum(book, charged)

    def _check_sum(self, book: DeviceAccount, charged: int) -> None:
        free = book.free_bytes
        foreign = book.foreign_bytes
        if free + charged + foreign != book.budget_bytes:
            raise LedgerBroken(
                f"{book.device}: free {free} + charged {charged} + foreign {foreign}"
                f" != budget {book.budget_bytes}"
            )


# -------------------------------------------------------------------------------------------------
# All the books from the tickets up, trusting no index: more than is checked after each event.


def audit(ledger: Ledger) -> None:
    """Checks all the books, and every index and sum that is kept of tickets and devices, against
    the tickets themselves. What only says where to look next is left out: dirty nodes, and what has
    changed since a ranking. Raises LedgerBroken where one differs."""
    ledger.check(set(ledger.books))
    charges = _charges(ledger)
    for device, book in ledger.books.items():
        _audit_book(book, charges.get(device, {}))
    _audit_holdings(ledger, charges)
    _audit_tickets(ledger)
    _audit_devices(ledger)


def _charges(ledger: Ledger) -> dict[DeviceId, dict[TicketId, Bytes]]:
    """Returns what tickets are charged on each device, as the tickets say."""
    charges: dict[DeviceId, dict[TicketId, Bytes]] = {}
    for ticket in ledger.tickets(*CHARGED):
        for device in ticket.devices:
            if (charge := ticket.charge(device)) > 0:
                charges.setdefault(device, {})[ticket.id] = charge
    return charges


def _compare(what: str, index: Mapping[Any, object], truth: Mapping[Any, object]) -> None:
    """Raises LedgerBroken, naming a few entries that differ, where an index is not as the tickets
    say."""
    if index != truth:
        keys = {**index, **truth}
        differing = sorted(str(key) for key in keys if index.get(key) != truth.get(key))
        raise LedgerBroken(f"{what}: the index differs from the tickets at {differing[:5]}")


def _audit_book(book: DeviceAccount, charges: Mapping[TicketId, Bytes]) -> None:
    """Checks the account of a device against the tickets that are charged there. Raises
    LedgerBroken."""
    device = book.device
    _compare(f"{device}: charged", dict.fromkeys(book.tickets), dict.fromkeys(charges))
    leaving = {t.id: t for t in book.tickets.values() if t.state in LEAVING}
    _compare(f"{device}: leaving", book.leaving, leaving)
    loading = {t.id: t for t in book.tickets.values() if t.state is State.LOADING}
    _compare(f"{device}: loading", book.loading, loading)
    copies = Counter(t.model_name for t in book.tickets.values())
    _compare(f"{device}: tickets by model", book.copies, copies)
    pinned = sum(charges[t.id] for t in book.tickets.values() if t.pinned)
    if pinned != book.pinned_bytes:
        raise LedgerBroken(f"{device}: pinned {book.pinned_bytes}, tickets {pinned}")
    held: Counter[str] = Counter()
    for ticket in book.tickets.values() if book.kind is not DeviceKind.HOST else ():
        held[ticket.client.tenant] += charges[ticket.id]
    _compare(f"{device}: bytes by tenant", book.held, held)


def _audit_holdings(ledger: Ledger, charges: Mapping[DeviceId, Mapping[TicketId, Bytes]]) -> None:
    """Checks whose the bytes on devices that compute are. Raises LedgerBroken."""
    by_client: Counter[Client] = Counter()
    tickets: dict[str, dict[TicketId, None]] = {}
    for device, book in ledger.books.items():
        for ticket in book.tickets.values() if book.kind is not DeviceKind.HOST else ():
            by_client[ticket.client] += charges[device][ticket.id]
            tickets.setdefault(ticket.client.tenant, {})[ticket.id] = None
    by_tenant: Counter[str] = Counter()
    for client, held in by_client.items():
        by_tenant[client.tenant] += held
    holdings = ledger.holdings
    _compare("bytes by client", holdings.by_client, by_client)
    _compare("bytes by tenant", holdings.by_tenant, by_tenant)
    _compare("tickets by tenant", holdings.tickets, tickets)


def _audit_devices(ledger: Ledger) -> None:
    """Checks what is kept of all devices together. Raises LedgerBroken."""
    lent_bytes = 0
    short: dict[NodeId, set[DeviceId]] = {}
    for device, book in ledger.books.items():
        lent_bytes += 0 if book.kind is DeviceKind.HOST else book.budget_bytes
        if book.free_bytes < 0:
            short.setdefault(book.node, set()).add(device)
    if lent_bytes != ledger.lent_bytes:
        raise LedgerBroken(f"budgets of all devices {ledger.lent_bytes}, of each {lent_bytes}")
    listed = {node: devices for node, devices in ledger._short.items() if devices}
    _compare("overcommitted devices", listed, short)


def _audit_tickets(ledger: Ledger) -> None:
    """Checks the indexes of all tickets. Raises LedgerBroken."""
    held: dict[HolderId, dict[TicketId, Ticket]] = {}
    holding: dict[HolderId, dict[TicketId, Ticket]] = {}
    of_model: dict[ModelName, dict[TicketId, Ticket]] = {}
    leases: dict[TicketId, Ticket] = {}
    open_count: Counter[str] = Counter()
    for ticket in ledger.tickets():
        held.setdefault(ticket.holder, {})[ticket.id] = ticket
        of_model.setdefault(ticket.model_name, {})[ticket.id] = ticket
        open_count[ticket.capability] += 1
        if ticket.lease:
            leases[ticket.id] = ticket
        if ticket.state in CHARGED:
            holding.setdefault(ticket.holder, {})[ticket.id] = ticket
        elif ticket.state is State.CLOSED:
            raise LedgerBroken(f"{ticket.id} is closed and still on the books")
    _compare("tickets by holder", ledger._held, held)
    _compare("charged tickets by holder", ledger._holding, holding)
    _compare("tickets by model", ledger._of_model, of_model)
    _compare("leases", ledger._leases, leases)
    _compare("tickets by capability", ledger.open_count, open_count)
