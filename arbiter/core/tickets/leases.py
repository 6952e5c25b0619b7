"""Applies the rules of leases: device memory lent to processes outside Serve (A15).

A lease is a ticket whose holder is one outside process, and nothing else: it waits in the queue, is
charged, and is chosen as a victim when its terms allow that. It does not load: once granted it is
resident. It is never in use: its holder may be asked for its bytes at any time, with notice. It
ends when its holder says so, dies or is silent, when its term is over, or when notice ran out; and
like any ticket it stays charged until the node agent has seen its bytes back.
"""

from collections.abc import Iterator
from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import EventKind
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, Holder
from arbiter.core.tickets import lessees
from arbiter.core.tickets.budget import fraction_of
from arbiter.core.tickets.lendable_devices import COMPUTE
from arbiter.core.tickets.quotas import device_bytes
from arbiter.errors import (
    NEVER_JOINED,
    HolderQuarantined,
    LeaseRefused,
    QuotaExceeded,
    RequestError,
    StaleEpoch,
)
from arbiter.units import Bytes, Instant, Span, after, in_seconds

# -- asking ---------------------------------------------------------------------------------------


def refusal(
    state: CoreState, event: ev.Requested, terms: types.LeaseConditions
) -> RequestError | None:
    """Returns the error for a lease that may not join the queue; None when it may."""
    if event.holder not in state.holders:
        return StaleEpoch(NEVER_JOINED, state.epoch)
    if overdue := _overdue(state, terms.tenant):
        return HolderQuarantined(event.holder, overdue)
    unlawful = _unlawful(state, event, terms)
    if unlawful or terms.frees or terms.on_host:  # these are of no tenant, so no cap binds them
        return unlawful
    return _over_cap(state, event, terms)


def _unlawful(
    state: CoreState, event: ev.Requested, terms: types.LeaseConditions
) -> LeaseRefused | None:
    """Returns the error for a lease whose size, term or notice is out of bounds; None when none
    is."""
    term_most = state.settings.lease_term_most
    notice_most = state.settings.lease_notice_most
    if event.need.device_bytes <= 0:
        return nothing_to_free() if terms.frees else LeaseRefused("bytes", "must be greater than 0")
    if not 0 < terms.term <= term_most and not terms.on_host:
        return LeaseRefused("term_s", f"must be above 0 and at most {in_seconds(term_most):.0f}")
    if not 0 <= terms.notice <= notice_most:
        return LeaseRefused(
            "notice_s", f"must be at least 0 and at most {in_seconds(notice_most):.0f}"
        )
    return None


def nothing_to_free() -> LeaseRefused:
    """Returns the error of `arbiter free` where nothing can be had."""
    why = (
        "cannot be had: nothing is free there, and nothing idle may leave; `arbiter status` shows"
        " what stays"
    )
    return LeaseRefused("bytes", why)


def _over_cap(
    state: CoreState, event: ev.Requested, terms: types.LeaseConditions
) -> QuotaExceeded | None:
    """Returns the error for a lease beyond what one tenant may lease in all; None when it is
    within."""
    has = Bytes(sum(_capped_bytes(state, t) for t in _leases_of(state, terms.tenant)))
    wants = event.need.device_bytes
    bound = tenant_cap(state)
    if has + wants <= bound:
        return None
    return QuotaExceeded(terms.tenant, has, wants, bound, "bytes")


def _capped_bytes(state: CoreState, ticket: Ticket) -> Bytes:
    """Returns the bytes of a lease that count against its tenant's cap. Queued leases count as
    well, or a tenant could fill the whole queue; the RAM of a process beside a GPU does not
    count."""
    return ticket.need.device_bytes if ticket.state is State.QUEUED else device_bytes(state, ticket)


def tenant_cap(state: CoreState) -> Bytes:
    """Returns the most that one tenant may lease in all."""
    if state.settings.lease_tenant_bytes is not None:
        return state.settings.lease_tenant_bytes
    lent = sum(b.budget_bytes for b in state.ledger.books.values() if b.kind in COMPUTE)
    return fraction_of(Bytes(lent), state.settings.lease_tenant_fraction)


def _leases_of(state: CoreState, tenant: str) -> Iterator[Ticket]:
    """Yields a tenant's leases."""
    for ticket in state.ledger.leases():
        if ticket.lease and ticket.lease.terms.tenant == tenant:
            yield ticket


def _overdue(state: CoreState, tenant: str) -> Bytes:
    """Returns the bytes of leases that are over and whose process has not given them back."""
    return Bytes(sum(device_bytes(state, t) for t in _leases_of(state, tenant) if t.reclaim_late))


def new_ticket(
    state: CoreState, holder: Holder, event: ev.Requested, terms: types.LeaseConditions
) -> Ticket:
    """Returns the ticket of a lease that was asked for."""
    ticket = Ticket(
        event.ticket,
        event.holder,
        holder.node,
        types.LEASE,
        event.model,
        event.settings_key,
        event.need,
        True,
        attempt=1,
        opened=state.now,
        since=state.now,
    )
    bind(state, ticket, terms)
    ticket.set_priority(event.priority)  # of its waiting
    return ticket


def bind(state: CoreState, ticket: Ticket, terms: types.LeaseConditions) -> None:
    """Puts a lease on these terms from now on, as far as they are lawful: after a restart the
    holder alone knows them."""
    settings = state.settings
    terms = replace(
        terms,
        term=terms.term if terms.on_host else min(terms.term, settings.lease_term_most),
        notice=max(Span(0), min(terms.notice, settings.lease_notice_most)),
    )
    rank = state.policies.roles[types.LEASE].rank
    ticket.bind_lease(terms, after(state.now, terms.term), _priority_of(terms), rank)
    state.ledger.bill_to(ticket, types.Client(terms.tenant))


# -- holding --------------------------------------------------------------------------------------


def begin(state: CoreState, ticket: Ticket) -> None:
    """Moves LOADING -> RESIDENT in the same step: there is nothing to load. The term begins."""
    assert ticket.lease is not None
    terms = ticket.lease.terms
    state.move(ticket, State.RESIDENT)
    ticket.end_load(Span(0), state.now)
    ticket.bind_lease(terms, after(state.now, terms.term), _priority_of(terms), ticket.role_rank)
    lessees.note_begun(state, ticket)
    state.evicted_for.pop((ticket.holder, ticket.model), None)
    state.set_timer(ticket, notice_given_at(ticket))
    size = ticket.granted_home_bytes
    tenant = terms.tenant
    state.log(EventKind.LEASE_GRANTED, ticket, size=size, took=terms.term, tenant=tenant)


def _priority_of(terms: types.LeaseConditions) -> types.Priority:
    """Returns the priority of a lease: a preemptible lease gives way to every request."""
    return types.Priority.BATCH if terms.preemptible else types.Priority.NORMAL


def notice_given_at(ticket: Ticket) -> Instant:
    """Returns when a lease is given notice that its term ends."""
    assert ticket.lease is not None
    told_at = ticket.lease.ends - ticket.lease.terms.notice
    return Instant(max(ticket.last_load.resident_since, told_at))
