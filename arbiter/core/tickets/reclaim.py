"""Bytes on their way back (SPEC A10): charged until the node agent has seen them free.

Whatever ends a ticket comes through `reclaim`; whatever proves its bytes are back, through `gone`.
"""

from arbiter.core.decisions import KillEngine, Reason, Revoke, Tier
from arbiter.core.events import Released
from arbiter.core.records.ticket import CHARGED, State, Ticket
from arbiter.core.state import CoreState
from arbiter.errors import HolderQuarantined, TicketClosed
from arbiter.units import Bytes, HolderId, TicketId, after, since

REASONS = {reason.value: reason for reason in Reason}
# Nobody wanted these to end: a model whose floor is the device comes back (floors.keep).
UNASKED = frozenset({Reason.LOST, Reason.FAILED})


def reclaim(mind: CoreState, entry: Ticket, reason: Reason) -> None:
    """The engine behind this ticket must end. A reason given by an earlier revoke stands."""
    was_waiting = entry.ticket in mind.line
    mind.line.drop(entry.ticket)
    entry.leaving = entry.leaving or reason
    mind.move(entry, State.RECLAIMING)
    if was_waiting:  # to be woken; it will not be
        mind.refuse(entry.ticket, TicketClosed(entry.ticket))
    _kill(mind, entry)


def on_released(mind: CoreState, event: Released) -> None:
    """Its holder has let go; the agent makes sure of it and says when the bytes are back."""
    states = State.QUEUED, *(CHARGED - {State.RECLAIMING})
    entry = mind.live(event.ticket, *states, by=event.holder)
    if entry is None:
        return
    if entry.state is State.QUEUED:
        mind.tell("ticket_closed", entry, reason=event.reason)
        mind.close(entry)
    else:
        reclaim(mind, entry, REASONS.get(event.reason, Reason.MANUAL))


def notify_holder(mind: CoreState, ticket: TicketId, holder: HolderId, reason: Reason) -> None:
    """The holder need not answer: the engine is ended by the agent."""
    mind.say(Revoke(ticket, holder, reason, Tier.GONE, mind.now))


def kill_and_notify(mind: CoreState, entry: Ticket, reason: Reason) -> None:
    """End the engine without asking its holder, and tell it."""
    reclaim(mind, entry, reason)
    notify_holder(mind, entry.ticket, entry.holder, reason)


def _kill(mind: CoreState, entry: Ticket) -> None:
    """Each 250 ms at first; a holder that is quarantined is no longer pressed as hard."""
    terms = mind.settings.terms
    entry.reap_at = after(mind.now, terms.reclaim_alarm if entry.alarmed else terms.reap_every)
    mind.say(KillEngine(entry.node, entry.ticket))
    mind.watch(entry, entry.reap_at)


def on_timer(mind: CoreState, entry: Ticket) -> None:
    """The time rule of RECLAIMING."""
    if not entry.alarmed and since(entry.since, mind.now) >= mind.settings.terms.reclaim_alarm:
        _quarantine(mind, entry)
    if mind.now >= entry.reap_at:
        _kill(mind, entry)
    mind.watch(entry, entry.reap_at)


def _quarantine(mind: CoreState, entry: Ticket) -> None:
    entry.alarmed = True
    mind.ledger.changed.add(entry.node)  # its bytes are not counted on any more
    kept = charged(entry)
    mind.tell("quarantine", entry, size=kept, took=since(entry.since, mind.now), node=entry.node)
    for other in mind.ledger.held_by(entry.holder):
        if other.state is State.QUEUED:
            mind.refuse(other.ticket, HolderQuarantined(entry.holder, kept))
            mind.close(other)
        elif other.ticket in mind.line:
            mind.unqueue(other)
            mind.say_no(other.ticket, HolderQuarantined(entry.holder, kept))


def is_counted_on(leaving: Ticket) -> bool:
    """Its bytes will come back; those that a quarantined holder keeps may not."""
    return leaving.state is State.DRAINING or not leaving.alarmed


def kept_bytes(mind: CoreState, holder: HolderId) -> Bytes:
    """What a holder in quarantine has not given back; 0: it is not in quarantine."""
    stuck = [e for e in mind.ledger.holding(holder).values() if e.alarmed]
    return Bytes(sum(charged(e) for e in stuck))


def charged(entry: Ticket) -> Bytes:
    return Bytes(sum(entry.charge(d) for d in entry.devices))


def mark_reclaimed(mind: CoreState, entry: Ticket) -> None:
    """Seen back: off the books."""
    assert entry.state is State.RECLAIMING
    reason = entry.leaving or Reason.LOST
    took = since(entry.since, mind.now)
    if entry.revoked_at is not None:
        mind.estimates.left(entry.capability, since(entry.revoked_at, mind.now))
    kind = "lease_ended" if entry.lease else "model_unload"
    mind.tell(kind, entry, size=charged(entry), took=took, reason=reason.value, to="gone")
    mind.close(entry)
    if reason in UNASKED and mind.floors:
        mind.alarms.set(("floors", ""), mind.now)
