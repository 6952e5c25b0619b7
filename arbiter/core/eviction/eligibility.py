"""Says which tickets may be revoked for an asker, and the obstacle where one may not (A6, C2, C4).

May be revoked: a ticket that is resident, in use or not, or asleep; not pinned; past its minimum
residency (protection.py); and that has not just declined. A ticket in use may be revoked, too: its
holder lets the requests in flight finish first, and declines if they outlive the barrier. What an
obstacle is called in `arbiter explain` is in obstacle_text.py.
"""

from enum import Enum, auto

from arbiter.core.eviction.protection import collated_until, grows_until, min_residency_ends
from arbiter.core.eviction.ranking import MAY_LEAVE, effective_priority
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import quotas
from arbiter.core.types import Floor, Priority
from arbiter.units import Instant, after


class Obstacle(Enum):
    """Names why a ticket may not be revoked for an asker, in the order of the checks."""

    ITSELF = auto()  # it is the asker
    NOT_EVICTABLE = auto()  # for no asker: see is_evictable
    RESERVED = auto()  # within the reserve of its tenant
    IN_USE = auto()  # `arbiter free` takes only what is idle
    NOTICE = auto()  # a lease whose notice is longer than `arbiter free` waits
    AHEAD = auto()  # it waits to be woken, before the asker in the queue
    MORE_URGENT = auto()  # than the asker
    GROWING = auto()  # it waits for more memory itself
    MIN_RESIDENCY = auto()  # loaded too lately
    COLLATED = auto()  # it trades places with the asker's model, and has requests of its own


def is_evictable(state: CoreState, ticket: Ticket) -> bool:
    """Says whether a ticket may be revoked at all now, whatever for."""
    return (
        ticket.state in MAY_LEAVE
        and not ticket.pinned
        and (ticket.lease is None or ticket.lease.terms.preemptible)
        and not (ticket.state is State.ASLEEP and state.floor_of(ticket.model_name) is Floor.HOST)
        and state.now >= ticket.declined_until
    )


def find_obstacle(
    state: CoreState, ticket: Ticket, asker: Ticket, priority: Priority
) -> Obstacle | None:
    """Returns why a ticket may not be revoked for `asker`, which asks with `priority`; None
    when it may. A victim is never more urgent than the asker, and an equal leaves only after
    its minimum residency (C2, C4). An asleep ticket that waits to be woken gives way to tickets
    before it in the queue, never to those behind: what it still holds on the device could keep the
    head of the queue waiting for ever. `arbiter free` takes whatever is idle, and nothing else."""
    if ticket is asker:
        return Obstacle.ITSELF
    if not is_evictable(state, ticket):
        return Obstacle.NOT_EVICTABLE
    if state.tenants and quotas.is_reserved(state, ticket, asker.client.tenant):
        return Obstacle.RESERVED
    if asker.lease and asker.frees:
        return _obstacle_to_free(state, ticket, asker)
    if ticket.id in state.queue:
        is_ahead = state.queue.is_ahead(asker.id, ticket.id)
        return None if is_ahead else Obstacle.AHEAD
    return _passing_obstacle(state, ticket, asker, priority)


def _obstacle_to_free(state: CoreState, ticket: Ticket, asker: Ticket) -> Obstacle | None:
    """Returns why `arbiter free` may not have an evictable ticket; None when it may."""
    queued = state.queue.find(asker.id)
    if ticket.inflight > 0 or ticket.id in state.queue:
        return Obstacle.IN_USE
    if queued is not None and leaves_too_late(state, ticket, queued.deadline):
        return Obstacle.NOTICE
    return None


def leaves_too_late(state: CoreState, ticket: Ticket, deadline: Instant | None) -> bool:
    """Says whether a lease has more notice than a deadline leaves."""
    if ticket.lease is None or deadline is None:
        return False
    return after(state.now, ticket.lease.terms.notice) > deadline


def _passing_obstacle(
    state: CoreState, ticket: Ticket, asker: Ticket, priority: Priority
) -> Obstacle | None:
    """Returns the obstacle that time alone removes; None when there is none."""
    victim_priority = effective_priority(state, ticket)
    if victim_priority < priority:
        return Obstacle.MORE_URGENT
    if state.now < grows_until(state, ticket, priority):
        return Obstacle.GROWING
    if victim_priority == priority and state.now < min_residency_ends(state, ticket):
        return Obstacle.MIN_RESIDENCY
    if victim_priority == priority and state.now < collated_until(state, ticket, asker):
        return Obstacle.COLLATED
    return None


def may_revoke(state: CoreState, ticket: Ticket, asker: Ticket, priority: Priority) -> bool:
    """Says whether a ticket may be revoked for `asker`, which asks with `priority`."""
    return find_obstacle(state, ticket, asker, priority) is None


def may_leave(state: CoreState, ticket: Ticket) -> bool:
    """Says whether an idle ticket may be revoked for want of memory, where minimum residency does
    not count."""
    return is_evictable(state, ticket) and ticket.inflight == 0 and ticket.id not in state.queue
