"""Brings bytes back (A10): they stay charged until the node agent has seen them free.

Whatever ends a ticket comes through `reclaim`; whatever proves its bytes are back, through
`mark_reclaimed`.
"""

from arbiter.core.decisions import EventKind, KillEngine, Reason, Revoke, Tier
from arbiter.core.events import Released
from arbiter.core.records.ticket import CHARGED, State, Ticket
from arbiter.core.state import CoreState, reject_queued
from arbiter.errors import HolderQuarantined, TicketClosed
from arbiter.units import Bytes, HolderId, TicketId, after, since

REASONS = {reason.value: reason for reason in Reason}
# No rule wanted these to end: a model whose floor is the device comes back (floors.enforce).
UNASKED = frozenset(
    {Reason.LOST, Reason.FAILED, Reason.REPLACED, Reason.WITHDRAWN, Reason.SHUTDOWN}
)


def reclaim(state: CoreState, ticket: Ticket, reason: Reason) -> None:
    """Ends the engine behind a ticket. A reason given by an earlier revoke stands."""
    was_waiting = ticket.id in state.queue
    state.drop_queued(ticket)
    ticket.note_leaving(reason)
    state.move(ticket, State.RECLAIMING)
    if was_waiting:  # to be woken; it will not be
        state.answer_error_finally(ticket.id, TicketClosed(ticket.id))
    _kill(state, ticket)


def on_released(state: CoreState, event: Released) -> None:
    """Reclaims a ticket whose holder has let go; the agent makes sure of it and says when the bytes
    are back."""
    states = State.QUEUED, *(CHARGED - {State.RECLAIMING})
    ticket = state.find_or_count_stale(event.ticket, *states, by=event.holder)
    if ticket is None:
        return
    if ticket.state is State.QUEUED:
        state.log(EventKind.TICKET_CLOSED, ticket, reason=event.reason)
        state.close(ticket)
    else:
        reclaim(state, ticket, REASONS.get(event.reason, Reason.MANUAL))


def notify_holder(state: CoreState, ticket_id: TicketId, holder: HolderId, reason: Reason) -> None:
    """Tells a holder that its ticket ends. It need not answer: the agent ends the engine."""
    state.decide(Revoke(ticket_id, holder, reason, Tier.GONE, state.now))


def kill_and_notify(state: CoreState, ticket: Ticket, reason: Reason) -> None:
    """Ends the engine without asking its holder, and tells the holder."""
    reclaim(state, ticket, reason)
    notify_holder(state, ticket.id, ticket.holder, reason)


def _kill(state: CoreState, ticket: Ticket) -> None:
    """Has the agent kill the engine, every 250 ms at first; a quarantined holder is no longer
    pressed as hard."""
    timeouts = state.settings.timeouts
    pause = timeouts.reclaim_overdue if ticket.reclaim_late else timeouts.reap_every
    ticket.kill_again_at(after(state.now, pause))
    state.decide(KillEngine(ticket.node, ticket.id))
    state.set_timer(ticket, ticket.kill_at)


def on_timer(state: CoreState, ticket: Ticket) -> None:
    """Runs the time rule of RECLAIMING."""
    if (
        not ticket.reclaim_late
        and since(ticket.since, state.now) >= state.settings.timeouts.reclaim_overdue
    ):
        _quarantine(state, ticket)
    if state.now >= ticket.kill_at:
        _kill(state, ticket)
    state.set_timer(ticket, ticket.kill_at)


def _quarantine(state: CoreState, ticket: Ticket) -> None:
    """Puts the holder of a ticket whose bytes are not back in time into quarantine, and refuses its
    queued tickets."""
    ticket.note_late_reclaim()
    state.mark_dirty(ticket.node)  # its bytes are not counted on any more
    charged_bytes = charged(ticket)
    state.log(
        EventKind.QUARANTINE,
        ticket,
        size=charged_bytes,
        took=since(ticket.since, state.now),
        node=ticket.node,
    )
    for other in state.ledger.held_by(ticket.holder):
        if other.id in state.queue:
            reject_queued(state, other, HolderQuarantined(ticket.holder, charged_bytes))


def is_counted_on(leaving: Ticket) -> bool:
    """Says whether the bytes of a leaving ticket will come back; those that a quarantined holder
    keeps may not."""
    return leaving.state is State.DRAINING or not leaving.reclaim_late


def quarantined_bytes(state: CoreState, holder: HolderId) -> Bytes:
    """Returns the bytes that a holder in quarantine has not given back; 0 where the holder is not
    in quarantine."""
    stuck = [t for t in state.ledger.holding(holder).values() if t.reclaim_late]
    return Bytes(sum(charged(t) for t in stuck))


def charged(ticket: Ticket) -> Bytes:
    """Returns the bytes that a ticket is charged, over all its devices."""
    return Bytes(sum(ticket.charge(d) for d in ticket.devices))


def mark_reclaimed(state: CoreState, ticket: Ticket) -> None:
    """Closes a ticket whose bytes were seen back."""
    assert ticket.state is State.RECLAIMING
    reason = ticket.leaving_reason
    took = since(ticket.since, state.now)
    if ticket.revoked_at is not None:
        state.estimates.note_turnover(ticket.capability, since(ticket.revoked_at, state.now))
    kind = EventKind.LEASE_ENDED if ticket.lease else EventKind.MODEL_UNLOAD
    state.log(kind, ticket, size=charged(ticket), took=took, reason=reason.value, to="gone")
    state.close(ticket)
    if reason in UNASKED and state.all_floors():
        state.timers.set(("floors", ""), state.now)
