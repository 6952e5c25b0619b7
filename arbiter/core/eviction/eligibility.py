"""Says which tickets may be revoked for an asker, and the reason why not (A6, C2, C4).

Lawful here means: resident, in use or not, or asleep; not pinned; past its minimum residency; not
just declined. A ticket in use may be revoked, too: its holder lets the requests in flight finish
first, and declines if they outlive the barrier.
"""

from collections.abc import Callable
from enum import Enum, auto

from arbiter.core.eviction.ranking import MAY_LEAVE, effective_priority
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
    """Names why a ticket may not be revoked for an asker."""

    ITSELF = auto()
    UNLAWFUL = auto()
    AHEAD = auto()
    URGENT = auto()
    GROWING = auto()
    MIN_RESIDENCY = auto()
    COLLATED = auto()
    RESERVED = auto()
    IN_USE = auto()
    NOTICE = auto()


def is_evictable(state: CoreState, entry: Ticket) -> bool:
    """Says whether a ticket may be revoked at all now, whatever for."""
    return (
        entry.state in MAY_LEAVE
        and not entry.pinned
        and (entry.lease is None or entry.lease.terms.preemptible)
        and not (entry.state is State.ASLEEP and state.floor_of(entry.model_name) is Floor.HOST)
        and state.now >= entry.declined_until
    )


def find_obstacle(
    state: CoreState, entry: Ticket, asker: Ticket, priority: Priority
) -> Obstacle | None:
    """Returns why a ticket may not be revoked for `asker`, which asks with priority `priority`;
    None when it may. A victim is never more urgent than the asker, and an equal leaves only after
    its minimum residency (C2, C4). An asleep ticket that waits to be woken gives way to tickets
    before it in the queue, never to those behind: what it still holds on the device could keep the
    head of the queue waiting for ever. `arbiter free` takes whatever is idle, and nothing else."""
    if entry is asker:
        return Obstacle.ITSELF
    if not is_evictable(state, entry):
        return Obstacle.UNLAWFUL
    if state.tenants and quotas.is_reserved(state, entry, asker.client.tenant):
        return Obstacle.RESERVED
    if asker.lease and asker.frees:
        return _why_not_freed(state, entry, asker)
    if entry.ticket in state.queue:
        is_ahead = state.queue.is_ahead(asker.ticket, entry.ticket)
        return None if is_ahead else Obstacle.AHEAD
    return _why_not_yet(state, entry, asker, priority)


def _why_not_freed(state: CoreState, entry: Ticket, asker: Ticket) -> Obstacle | None:
    """Returns why `arbiter free` may not have a ticket."""
    queued = state.queue.find(asker.ticket)
    if entry.inflight > 0 or entry.ticket in state.queue:
        return Obstacle.IN_USE
    if queued is not None and leaves_too_late(state, entry, queued.deadline):
        return Obstacle.NOTICE
    return None


def leaves_too_late(state: CoreState, entry: Ticket, deadline: Instant | None) -> bool:
    """Says whether a lease has more notice than a deadline leaves."""
    if entry.lease is None or deadline is None:
        return False
    return after(state.now, entry.lease.terms.notice) > deadline


def _why_not_yet(
    state: CoreState, entry: Ticket, asker: Ticket, priority: Priority
) -> Obstacle | None:
    """Returns the obstacle that time alone removes."""
    victim_priority = effective_priority(state, entry)
    if victim_priority < priority:
        return Obstacle.URGENT
    if state.now < grows_until(state, entry, priority):
        return Obstacle.GROWING
    if victim_priority == priority and state.now < min_residency_ends(state, entry):
        return Obstacle.MIN_RESIDENCY
    if victim_priority == priority and state.now < collated_until(state, entry, asker):
        return Obstacle.COLLATED
    return None


def grows_until(state: CoreState, entry: Ticket, priority: Priority) -> Instant:
    """Returns until when a resident that waits for more memory (A14) stays before an asker that is
    no more urgent: it is before the queue. Now where it waits for none."""
    if entry.ticket not in state.growing or entry.growth is None or priority < entry.priority:
        return state.now
    return entry.growth.until


def may_swap(state: CoreState, entry: Ticket, asker: Ticket, priority: Priority) -> bool:
    """Says whether a ticket may be revoked for `asker`, which asks with priority `priority`."""
    return find_obstacle(state, entry, asker, priority) is None


def obstacle_text(state: CoreState, entry: Ticket, asker: Ticket, priority: Priority) -> str | None:
    """Returns the obstacle in words; None when the ticket may be revoked."""
    obstacle = find_obstacle(state, entry, asker, priority)
    return TEXTS[obstacle](state, entry, priority) if obstacle else None


def _urgent_text(state: CoreState, entry: Ticket, priority: Priority) -> str:
    victim_priority = effective_priority(state, entry).name.lower()
    return f"it is more urgent ({victim_priority} before {priority.name.lower()})"


def _min_residency_text(state: CoreState, entry: Ticket, _: Priority) -> str:
    left_s = in_seconds(since(state.now, min_residency_ends(state, entry)))
    much = max((state.loading_much.get(d, 0.0) for d in entry.home), default=0.0)
    why = f", longer because loads took {much:.0%} of the last ten minutes" if much else ""
    return f"protected for another {left_s:.1f} s (minimum residency{why})"


def _growing_text(state: CoreState, entry: Ticket, priority: Priority) -> str:
    left_s = in_seconds(since(state.now, grows_until(state, entry, priority)))
    return f"it waits for more memory itself, for another {left_s:.1f} s at most"


def _collated_text(state: CoreState, entry: Ticket, _: Priority) -> str:
    most_s = in_seconds(state.settings.collate_most)
    goes_on = f"it goes on with its own requests until the asker has waited {most_s:.0f} s"
    return f"both trade places, so {goes_on}"


def _in_use_text(_: CoreState, entry: Ticket, __: Priority) -> str:
    return f"it is in use ({entry.inflight} in flight)" if entry.inflight else "a request waits"


def _notice_text(_: CoreState, entry: Ticket, __: Priority) -> str:
    assert entry.lease is not None
    return f"it has {in_seconds(entry.lease.terms.notice):.0f} s of notice, longer than the wait"


def _why_never(state: CoreState, entry: Ticket, _: Priority) -> str:
    if entry.pinned:
        return "it is pinned"
    if state.now < entry.declined_until:
        left_s = in_seconds(since(state.now, entry.declined_until))
        return f"declined a revoke; not asked again for {left_s:.1f} s"
    if entry.lease and not entry.lease.terms.preemptible:
        return "its lease may not be interrupted"
    if entry.state is State.ASLEEP:
        return "its floor is host"
    return f"it is {entry.state.value}"


TEXTS: dict[Obstacle, Callable[[CoreState, Ticket, Priority], str]] = {
    Obstacle.ITSELF: lambda *_: "it is the asker itself",
    Obstacle.UNLAWFUL: _why_never,
    Obstacle.RESERVED: lambda _, entry, __: f"it lies within the reserve of {entry.client.tenant}",
    Obstacle.IN_USE: _in_use_text,
    Obstacle.NOTICE: _notice_text,
    Obstacle.AHEAD: lambda *_: "it waits in the queue itself, before the asker",
    Obstacle.URGENT: _urgent_text,
    Obstacle.GROWING: _growing_text,
    Obstacle.MIN_RESIDENCY: _min_residency_text,
    Obstacle.COLLATED: _collated_text,
}


def may_leave(state: CoreState, entry: Ticket) -> bool:
    """Says whether an idle ticket may be revoked for want of memory, where minimum residency does
    not count."""
    return is_evictable(state, entry) and entry.inflight == 0 and entry.ticket not in state.queue


def min_residency_ends(state: CoreState, entry: Ticket) -> Instant:
    """Returns when the minimum residency of a ticket is over: as long as its load took, within
    bounds (C4). A prefetched ticket has none."""
    if entry.state is not State.RESIDENT or entry.is_prefetch:
        return entry.since
    settings = state.settings
    load = entry.load
    assert load is not None  # not by `last_load`: asked of each candidate
    loads = _residency_loads(state, entry) if state.loading_much else settings.min_residency_loads
    stays = min(int(load.took * loads), settings.min_residency_most)
    return after(load.resident_since, Span(max(settings.min_residency, stays)))


def _residency_loads(state: CoreState, entry: Ticket) -> float:
    """Returns for how many times its load a model stays. Where a device spends too much of its time
    loading (C13), as many as keep the share of loads within the bound."""
    usual = state.settings.min_residency_loads
    if not any(d in state.loading_much for d in entry.home):
        return usual
    return max(usual, 1.0 / state.settings.loading_most_fraction - 1.0)


def collated_until(state: CoreState, entry: Ticket, asker: Ticket) -> Instant:
    """Returns until when a resident goes on with requests of its own although a ticket as urgent
    waits for its place: where the asker's model has left for it before, so that both would trade
    places with every few requests (C13). A model without requests leaves at once."""
    if entry.state is not State.RESIDENT or entry.is_prefetch:
        return state.now
    bound = collation_bound(state, entry, asker)
    return bound if entry.inflight > 0 else min(bound, pause_ends(state, entry))


def collation_bound(state: CoreState, entry: Ticket, asker: Ticket) -> Instant:
    """Returns until when an asker waits for a model with which it trades places, at most: no longer
    than half of the time that its deadline leaves. A request that gave up and asks again goes on
    with its wait. Now where they do not trade."""
    if not state.trades.has_left_for(asker.model_name, entry.model_name, state.now):
        return state.now
    return trade_bound(state, entry.capability, asker)


def trade_bound(state: CoreState, capability: str, asker: Ticket) -> Instant:
    """Returns the same for a model of a capability that is known to trade places."""
    queued = state.queue.find(asker.ticket)
    if queued is None or not state.settings.collate_most:
        return state.now
    asked_at = queued.request.asked_at
    began = state.trades.waits_since((asker.holder, asker.model), asked_at)
    bound = after(began, state.settings.collate_most)
    if queued.deadline is None:
        return bound
    load = state.estimates.load_time(asker.model_key, asker.need.weights_bytes)
    turnover = state.estimates.turnover(capability)
    spare = since(asked_at, queued.deadline) - load - turnover
    return min(bound, after(asked_at, Span(max(0, spare // 2))))


def pause_ends(state: CoreState, entry: Ticket) -> Instant:
    """Returns until when an idle resident may be expected to be asked again (C13)."""
    settings = state.settings
    load = entry.load
    assert load is not None  # as above
    pause = min(load.took, settings.collate_pause_most)
    return after(entry.last_used, max(settings.collate_pause, pause))
