"""Says an obstacle to a revoke in words, for `arbiter explain` and `arbiter free` (K3, A15)."""

from collections.abc import Callable

from arbiter.core.eviction.eligibility import Obstacle, find_obstacle
from arbiter.core.eviction.protection import grows_until, min_residency_ends
from arbiter.core.eviction.ranking import effective_priority
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.types import Priority
from arbiter.units import in_seconds, since


def obstacle_text(
    state: CoreState, ticket: Ticket, asker: Ticket, priority: Priority
) -> str | None:
    """Returns the obstacle in words; None when the ticket may be revoked."""
    obstacle = find_obstacle(state, ticket, asker, priority)
    return TEXTS[obstacle](state, ticket, priority) if obstacle else None


def _more_urgent_text(state: CoreState, ticket: Ticket, priority: Priority) -> str:
    victim_priority = effective_priority(state, ticket).name.lower()
    return f"it is more urgent ({victim_priority} before {priority.name.lower()})"


def _min_residency_text(state: CoreState, ticket: Ticket, _: Priority) -> str:
    left_s = in_seconds(since(state.now, min_residency_ends(state, ticket)))
    fraction = max((state.thrashing.get(d, 0.0) for d in ticket.home), default=0.0)
    why = f", longer because loads took {fraction:.0%} of the last ten minutes" if fraction else ""
    return f"protected for another {left_s:.1f} s (minimum residency{why})"


def _growing_text(state: CoreState, ticket: Ticket, priority: Priority) -> str:
    left_s = in_seconds(since(state.now, grows_until(state, ticket, priority)))
    return f"it waits for more memory itself, for another {left_s:.1f} s at most"


def _collated_text(state: CoreState, ticket: Ticket, _: Priority) -> str:
    most_s = in_seconds(state.settings.collate_most)
    goes_on = f"it goes on with its own requests until the asker has waited {most_s:.0f} s"
    return f"both trade places, so {goes_on}"


def _in_use_text(_: CoreState, ticket: Ticket, __: Priority) -> str:
    return f"it is in use ({ticket.inflight} in flight)" if ticket.inflight else "a request waits"


def _notice_text(_: CoreState, ticket: Ticket, __: Priority) -> str:
    assert ticket.lease is not None
    return f"it has {in_seconds(ticket.lease.terms.notice):.0f} s of notice, longer than the wait"


def _not_evictable_text(state: CoreState, ticket: Ticket, _: Priority) -> str:
    if ticket.pinned:
        return "it is pinned"
    if state.now < ticket.declined_until:
        left_s = in_seconds(since(state.now, ticket.declined_until))
        return f"declined a revoke; not asked again for {left_s:.1f} s"
    if ticket.lease and not ticket.lease.terms.preemptible:
        return "its lease may not be interrupted"
    if ticket.state is State.ASLEEP:
        return "its floor is host"
    return f"it is {ticket.state.value}"


TEXTS: dict[Obstacle, Callable[[CoreState, Ticket, Priority], str]] = {
    Obstacle.ITSELF: lambda *_: "it is the asker itself",
    Obstacle.NOT_EVICTABLE: _not_evictable_text,
    Obstacle.RESERVED: lambda _, ticket, __: (
        f"it lies within the reserve of {ticket.client.tenant}"
    ),
    Obstacle.IN_USE: _in_use_text,
    Obstacle.NOTICE: _notice_text,
    Obstacle.AHEAD: lambda *_: "it waits in the queue itself, before the asker",
    Obstacle.MORE_URGENT: _more_urgent_text,
    Obstacle.GROWING: _growing_text,
    Obstacle.MIN_RESIDENCY: _min_residency_text,
    Obstacle.COLLATED: _collated_text,
}
