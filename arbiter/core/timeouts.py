"""Leads each timer that is due to the rule of its subject, and runs the shutdown."""

from collections.abc import Callable

from arbiter.core.decisions import EventKind, Reason
from arbiter.core.eviction import compaction, eviction, pressure
from arbiter.core.queue import admission, grants
from arbiter.core.records.ledger import audit as audit_books
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.reports import replica_targets
from arbiter.core.residency import floors, heartbeats, idle, loading_share, readings
from arbiter.core.state import CoreState
from arbiter.core.tickets import failed_swaps, leases, loads, pins, reclaim
from arbiter.units import HolderId, NodeId, TicketId, after, in_seconds


def fire_due(state: CoreState) -> None:
    """Runs the rule of every subject whose time has come. A subject that is not due after all sets
    its timer again."""
    for kind, name in state.timers.due(state.now):
        RULES[kind](state, name)


def on_ticket_timer(state: CoreState, name: str) -> None:
    """Runs the time rule of a ticket that is still on the books."""
    if ticket := state.ledger.find(TicketId(name)):
        on_timer(state, ticket)


def look_at_queue(state: CoreState, node: str) -> None:
    """Has a node looked at again, because something there may have become lawful by time alone."""
    if node:
        state.mark_dirty(NodeId(node))


def audit(state: CoreState, _: str) -> None:
    """Checks all the books, and has every queue looked at: level-triggered, should a reason to look
    ever be missed. Raises LedgerBroken."""
    audit_books(state.ledger)
    loading_share.watch(state)
    for ticket in state.ledger.tickets(State.RESIDENT, State.ASLEEP):
        if ("ticket", ticket.id) not in state.timers:
            state.set_timer(ticket, state.now)
    state.mark_dirty(*state.queue.nodes)
    state.timers.set(("audit", ""), after(state.now, state.settings.timeouts.audit))


def on_timer(state: CoreState, ticket: Ticket) -> None:
    """Runs the time rules of a ticket: of its place in the queue, then of its state."""
    if ticket.id in state.queue:
        admission.reject_expired(state, ticket)
        grants.age(state, ticket)
    match ticket.state:
        case State.LOADING:
            _tend_loading(state, ticket)
        case State.RESIDENT if ticket.lease:
            _tend_lease(state, ticket)
        case State.RESIDENT | State.ASLEEP:
            idle.on_idle(state, ticket)
        case State.DRAINING:
            eviction.on_draining_timer(state, ticket)
        case State.RECLAIMING:
            reclaim.on_timer(state, ticket)


def _tend_loading(state: CoreState, ticket: Ticket) -> None:
    """Ends a load that hangs."""
    load_by = ticket.last_load.load_by
    if state.now < load_by:
        state.set_timer(ticket, load_by)
        return
    limit = f"did not finish within {in_seconds(state.settings.timeouts.load):.0f} s"
    loads.on_load_failed(state, ticket, limit, out_of_memory=False)
    reclaim.notify_holder(state, ticket.id, ticket.holder, Reason.FAILED)


def _tend_lease(state: CoreState, ticket: Ticket) -> None:
    """Gives a lease notice that its term ends, or that the arbiter shuts down."""
    if state.closing_by is not None:
        eviction.revoke(state, ticket, Reason.SHUTDOWN, None)
    elif state.now >= (told_at := leases.notice_given_at(ticket)):
        eviction.revoke(state, ticket, Reason.TERM, None)
    else:
        state.set_timer(ticket, told_at)


# -- shutdown (A20) --------------------------------------------------------------------------


def start_closing(state: CoreState) -> None:
    """Grants nothing more and refuses the queue (A20); idle models leave at once, the others as
    they fall idle."""
    if state.closing_by is not None:
        return
    state.closing_by = after(state.now, state.settings.timeouts.closing)
    state.timers.set(("closing", ""), state.closing_by)
    state.log(EventKind.CLOSING, waiting=len(state.queue))
    admission.refuse_all(state)
    for ticket in state.ledger.tickets(State.RESIDENT, State.ASLEEP):
        on_timer(state, ticket)


def end_closing(state: CoreState) -> None:
    """Kills what is still in use when the wait for it is over (A20)."""
    assert state.closing_by is not None
    for ticket in state.ledger.tickets(State.LOADING, State.RESIDENT, State.DRAINING, State.ASLEEP):
        reclaim.kill_and_notify(state, ticket, Reason.SHUTDOWN)


RULES: dict[str, Callable[[CoreState, str], None]] = {
    "ticket": on_ticket_timer,
    "holder": lambda state, name: heartbeats.on_timer(state, HolderId(name)),
    "node": lambda state, name: readings.on_timer(state, NodeId(name)),
    "pressure": pressure.on_timer,
    "restore": lambda state, _: failed_swaps.on_restore_timer(state),
    "scale": replica_targets.on_timer,
    "closing": lambda state, _: end_closing(state),
    "compaction": compaction.on_timer,
    "floors": lambda state, _: floors.enforce(state),
    "pins": lambda state, node: pins.cap_pins(state, NodeId(node)),
    "loading": lambda state, _: loading_share.watch_thrashing(state),
    "audit": audit,
    "queue": look_at_queue,
}
