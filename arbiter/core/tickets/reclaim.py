"""Brings bytes back (A10): they stay charged until the node agent has seen them free.

Whatever ends a ticket comes through `reclaim`; whatever proves its bytes are back, through
`mark_reclaimed`.
"""

from arbiter.core.decisions import EventKind, KillEngine, Reason, Revoke, Tier
from arbiter.core.events import Released
from arbiter.core.records.ticket import CHARGED, State, Ticket
from arbiter.core.state import CoreState
from arbiter.errors import HolderQuarantined, TicketClosed
from arbiter.units import Bytes, HolderId, TicketId, after, since

REASONS = {reason.value: reason for reason in Reason}
# No rule wanted these to end: a model whose floor is the device comes back (floors.enforce).
UNASKED = frozenset(
    {Reason.LOST, Reason.FAILED, Reason.REPLACED, Reason.WITHDRAWN, Reason.SHUTDOWN}
)


def reclaim(state: CoreState, entry: Ticket, reason: Reason) -> None:
    """Ends the engine behind a ticket. A reason given by an earlier revoke stands."""
    was_waiting = entry.ticket in state.queue
    state.drop_queued(entry)
    entry.note_leaving(reason)
    state.move(entry, State.RECLAIMING)
    if was_waiting:  # to be woken; it will not be
        state.answer_error_finally(entry.ticket, TicketClosed(entry.ticket))
    _kill(state, entry)


def on_released(state: CoreState, event: Released) -> None:
    """Reclaims a ticket whose holder has let go; the agent makes sure of it and says when the bytes
    are back."""
    states = State.QUEUED, *(CHARGED - {State.RECLAIMING})
    entry = state.live(event.ticket, *states, by=event.holder)
    if entry is None:
        return
    if entry.state is State.QUEUED:
        state.log(EventKind.TICKET_CLOSED, entry, reason=event.reason)
        state.close(entry)
    else:
        reclaim(state, entry, REASONS.get(event.reason, Reason.MANUAL))


def notify_holder(state: CoreState, ticket: TicketId, holder: HolderId, reason: Reason) -> None:
    """Tells a holder that its ticket ends. It need not answer: the agent ends the engine."""
    state.decide(Revoke(ticket, holder, reason, Tier.GONE, state.now))


def kill_and_notify(state: CoreState, entry: Ticket, reason: Reason) -> None:
    """Ends the engine without asking its holder, and tells the holder."""
    reclaim(state, entry, reason)
    notify_holder(state, entry.ticket, entry.holder, reason)


def _kill(state: CoreState, entry: Ticket) -> None:
    """Has the agent kill the engine, every 250 ms at first; a quarantined holder is no longer
    pressed as hard."""
    timeouts = state.settings.timeouts
    pause = timeouts.reclaim_overdue if entry.reclaim_late else timeouts.reap_every
    entry.kill_again_at(after(state.now, pause))
    state.decide(KillEngine(entry.node, entry.ticket))
    state.set_timer(entry, entry.kill_at)


def on_timer(state: CoreState, entry: Ticket) -> None:
    """Runs the time rule of RECLAIMING."""
    if (
        not entry.reclaim_late
        and since(entry.since, state.now) >= state.settings.timeouts.reclaim_overdue
    ):
        _quarantine(state, entry)
    if state.now >= entry.kill_at:
        _kill(state, entry)
    state.set_timer(entry, entry.kill_at)


def _quarantine(state: CoreState, entry: Ticket) -> None:
    entry.note_late_reclaim()
    state.mark_dirty(entry.node)  # its bytes are not counted on any more
    charged_bytes = charged(entry)
    state.log(
        EventKind.QUARANTINE,
        entry,
        size=charged_bytes,
        took=since(entry.since, state.now),
        node=entry.node,
    )
    for other in state.ledger.held_by(entry.holder):
        if other.state is State.QUEUED:
            state.answer_error_finally(other.ticket, HolderQuarantined(entry.holder, charged_bytes))
            state.close(other)
        elif other.ticket in state.queue:
            state.unqueue(other)
            state.answer_error(other.ticket, HolderQuarantined(entry.holder, charged_bytes))


def is_counted_on(leaving: Ticket) -> bool:
    """Says whether the bytes of a leaving ticket will come back; those that a quarantined holder
    keeps may not."""
    return leaving.state is State.DRAINING or not leaving.reclaim_late


def kept_bytes(state: CoreState, holder: HolderId) -> Bytes:
    """Returns what a holder in quarantine has not given back; 0: it is not in quarantine."""
    stuck = [e for e in state.ledger.holding(holder).values() if e.reclaim_late]
    return Bytes(sum(charged(e) for e in stuck))


def charged(entry: Ticket) -> Bytes:
    """Returns what a ticket is charged on all its devices."""
    return Bytes(sum(entry.charge(d) for d in entry.devices))


def mark_reclaimed(state: CoreState, entry: Ticket) -> None:
    """Closes a ticket whose bytes were seen back."""
    assert entry.state is State.RECLAIMING
    reason = entry.leaving_reason
    took = since(entry.since, state.now)
    if entry.revoked_at is not None:
        state.estimates.note_turnover(entry.capability, since(entry.revoked_at, state.now))
    kind = EventKind.LEASE_ENDED if entry.lease else EventKind.MODEL_UNLOAD
    state.log(kind, entry, size=charged(entry), took=took, reason=reason.value, to="gone")
    state.close(entry)
    if reason in UNASKED and state.all_floors():
        state.timers.set(("floors", ""), state.now)
