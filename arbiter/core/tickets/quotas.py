"""What a tenant may have, and what is kept for it (SPEC C10).

`most`: held at once, over all devices that compute. Who would exceed it makes room among its own
first, and waits for that; nobody else leaves for it, and it holds up nobody.
`reserved`: of each device that computes, held by this tenant or free for it. Others get what is
free beyond it, and what leaves for them is worth to them only what exceeds it.
`average`: held over the last hour. Beyond it nothing new is loaded for the tenant until its average
has fallen to nine tenths; what it has stays.

The books say what is held: a ticket is its last user's, unless that would break one of the above.
"""

from collections.abc import Iterable

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import LEAVING, Sizes, Ticket
from arbiter.core.settings import TenantLimits
from arbiter.core.state import CoreState
from arbiter.core.tickets.budget import share
from arbiter.core.tickets.companions import end_with_primary
from arbiter.core.tickets.device_limits import COMPUTE, compute_books, on_demand_of
from arbiter.core.tickets.reclaim import is_counted_on
from arbiter.core.types import Client, Split
from arbiter.errors import QuotaExceeded, TenantCoolingDown
from arbiter.units import Bytes, HolderId, in_seconds

COOLED_FRACTION = 0.9  # of its average; so that a tenant at its limit is not let in and out


def limits_of(mind: CoreState, tenant: str) -> TenantLimits | None:
    return mind.tenants.get(tenant)


def quota_group(mind: CoreState, tenant: str) -> str:
    """Tenants of whom nothing is configured are all alike to the rules."""
    return tenant if tenant in mind.tenants else ""


# -- asking ---------------------------------------------------------------------------------------


def refusal(
    mind: CoreState, holder: HolderId, tenant: str, need: Bytes, how: Split = Split.NONE
) -> QuotaExceeded | TenantCoolingDown | None:
    """Refused at once: waiting on its holder's node would not help, or not soon."""
    known = mind.holders.get(holder)
    node = mind.nodes.get(known.node) if known else None
    if not mind.tenants or node is None:
        return None
    bounds = at_most(mind, tenant, compute_books(mind, node)).values() or [need]
    bound = max(bounds) if how is Split.NONE else sum(bounds)
    return _cooling(mind, tenant) or never(mind, tenant, need, bound)


def never(mind: CoreState, tenant: str, need: Bytes, bound: int) -> QuotaExceeded | None:
    """However long it waits. `bound`: of `at_most`, what it could have where it may go."""
    terms = limits_of(mind, tenant)
    if terms and terms.most_bytes is not None and need > terms.most_bytes - pinned(mind, tenant):
        return QuotaExceeded(tenant, pinned(mind, tenant), need, terms.most_bytes, "bytes")
    if need > bound and any(name != tenant for name in reserves(mind)):
        return QuotaExceeded(tenant, Bytes(0), need, Bytes(bound), "bytes")
    return None


def at_most(mind: CoreState, tenant: str, books: Iterable[DeviceAccount]) -> Sizes:
    """What waiting can ever bring on each, beside what is pinned and what others have reserved."""
    return {book.device: _most_on(mind, book, tenant) for book in books}


def _most_on(mind: CoreState, book: DeviceAccount, tenant: str) -> Bytes:
    others = [t for name, t in mind.tenants.items() if name != tenant and t.reserved_bytes]
    if not others:
        return on_demand_of(book)
    fixed: dict[str, int] = {}
    for entry in book.entries.values() if book.pinned_bytes else ():
        if entry.pinned:
            own = entry.client.tenant
            fixed[own] = fixed.get(own, 0) + entry.charge(book.device)
    kept = (max(0, t.reserved_bytes - fixed.get(t.tenant, 0)) for t in others)
    return Bytes(max(0, book.budget_bytes - sum(fixed.values()) - sum(kept)))


def pinned(mind: CoreState, tenant: str) -> Bytes:
    own = tickets_of(mind, tenant)
    return Bytes(sum(device_bytes(mind, e) for e in own if e.pinned))


def too_much(mind: CoreState, tenant: str, need: Bytes) -> QuotaExceeded:
    terms = limits_of(mind, tenant)
    assert terms is not None and terms.most_bytes is not None
    return QuotaExceeded(
        tenant, mind.ledger.holdings.by_tenant[tenant], need, terms.most_bytes, "bytes"
    )


def share_of(mind: CoreState, tenant: str) -> float:
    terms = limits_of(mind, tenant)
    return terms.share_fraction if terms else 1.0


def _cooling(mind: CoreState, tenant: str) -> TenantCoolingDown | None:
    terms, accounts = limits_of(mind, tenant), mind.accounts
    if terms is None or terms.average_bytes is None:
        return None
    is_cooling = tenant in accounts.cooling
    average = accounts.average(mind.ledger.holdings.by_client, tenant, mind.now)
    cooled = share(terms.average_bytes, COOLED_FRACTION)
    if average <= (cooled if is_cooling else terms.average_bytes):
        accounts.cooling.pop(tenant, None)
        return None
    accounts.cooling[tenant] = None
    again_s = max(1.0, in_seconds(accounts.falls_in(average, cooled)))
    return TenantCoolingDown(tenant, average, terms.average_bytes, again_s)


# -- granting -------------------------------------------------------------------------------------


def reserves(mind: CoreState) -> dict[str, Bytes]:
    """Of each device, by tenant."""
    return {name: t.reserved_bytes for name, t in mind.tenants.items() if t.reserved_bytes}


def kept(
    reserved: dict[str, Bytes], book: DeviceAccount, tenant: str, has_left: bool = False
) -> Bytes:
    """Of what is free there, for others than this tenant; `has_left`: once those asked to leave
    have left."""
    if not reserved:
        return Bytes(0)
    others = ((name, size) for name, size in reserved.items() if name != tenant)
    return Bytes(sum(max(0, size - _held(book, name, has_left)) for name, size in others))


def _held(book: DeviceAccount, tenant: str, has_left: bool) -> int:
    if not has_left:
        return book.held[tenant]
    leaving = (e for e in book.leaving.values() if e.client.tenant == tenant)
    return book.held[tenant] - sum(e.charge(book.device) for e in leaving)


def requeue_relieved_tenants(mind: CoreState) -> None:
    """Who waits for its tenant's own bytes is looked at wherever it waits. A reserve is of one
    device, where any change is looked at."""
    if not mind.tenants:
        return
    for client in mind.ledger.holdings.unsettled:
        terms = limits_of(mind, client.tenant)
        if terms and terms.most_bytes is not None:
            mind.ledger.changed.update(mind.line.where(client.tenant))


def over_limit(mind: CoreState, tenant: str, more: Bytes) -> Bytes:
    """How much it would exceed its maximum by; 0: not at all."""
    terms = limits_of(mind, tenant)
    if terms is None or terms.most_bytes is None:
        return Bytes(0)
    return Bytes(max(0, mind.ledger.holdings.by_tenant[tenant] + more - terms.most_bytes))


def over_limit_after_drain(mind: CoreState, tenant: str, more: Bytes) -> Bytes:
    """The same once all that was asked to leave has left; what is kept in quarantine stays."""
    own = tickets_of(mind, tenant)
    going = (e for e in own if e.state in LEAVING and is_counted_on(e))
    return Bytes(max(0, over_limit(mind, tenant, more) - sum(device_bytes(mind, e) for e in going)))


def tickets_of(mind: CoreState, tenant: str) -> list[Ticket]:
    """Those with bytes on a device that computes."""
    found = (mind.ledger.find(ticket) for ticket in mind.ledger.holdings.tickets.get(tenant, ()))
    return [entry for entry in found if entry]


def device_bytes(mind: CoreState, entry: Ticket) -> Bytes:
    """Charged on devices that compute."""
    books = (mind.ledger.books.get(d) for d in entry.devices)
    return Bytes(sum(entry.charge(b.device) for b in books if b and b.kind in COMPUTE))


def process_bytes(mind: CoreState, entry: Ticket) -> Bytes:
    """The same with whoever lives in its process."""
    return Bytes(sum(device_bytes(mind, one) for one in mind.process_of(entry)))


# -- leaving --------------------------------------------------------------------------------------


class ReserveSlack:
    """What others get of a tenant's bytes on one device, as victims are picked: what it holds
    beyond its reserve. The rest is free for it, and for nobody else."""

    def __init__(self, mind: CoreState, book: DeviceAccount, tenant: str) -> None:
        self._mind, self._book, self._tenant = mind, book, tenant
        self._left: dict[str, int] = {}

    def take(self, entry: Ticket, freed: Bytes) -> Bytes:
        """Of what it would free, what counts beside those taken so far."""
        if not self._mind.tenants:
            return freed
        own = entry.client.tenant
        terms = limits_of(self._mind, own)
        if own == self._tenant or terms is None or not terms.reserved_bytes:
            return freed
        if own not in self._left:
            staying = _held(self._book, own, has_left=True)
            self._left[own] = max(0, staying - terms.reserved_bytes)
        taken = min(freed, self._left[own])
        self._left[own] -= taken
        return Bytes(taken)


def is_reserved(mind: CoreState, entry: Ticket, tenant: str) -> bool:
    """Its leaving would give this tenant nothing, wherever it is."""
    return all(not worth for worth in _worth(mind, entry, tenant))


def _is_partly_reserved(mind: CoreState, entry: Ticket, tenant: str) -> bool:
    """Without it its tenant would hold less than its reserve, and nothing free makes up for it."""
    books = [b for d in entry.home if (b := mind.ledger.books.get(d))]
    sizes = [end_with_primary(mind, entry, book.device) for book in books]
    return sizes != _worth(mind, entry, tenant)


def _worth(mind: CoreState, entry: Ticket, tenant: str) -> list[Bytes]:
    """To this tenant, on each of its devices."""
    books = (mind.ledger.books.get(d) for d in entry.home)
    return [
        ReserveSlack(mind, b, tenant).take(entry, end_with_primary(mind, entry, b.device))
        for b in books
        if b
    ]


# -- whose a ticket is ----------------------------------------------------------------------------


def take_over(mind: CoreState, entry: Ticket, client: Client) -> None:
    """It was used by this client, and is on its account from now on, as far as that is lawful."""
    if client == entry.client or entry.lease:
        return
    if client.tenant == entry.client.tenant or _may_change_hands(mind, entry, client.tenant):
        for one in mind.process_of(entry):
            mind.ledger.bill_to(one, client)


def _may_change_hands(mind: CoreState, entry: Ticket, to: str) -> bool:
    if not mind.tenants:
        return True
    size = process_bytes(mind, entry)
    return over_limit(mind, to, size) == 0 and not _is_partly_reserved(mind, entry, to)
