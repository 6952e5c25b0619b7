"""Says what a tenant may have, and what is kept for it (C10).

`most`: held at once, over all devices that compute. A ticket that would exceed it makes room among
its tenant's own first, and waits for that; no other tenant's ticket leaves for it, and it holds up
none. `reserved`: of each device that computes, held by this tenant or free for it. Others get what
is free beyond it, and what leaves for them is usable to them only where it exceeds the reserve.
`average`: held over the last hour. Beyond it nothing new is loaded for the tenant until its average
has fallen to nine tenths; what it has stays.

The books say what is held: a ticket is on its last user's account, unless that would break one of
the above.
"""

from collections.abc import Iterable, Mapping

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import LEAVING, Sizes, Ticket
from arbiter.core.settings import TenantLimits
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets.budget import fraction_of
from arbiter.core.tickets.lendable_devices import COMPUTE, compute_books, unpinned_bytes
from arbiter.core.tickets.reclaim import is_counted_on
from arbiter.core.types import Client, Split
from arbiter.errors import GpusLost, QuotaExceeded, TenantCoolingDown
from arbiter.units import Bytes, HolderId, in_seconds

COOLED_FRACTION = 0.9  # of its average; so that a tenant at its limit is not let in and out


def limits_of(state: CoreState, tenant: str) -> TenantLimits | None:
    """Returns the configured limits of a tenant, if there are any."""
    return state.tenants.get(tenant)


def quota_group(state: CoreState, tenant: str) -> str:
    """Returns the group within which tickets compete alike: tenants of which nothing is configured
    are one."""
    return tenant if tenant in state.tenants else ""


# -- asking ---------------------------------------------------------------------------------------


def refusal(
    state: CoreState, holder: HolderId, tenant: str, need: Bytes, how: Split = Split.NONE
) -> QuotaExceeded | TenantCoolingDown | GpusLost | None:
    """Returns the error for a request that is refused at once, because waiting on its node would
    not help, or not soon: the tenant can never have `need` bytes there, or cools down. `how`: over
    how many devices the bytes may be split. None: it may join the queue."""
    holder_state = state.holders.get(holder)
    node = state.nodes.get(holder_state.node) if holder_state else None
    if not state.tenants:
        return None
    # A holder may ask before the agent of its node has come back, or knows all its devices.
    books = compute_books(state, node) if node and not node.may_gain_devices else ()
    bounds = at_most(state, tenant, books).values() or [need]
    bound = max(bounds) if how is Split.NONE else sum(bounds)
    return cooling_down(state, tenant) or never_fits(state, tenant, need, bound, node)


def never_fits(
    state: CoreState, tenant: str, need: Bytes, bound: int, node: Node | None = None
) -> QuotaExceeded | GpusLost | None:
    """Returns the error for `need` bytes that a tenant can never have, however long it waits; None
    when it can. `bound`: the bytes that `at_most` gives on the devices it may go to. `node`: where
    given, devices that the node has lost, and may get back, would do as well."""
    limits = limits_of(state, tenant)
    if (
        limits
        and limits.most_bytes is not None
        and need > limits.most_bytes - pinned(state, tenant)
    ):
        return QuotaExceeded(tenant, pinned(state, tenant), need, limits.most_bytes, "bytes")
    if need > bound and any(name != tenant for name in reserves(state)):
        if node and node.lost:
            return GpusLost(node.node)
        return QuotaExceeded(tenant, Bytes(0), need, Bytes(bound), "bytes")
    return None


def at_most(state: CoreState, tenant: str, books: Iterable[DeviceAccount]) -> Sizes:
    """Returns what waiting can ever bring on each device, beside what is pinned and what others
    have reserved."""
    return {book.device: _most_on(state, book, tenant) for book in books}


def _most_on(state: CoreState, book: DeviceAccount, tenant: str) -> Bytes:
    """Returns what waiting can ever bring a tenant on one device."""
    others = [t for name, t in state.tenants.items() if name != tenant and t.reserved_bytes]
    if not others:
        return unpinned_bytes(book)
    fixed: dict[str, int] = {}
    for ticket in book.tickets.values() if book.pinned_bytes else ():
        if ticket.pinned:
            own = ticket.client.tenant
            fixed[own] = fixed.get(own, 0) + ticket.charge(book.device)
    unused_reserves = (max(0, t.reserved_bytes - fixed.get(t.tenant, 0)) for t in others)
    return Bytes(max(0, book.budget_bytes - sum(fixed.values()) - sum(unused_reserves)))


def pinned(state: CoreState, tenant: str) -> Bytes:
    """Returns the pinned bytes of a tenant on devices that compute."""
    own = tickets_of(state, tenant)
    return Bytes(sum(device_bytes(state, t) for t in own if t.pinned))


def over_limit_error(state: CoreState, tenant: str, need: Bytes) -> QuotaExceeded:
    """Returns the error for a lease beyond the most that its tenant may hold."""
    limits = limits_of(state, tenant)
    assert limits is not None and limits.most_bytes is not None
    return QuotaExceeded(
        tenant, state.ledger.holdings.by_tenant[tenant], need, limits.most_bytes, "bytes"
    )


def share_of(state: CoreState, tenant: str) -> float:
    """Returns a tenant's share of its turns in the queue."""
    limits = limits_of(state, tenant)
    return limits.share_fraction if limits else 1.0


def cooling_down(state: CoreState, tenant: str) -> TenantCoolingDown | None:
    """Returns the error for a tenant that held more than its average over the last hour allows;
    notes when it begins to cool down and when it has."""
    limits = limits_of(state, tenant)
    accounts = state.accounts
    if limits is None or limits.average_bytes is None:
        return None
    is_cooling = tenant in accounts.cooling
    average = accounts.average(state.ledger.holdings.by_client, tenant, state.now)
    cooled = fraction_of(limits.average_bytes, COOLED_FRACTION)
    if average <= (cooled if is_cooling else limits.average_bytes):
        accounts.end_cool_down(tenant)
        return None
    accounts.cool_down(tenant)
    again_s = max(1.0, in_seconds(accounts.falls_in(average, cooled)))
    return TenantCoolingDown(tenant, average, limits.average_bytes, again_s)


# -- granting -------------------------------------------------------------------------------------


def reserves(state: CoreState) -> dict[str, Bytes]:
    """Returns what is reserved on each device, by tenant."""
    return {name: t.reserved_bytes for name, t in state.tenants.items() if t.reserved_bytes}


def reserved_for_others(
    reserved: dict[str, Bytes],
    book: DeviceAccount,
    tenant: str,
    promised: Mapping[str, int] | None = None,
    *,
    has_left: bool = False,
) -> Bytes:
    """Returns what of the free bytes of a device is reserved for other tenants beside what is
    promised to these; `has_left`: once those asked to leave have left."""
    if not reserved:
        return Bytes(0)
    others = ((name, size) for name, size in reserved.items() if name != tenant)
    coming = promised or {}
    unmet = (size - _held(book, name, has_left) - coming.get(name, 0) for name, size in others)
    return Bytes(sum(max(0, size) for size in unmet))


def _held(book: DeviceAccount, tenant: str, has_left: bool) -> int:
    """Returns the bytes that a tenant holds on a device; `has_left`: once its leaving tickets have
    left."""
    if not has_left:
        return book.held[tenant]
    leaving = (t for t in book.leaving.values() if t.client.tenant == tenant)
    return book.held[tenant] - sum(t.charge(book.device) for t in leaving)


def requeue_relieved_tenants(state: CoreState) -> None:
    """Has the nodes looked at on which tickets wait for their own tenant's bytes. A reserve is of
    one device, where any change is looked at."""
    if not state.tenants:
        return
    for client in state.ledger.holdings.unsettled:
        limits = limits_of(state, client.tenant)
        if limits and limits.most_bytes is not None:
            state.mark_dirty(*state.queue.nodes_of_quota_group(client.tenant))


def over_limit(state: CoreState, tenant: str, more: Bytes) -> Bytes:
    """Returns by how many bytes a tenant would exceed its maximum with `more` bytes; 0: not at
    all."""
    limits = limits_of(state, tenant)
    if limits is None or limits.most_bytes is None:
        return Bytes(0)
    return Bytes(max(0, state.ledger.holdings.by_tenant[tenant] + more - limits.most_bytes))


def over_limit_after_drain(state: CoreState, tenant: str, more: Bytes) -> Bytes:
    """Returns by how many bytes a tenant would exceed its maximum once every ticket of it that was
    asked to leave has left; what a holder in quarantine keeps stays. 0: not at all."""
    own = tickets_of(state, tenant)
    going = (t for t in own if t.state in LEAVING and is_counted_on(t))
    return Bytes(
        max(0, over_limit(state, tenant, more) - sum(device_bytes(state, t) for t in going))
    )


def tickets_of(state: CoreState, tenant: str) -> list[Ticket]:
    """Returns the tickets of a tenant with bytes on a device that computes."""
    tickets = (
        state.ledger.find(ticket_id) for ticket_id in state.ledger.holdings.tickets.get(tenant, ())
    )
    return [ticket for ticket in tickets if ticket]


def device_bytes(state: CoreState, ticket: Ticket) -> Bytes:
    """Returns what a ticket is charged on devices that compute."""
    books = (state.ledger.books.get(d) for d in ticket.devices)
    return Bytes(sum(ticket.charge(b.device) for b in books if b and b.kind in COMPUTE))


# -- leaving --------------------------------------------------------------------------------------


class ReserveSlack:
    """Counts, as victims are picked, what others get of a tenant's bytes on one device: what it
    holds beyond its reserve. The rest is free for that tenant alone."""

    def __init__(self, state: CoreState, book: DeviceAccount, tenant: str) -> None:
        self._state = state
        self._book = book
        self._tenant = tenant
        self._left: dict[str, int] = {}

    def take(self, ticket: Ticket, freed: Bytes) -> Bytes:
        """Returns what a victim would free beside those taken so far."""
        if not self._state.tenants:
            return freed
        own = ticket.client.tenant
        limits = limits_of(self._state, own)
        if own == self._tenant or limits is None or not limits.reserved_bytes:
            return freed
        if own not in self._left:
            staying = _held(self._book, own, has_left=True)
            self._left[own] = max(0, staying - limits.reserved_bytes)
        taken = min(freed, self._left[own])
        self._left[own] -= taken
        return Bytes(taken)


def is_reserved(state: CoreState, ticket: Ticket, tenant: str) -> bool:
    """Says whether the leaving of a ticket would give this tenant nothing, wherever it is."""
    return all(not usable_bytes for usable_bytes in _usable_bytes(state, ticket, tenant))


def _is_partly_reserved(state: CoreState, ticket: Ticket, tenant: str) -> bool:
    """Says whether without a ticket its tenant would hold less than its reserve, and nothing free
    makes up for it."""
    books = [b for d in ticket.home if (b := state.ledger.books.get(d))]
    sizes = [ticket.charge(book.device) for book in books]
    return sizes != _usable_bytes(state, ticket, tenant)


def _usable_bytes(state: CoreState, ticket: Ticket, tenant: str) -> list[Bytes]:
    """Returns what a ticket's leaving is worth to this tenant, on each of its devices."""
    books = (state.ledger.books.get(d) for d in ticket.home)
    return [
        ReserveSlack(state, b, tenant).take(ticket, ticket.charge(b.device)) for b in books if b
    ]


# -- whose a ticket is ----------------------------------------------------------------------------


def take_over(state: CoreState, ticket: Ticket, client: Client) -> None:
    """Puts a ticket on the account of the client that used it, as far as that is lawful."""
    if client == ticket.client or ticket.lease:
        return
    if client.tenant == ticket.client.tenant or _may_change_hands(state, ticket, client.tenant):
        state.ledger.bill_to(ticket, client)
        state.queue.change_quota_group(ticket.id, quota_group(state, client.tenant))


def _may_change_hands(state: CoreState, ticket: Ticket, to: str) -> bool:
    """Says whether a ticket may go on the account of tenant `to`: neither the maximum of that
    tenant nor the reserve of the present tenant would be broken."""
    if not state.tenants:
        return True
    size = device_bytes(state, ticket)
    return over_limit(state, to, size) == 0 and not _is_partly_reserved(state, ticket, to)
