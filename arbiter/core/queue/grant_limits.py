"""Keeps a ticket to what its tenant may hold (C10) and to its exclusion group (A11), before a rule
looks for bytes; and says with which priority the ticket asks (C6).

`apply_quota` and `apply_exclusion` return NOT_APPLICABLE where they keep nothing back.
"""

from collections.abc import Iterable

from arbiter.core.decisions import Reason
from arbiter.core.eviction.eligibility import may_revoke
from arbiter.core.eviction.eviction import evict_own, revoke
from arbiter.core.queue.outcome import Outcome
from arbiter.core.queue.pass_state import GrantPass, Limits
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, reject_queued
from arbiter.core.tickets import quotas
from arbiter.core.tickets.exclusion import excluded_by
from arbiter.core.tickets.failed_swaps import note_evicted_for
from arbiter.core.types import Priority
from arbiter.errors import RolePinned
from arbiter.units import SECOND, DeviceId, Span, after


def asker_priority(state: CoreState, pass_: GrantPass, queued: QueueEntry) -> Priority:
    """Returns with which priority a ticket asks. An aged ticket holds others up, and asks with the
    priority of the most urgent of them."""
    if not queued.is_aged:
        return queued.request.priority
    if pass_.most_urgent is None:
        waiting = state.queue.at(pass_.node.node)
        pass_.most_urgent = min(queued.request.priority for queued in waiting if not queued.is_held)
    return pass_.most_urgent


def apply_quota(
    state: CoreState,
    pass_: GrantPass,
    ticket: Ticket,
    limits: Limits,
    priority: Priority,
    together: Iterable[DeviceId] = (),
) -> Outcome:
    """Rejects what its tenant can never have (C10); defers what the tenant has too much for now,
    and revokes some of the tenant's own for it. A ticket deferred here holds up no other.
    `together`: the devices that it needs all of; without them any one of the node will do.
    No quota binds `arbiter free`, which an operator runs."""
    tenant = ticket.client.tenant
    need = limits.need_bytes
    if ticket.frees or (tenant not in state.tenants and not pass_.reserves):
        return Outcome.NOT_APPLICABLE
    most = sum(limits.most_by_device[d] for d in together) if together else limits.most_bytes
    if never := quotas.never_fits(state, tenant, need, most, pass_.node):
        reject_queued(state, ticket, never)
        return Outcome.REJECTED
    if not quotas.over_limit(state, tenant, need):
        return Outcome.NOT_APPLICABLE
    pass_.has_waiting = True
    if short := quotas.over_limit_after_drain(state, tenant, need):
        evict_own(state, ticket, short, priority)
    state.timers.set(("queue", pass_.node.node), after(state.now, Span(SECOND)))
    return Outcome.DEFERRED


def apply_exclusion(
    state: CoreState, pass_: GrantPass, ticket: Ticket, queued: QueueEntry, priority: Priority
) -> Outcome:
    """Keeps a ticket to its exclusion group (`swap_within_role`). A ticket deferred here lacks no
    bytes, so it holds up no ticket of another role. Once aged it holds up those of its own: another
    replica of the model that is to leave would keep the place."""
    if ticket.role in pass_.reserved_roles:
        return pass_.defer(queued, ())
    outcome = swap_within_role(state, ticket, priority)
    if outcome is not Outcome.DEFERRED:
        return outcome
    if queued.is_aged:
        pass_.reserved_roles.add(ticket.role)
    return pass_.defer(queued, ())


def swap_within_role(state: CoreState, ticket: Ticket, priority: Priority) -> Outcome:
    """Defers a ticket while another model of its role is awake on its node, and revokes that model
    if it lawfully may leave. Rejects the ticket where that model is pinned."""
    others = excluded_by(state, ticket.node, ticket.role, ticket.model_name)
    stays = next((t for t in others if t.pinned and t.state is not State.DRAINING), None)
    if stays is not None:
        reject_queued(
            state, ticket, RolePinned(ticket.model, ticket.role, ticket.node, stays.model)
        )
        return Outcome.REJECTED
    residents = [t for t in others if t.state is State.RESIDENT]
    if residents and all(may_revoke(state, t, ticket, priority) for t in residents):
        for victim in residents:
            note_evicted_for(state, ticket, victim)
            revoke(state, victim, Reason.SWAP, ticket)
    return Outcome.DEFERRED if others else Outcome.NOT_APPLICABLE
