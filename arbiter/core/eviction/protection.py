"""Says until when a resident is protected from being a victim: by its minimum residency (C4), by a
growth that it waits for (A14), and while it trades places with the asker's model (C13).

Every function returns an instant: `state.now` or an earlier one where the rule protects nothing.
"""

from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.types import Priority
from arbiter.units import Instant, Span, after, since


def grows_until(state: CoreState, ticket: Ticket, priority: Priority) -> Instant:
    """Returns until when a resident that waits for more memory (A14) is protected: for as long as
    it may wait, if the asker, which asks with `priority`, is no more urgent. Growth comes before
    the queue."""
    if ticket.id not in state.growing or ticket.growth is None or priority < ticket.priority:
        return state.now
    return ticket.growth.until


def min_residency_ends(state: CoreState, ticket: Ticket) -> Instant:
    """Returns when the minimum residency of a ticket is over: as long as its load took, within
    bounds (C4). A prefetched ticket has none."""
    if ticket.state is not State.RESIDENT or ticket.is_prefetch:
        return ticket.since
    settings = state.settings
    load = ticket.load
    assert load is not None  # not by `last_load`: asked of each candidate
    loads = _residency_loads(state, ticket) if state.thrashing else settings.min_residency_loads
    stays = min(int(load.took * loads), settings.min_residency_most)
    return after(load.resident_since, Span(max(settings.min_residency, stays)))


def _residency_loads(state: CoreState, ticket: Ticket) -> float:
    """Returns for how many times its load a model stays. On a device that is thrashing (C13), as
    many as keep the share of loads within the bound."""
    usual = state.settings.min_residency_loads
    if not any(d in state.thrashing for d in ticket.home):
        return usual
    return max(usual, 1.0 / state.settings.loading_most_fraction - 1.0)


def collated_until(state: CoreState, ticket: Ticket, asker: Ticket) -> Instant:
    """Returns until when a resident goes on with requests of its own although a ticket as urgent
    waits for its place: where the asker's model has left for it before, so that both would trade
    places with every few requests (C13). A model without requests leaves at once."""
    if ticket.state is not State.RESIDENT or ticket.is_prefetch:
        return state.now
    bound = collation_bound(state, ticket, asker)
    return bound if ticket.inflight > 0 else min(bound, pause_ends(state, ticket))


def collation_bound(state: CoreState, ticket: Ticket, asker: Ticket) -> Instant:
    """Returns until when an asker waits at most for a model with which its own trades places: no
    longer than half of the time that its deadline leaves; now where the two do not trade. A request
    that gave up and asks again goes on with its wait."""
    if not state.trades.has_left_for(asker.model_name, ticket.model_name, state.now):
        return state.now
    return trade_bound(state, ticket.capability, asker)


def trade_bound(state: CoreState, capability: str, asker: Ticket) -> Instant:
    """Returns the `collation_bound` of an asker for a model of this capability that is known to
    trade places with the asker's."""
    queued = state.queue.find(asker.id)
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


def pause_ends(state: CoreState, ticket: Ticket) -> Instant:
    """Returns until when an idle resident may be expected to be asked again by its own users
    (C13)."""
    settings = state.settings
    load = ticket.load
    assert load is not None  # as in min_residency_ends
    pause = min(load.took, settings.collate_pause_most)
    return after(ticket.last_used, max(settings.collate_pause, pause))
