"""Which tickets may be revoked for a queued one, and the reason why not (A6, C2, C4).

Lawful here means: awake and not loading, not pinned, past its minimum residency, not just refused.
"""

from enum import Enum, auto

from arbiter.core.eviction.ranking import effective_priority
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import quotas
from arbiter.core.types import Floor, Priority
from arbiter.units import (
    Instant,
    Span,
    after,
    in_seconds,
    since,
)


class Obstacle(Enum):
    """Why somebody may not be revoked for one that waits."""

    ITSELF = auto()
    UNLAWFUL = auto()
    AHEAD = auto()
    URGENT = auto()
    LATELY = auto()
    RESERVED = auto()


def is_evictable(state: CoreState, entry: Ticket) -> bool:
    return (
        entry.state in (State.RESIDENT, State.ASLEEP)
        and not entry.pinned
        and (entry.lease is None or entry.lease.preemptible)
        and not (entry.state is State.ASLEEP and floor_of(state, entry) is Floor.HOST)
        and state.now >= entry.declined_until
    )


def find_obstacle(
    state: CoreState, entry: Ticket, waiting: Ticket, urgent: Priority
) -> Obstacle | None:
    """None: it may be revoked for `waiting`. Never one more urgent than who asks; an equal only
    after its minimum residency (C2, C4). A sleeper that waits to be woken gives way to those
    before it in the line, never to those behind: what it still holds on the device could keep the
    first in line waiting for ever."""
    if entry is waiting:
        return Obstacle.ITSELF
    if not is_evictable(state, entry):
        return Obstacle.UNLAWFUL
    if state.tenants and quotas.is_reserved(state, entry, waiting.client.tenant):
        return Obstacle.RESERVED
    if entry.ticket in state.queue:
        is_ahead = state.queue.is_ahead(waiting.ticket, entry.ticket)
        return None if is_ahead else Obstacle.AHEAD
    its_own = effective_priority(state, entry)
    if its_own < urgent:
        return Obstacle.URGENT
    if its_own == urgent and state.now < min_residency_ends(state, entry):
        return Obstacle.LATELY
    return None


def may_swap(state: CoreState, entry: Ticket, waiting: Ticket, urgent: Priority) -> bool:
    return find_obstacle(state, entry, waiting, urgent) is None


def obstacle_text(state: CoreState, entry: Ticket, waiting: Ticket, urgent: Priority) -> str | None:
    """The same in words; None: it may."""
    match find_obstacle(state, entry, waiting, urgent):
        case Obstacle.ITSELF:
            return "it is the one that waits"
        case Obstacle.UNLAWFUL:
            return _why_never(state, entry)
        case Obstacle.RESERVED:
            return f"it is of what is reserved for {entry.client.tenant}"
        case Obstacle.AHEAD:
            return "it waits itself, further ahead"
        case Obstacle.URGENT:
            its_own = effective_priority(state, entry).name.lower()
            return f"it is more urgent ({its_own} before {urgent.name.lower()})"
        case Obstacle.LATELY:
            left_s = in_seconds(since(state.now, min_residency_ends(state, entry)))
            return f"it came lately, and stays {left_s:.1f} s yet for what its load took"
    return None


def _why_never(state: CoreState, entry: Ticket) -> str:
    if entry.pinned:
        return "it is pinned"
    if state.now < entry.declined_until:
        left_s = in_seconds(since(state.now, entry.declined_until))
        return f"it was busy when asked, and is left alone for {left_s:.1f} s"
    return f"it is {entry.state.value}"


def may_leave(state: CoreState, entry: Ticket) -> bool:
    """For want of real memory minimum residency does not count; being in use does."""
    return is_evictable(state, entry) and entry.inflight == 0 and entry.ticket not in state.queue


def min_residency_ends(state: CoreState, entry: Ticket) -> Instant:
    if entry.state is not State.RESIDENT or entry.is_prefetch:
        return entry.since
    settings = state.settings
    in_loads = Span(int(entry.load_took * settings.min_residency_loads))
    at_least = max(settings.min_residency, min(in_loads, settings.min_residency_most))
    return after(entry.resident_since, at_least)


def floor_of(state: CoreState, entry: Ticket) -> Floor:
    return state.floors.get((entry.capability, entry.model), Floor.COLD)
