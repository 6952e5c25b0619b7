"""Shows what people and the dashboard see (B7): a frozen picture with Spans, because Instants mean
nothing outside the arbiter's process.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from arbiter.core.events import ContentReading, ForeignProcess, HostCopyReading, SlabReading
from arbiter.core.eviction.pressure import level_of, stalled_fraction
from arbiter.core.eviction.waste import wasted_bytes
from arbiter.core.records.accounts import byte_seconds
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Sizes, Ticket
from arbiter.core.residency.loading_share import loading_fraction
from arbiter.core.state import CoreState, Holder, Node
from arbiter.core.tickets.lendable_devices import is_readable
from arbiter.core.tickets.reclaim import quarantined_bytes
from arbiter.core.types import DeviceBytes, DeviceKind, LeaseConditions, ModelName
from arbiter.units import (
    Bytes,
    Content,
    DeviceId,
    Epoch,
    HolderId,
    Instant,
    NodeId,
    Span,
    TicketId,
    since,
)


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Shows one device and its account."""

    device: DeviceId
    node: NodeId
    kind: DeviceKind
    capacity_bytes: Bytes  # what the device has
    budget_bytes: Bytes  # what may be lent: free + charged + foreign
    charged_bytes: Bytes
    measured_bytes: Bytes  # held by engines on the books, as last read
    foreign_bytes: Bytes  # the part that eats into the budget
    free_bytes: Bytes  # negative while overcommitted
    largest_fit_bytes: Bytes  # the largest ticket that could be granted there now
    physical_free_bytes: Bytes | None  # None before the first reading
    pressure: str  # nominal, low, critical: of real memory (C5)
    is_exact: bool  # False: foreign bytes inferred from the device total
    name: str = ""  # of a GPU: its kind
    uuid: str = ""  # of a GPU: the card itself
    unreadable: str | None = None  # why the driver does not answer; the figures are older
    foreign_processes: tuple[ForeignProcess, ...] = ()  # on a GPU, where NVML names them
    loading_fraction: float = 0.0  # of the last ten minutes (C13)
    stalled_fraction: float = 0.0  # of ten seconds, in which some task waited for this RAM (PSI)


@dataclass(frozen=True, slots=True)
class TicketView:
    """Shows one ticket on the books."""

    ticket: TicketId
    holder: HolderId
    node: NodeId
    capability: str
    model: str
    state: str
    in_state: Span
    inflight: int
    idle: Span | None  # None unless resident or asleep and unused
    pinned: bool
    keep_warm: Span
    need_bytes: Bytes
    charged: tuple[DeviceBytes, ...]
    measured: tuple[DeviceBytes, ...]
    leaving: str | None  # the reason of its revoke
    lease: LeaseConditions | None = None  # its holder is a process outside Serve
    left: Span | None = None  # of the lease's term
    tenant: str = "default"  # of the client that used it last
    client: str = ""
    drafter_bytes: Bytes = Bytes(0)  # the part of its need that a drafter takes (F9)
    ram_bytes: Bytes = Bytes(0)  # of what it is charged on the host, its process beside a GPU
    settled_bytes: Bytes = Bytes(0)  # needed by its load, up to its first use; 0: not known
    wasted_bytes: Bytes = Bytes(0)  # held beyond what a new load of it would be granted (D7)
    granted: tuple[DeviceBytes, ...] = ()
    stay_warm: Span = Span(0)  # at a client's wish, before its keep-warm begins to count


@dataclass(frozen=True, slots=True)
class QueueView:
    """Shows one queued ticket."""

    position: int  # in the queue of its node, from 1
    ticket: TicketId
    capability: str
    model: str
    waited: Span
    left: Span | None  # until its deadline
    predicted: Span | None  # until it serves, as expected when it joined; 0: overdue
    priority: str = "normal"


@dataclass(frozen=True, slots=True)
class CooldownView:
    """Shows a model that failed to load and is not tried again yet."""

    capability: str
    model: str
    cause: str
    times: int
    left: Span


@dataclass(frozen=True, slots=True)
class HolderView:
    """Shows one holder."""

    holder: HolderId
    node: NodeId
    capability: str
    silence: Span
    kept_bytes: Bytes  # above zero: in quarantine


@dataclass(frozen=True, slots=True)
class FloorView:
    """Shows the floor of one model."""

    capability: str
    model: str
    floor: str


@dataclass(frozen=True, slots=True)
class LoadTimeView:
    """Shows how long loads, wakes and requests of one model took of late."""

    capability: str
    model: str
    load: Span
    wake: Span | None  # None: never woken
    run: Span | None = None  # of an answered request, in the middle; None: none was seen
    run_long: Span | None = None  # of the longest of the newest ones, about the 99th percentile


@dataclass(frozen=True, slots=True)
class ClientView:
    """Shows one account (C10)."""

    tenant: str
    client: str  # as it calls itself
    requests_count: int
    held_bytes: Bytes  # now, on devices that compute
    byte_seconds_count: int  # so far
    average_bytes: Bytes  # held over the last hour


@dataclass(frozen=True, slots=True)
class TenantView:
    """Shows what one tenant has of what it may have; a tenant without limits is not shown."""

    tenant: str
    held_bytes: Bytes
    most_bytes: Bytes | None
    reserved_bytes: Bytes  # of each device
    average_bytes: Bytes
    average_most_bytes: Bytes | None
    is_cooling: bool
    share_fraction: float


@dataclass(frozen=True, slots=True)
class SlabView:
    """Shows one slab of a node's pool (E1). A copy of models' files in host RAM is shown as one of
    the content `weights`, with a row for each file."""

    node: NodeId
    slab: SlabReading
    users: tuple[TicketId, ...] = ()  # its writer; of a copy the engines that have it open


@dataclass(frozen=True, slots=True)
class HostCopyView:
    """Shows one copy of models' files in host RAM (D4)."""

    node: NodeId
    key: str
    ticket: TicketId  # of its lease
    models: tuple[tuple[str, str], ...]  # capability and model
    users: tuple[TicketId, ...]
    size_bytes: Bytes
    is_leaving: bool
    socket: str  # for processes of the node agent's group; empty: for engines alone


@dataclass(frozen=True, slots=True)
class ContentView:
    """Shows what a node's pool did with one content (E7)."""

    node: NodeId
    content: ContentReading
    hit_fraction: float | None  # None: nothing was looked for


@dataclass(frozen=True, slots=True)
class HoursView:
    """Shows hours (C13): of one model, of its batch work, or of all batch work that has no hours of
    its own."""

    work: str  # model or batch
    capability: str  # empty: of every model
    model: str
    hours: str
    is_open: bool
    left: Span  # until they close or open


@dataclass(frozen=True, slots=True)
class StateView:
    """Shows all that the arbiter knows."""

    epoch: Epoch
    is_settled: bool  # False: waiting for the holders of the last epoch
    is_closing: bool
    stale_count: int
    devices: tuple[DeviceView, ...]
    tickets: tuple[TicketView, ...]
    queue: tuple[QueueView, ...]
    cooldowns: tuple[CooldownView, ...]
    holders: tuple[HolderView, ...]
    floors: tuple[FloorView, ...]
    tenants: tuple[TenantView, ...]
    clients: tuple[ClientView, ...]
    load_times: tuple[LoadTimeView, ...]
    slabs: tuple[SlabView, ...] = ()
    contents: tuple[ContentView, ...] = ()
    hours: tuple[HoursView, ...] = ()
    copies: tuple[HostCopyView, ...] = ()


def view_of(state: CoreState, now: Instant) -> StateView:
    """Returns the picture as of `now`."""
    return StateView(
        epoch=state.epoch,
        is_settled=not state.awaited or now >= state.settled_at,
        is_closing=state.closing_by is not None,
        stale_count=state.stale_count,
        devices=tuple(_device(state, book, now) for _, book in sorted(state.ledger.books.items())),
        tickets=tuple(_ticket(state, ticket, now) for ticket in state.ledger.tickets()),
        queue=tuple(_queue(state, now)),
        cooldowns=tuple(_cooldowns(state, now)),
        holders=tuple(_holder(state, holder, now) for _, holder in sorted(state.holders.items())),
        floors=tuple(FloorView(*n, floor.value) for n, floor in sorted(state.all_floors().items())),
        tenants=tuple(_tenant(state, name, now) for name in sorted(state.tenants)),
        clients=tuple(_clients(state, now)),
        load_times=tuple(
            LoadTimeView(*name, load, wake or None, *(state.estimates.run_times(name) or ()))
            for name, (load, wake) in sorted(state.estimates.times().items())
        ),
        slabs=tuple(
            slab for name, node in sorted(state.nodes.items()) for slab in _slabs(name, node)
        ),
        contents=tuple(
            ContentView(name, content, content.hit_fraction)
            for name, node in sorted(state.nodes.items())
            for content in node.contents
        ),
        hours=tuple(_hours(state, now)),
        copies=tuple(
            HostCopyView(
                name,
                copy.key,
                copy.ticket,
                tuple((model.capability, model.model) for model in copy.models),
                copy.users,
                copy.size_bytes,
                copy.is_leaving,
                copy.socket,
            )
            for name, node in sorted(state.nodes.items())
            for copy in node.copies
        ),
    )


def _holder(state: CoreState, holder: Holder, now: Instant) -> HolderView:
    """Returns a holder as it is shown."""
    kept = quarantined_bytes(state, holder.holder)
    silence = since(holder.heard_at, now)
    return HolderView(holder.holder, holder.node, holder.capability, silence, kept)


def _slabs(name: NodeId, node: Node) -> Iterator[SlabView]:
    for slab in node.slabs:
        yield SlabView(name, slab, (slab.ticket,) if slab.ticket else ())
    for copy in node.copies:
        yield SlabView(name, _weights(copy), copy.users)


def _weights(copy: HostCopyReading) -> SlabReading:
    """Shows a copy as a slab. It is sealed, so it has no writer and keeps its size."""
    return SlabReading(
        f"copy-{copy.key[:8]}",
        Content.WEIGHTS,
        owner=", ".join(f"{model.capability}/{model.model}" for model in copy.models),
        namespace=copy.key[:12],
        ticket=None,
        allocated_bytes=copy.size_bytes,
        limit_bytes=copy.size_bytes,
        rows_count=copy.files_count,
        hits_count=copy.hits_count,
        misses_count=0,
        stored_count=copy.files_count,
        evicted_count=0,
        refused_count=0,
    )


def _hours(state: CoreState, now: Instant) -> Iterator[HoursView]:
    registry, everywhere = state.registry, ModelName("", "")
    rows = [("model", name, hours) for name, hours in sorted(registry.hours.items())]
    rows += [("batch", name, hours) for name, hours in sorted(registry.batch_hours.items())]
    if state.settings.batch_hours:
        rows.append(("batch", everywhere, state.settings.batch_hours))
    for work, name, hours in rows:
        if reading := state.hours_readings.find(hours):
            remaining = Span(max(0, since(now, reading.changes_at)))
            yield HoursView(work, *name, hours, reading.is_open, remaining)


def _tenant(state: CoreState, tenant: str, now: Instant) -> TenantView:
    limits = state.tenants[tenant]
    held = state.ledger.holdings
    return TenantView(
        tenant,
        Bytes(held.by_tenant[tenant]),
        limits.most_bytes,
        limits.reserved_bytes,
        state.accounts.average(held.by_client, tenant, now),
        limits.average_bytes,
        tenant in state.accounts.cooling,
        limits.share_fraction,
    )


def _clients(state: CoreState, now: Instant) -> list[ClientView]:
    rows = []
    for client, account in sorted(
        state.accounts.rows.items(), key=lambda row: (row[0].tenant, row[0].name)
    ):
        held = Bytes(state.ledger.holdings.by_client[client])
        shown = replace(account)
        shown.settle(held, now, state.accounts.window)
        total = byte_seconds(shown.byte_ns)
        average = Bytes(int(shown.average_bytes))
        used = shown.requests_count
        rows.append(ClientView(client.tenant, client.name, used, held, total, average))
    return rows


def _device(state: CoreState, book: DeviceAccount, now: Instant) -> DeviceView:
    node = state.nodes[book.node]
    reading = node.readings.get(book.device)
    spec = node.devices[book.device]
    measured = sum(t.measured.get(book.device, 0) for t in book.tickets.values())
    fits = max(0, book.free_bytes) if is_readable(state, node, book.device, now) else 0
    return DeviceView(
        book.device,
        book.node,
        book.kind,
        capacity_bytes=book.total_bytes,
        budget_bytes=book.budget_bytes,
        charged_bytes=book.charged_bytes,
        measured_bytes=Bytes(measured),
        foreign_bytes=book.foreign_bytes,
        free_bytes=book.free_bytes,
        largest_fit_bytes=Bytes(fits),
        physical_free_bytes=reading.free_bytes if reading else None,
        pressure=level_of(state, book.device).name.lower(),
        is_exact=reading.exact if reading else False,
        name=spec.name,
        uuid=spec.uuid,
        unreadable=node.unreadable.get(book.device),
        foreign_processes=reading.foreign_processes if reading else (),
        loading_fraction=loading_fraction(state, book, now),
        stalled_fraction=stalled_fraction(state, book.device),
    )


def _ticket(state: CoreState, ticket: Ticket, now: Instant) -> TicketView:
    is_idle = ticket.inflight == 0 and ticket.state.value in ("resident", "asleep")
    return TicketView(
        ticket.id,
        ticket.holder,
        ticket.node,
        ticket.capability,
        ticket.model,
        ticket.state.value,
        in_state=since(ticket.since, now),
        inflight=ticket.inflight,
        idle=since(ticket.last_used, now) if is_idle else None,
        pinned=ticket.pinned,
        keep_warm=ticket.keep_warm,
        need_bytes=ticket.need.device_bytes,
        charged=_listed({d: ticket.charge(d) for d in ticket.devices}),
        measured=_listed(ticket.measured),
        leaving=ticket.leaving.value if ticket.leaving else None,
        lease=ticket.lease.terms if ticket.lease else None,
        left=since(now, ticket.lease.ends) if ticket.lease else None,
        tenant=ticket.client.tenant,
        client=ticket.client.name,
        drafter_bytes=ticket.drafter_bytes,
        ram_bytes=ticket.ram_bytes,
        settled_bytes=(ticket.load.settled_bytes if ticket.load else None) or Bytes(0),
        wasted_bytes=wasted_bytes(state, ticket),
        granted=_listed(ticket.granted),
        stay_warm=Span(max(0, since(now, ticket.warm_until))),
    )


def _listed(sizes: Sizes) -> tuple[DeviceBytes, ...]:
    return tuple(DeviceBytes(d, size) for d, size in sorted(sizes.items()))


def _queue(state: CoreState, now: Instant) -> list[QueueView]:
    rows = []
    waiting_count: Counter[NodeId] = Counter()
    for ticket_id in state.queue.tickets():
        waiting = state.queue.find(ticket_id)
        ticket = state.ledger.find(ticket_id)
        assert waiting and ticket
        waiting_count[ticket.node] += 1
        position = waiting_count[ticket.node]
        remaining = None if waiting.deadline is None else since(now, waiting.deadline)
        waited = since(waiting.request.asked_at, now)
        at = waiting.predicted_at
        predicted = None if at is None else Span(max(0, since(now, at)))
        priority = waiting.request.priority.name.lower()
        row = QueueView(
            position, ticket_id, *ticket.model_name, waited, remaining, predicted, priority
        )
        rows.append(row)
    return rows


def _cooldowns(state: CoreState, now: Instant) -> list[CooldownView]:
    return [
        CooldownView(capability, model, f.cause, f.times_count, since(now, f.until))
        for (capability, model), f in sorted(state.failures.items())
        if f.until > now
    ]
