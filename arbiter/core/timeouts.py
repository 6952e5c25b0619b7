"""What time alone brings about: each alarm that rings leads to the rule of its subject."""

from collections.abc import Callable

from arbiter.core.decisions import Reason
from arbiter.core.eviction import eviction, pressure
from arbiter.core.queue import admission, grants
from arbiter.core.records.ledger import audit as audit_books
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.reports import replica_targets
from arbiter.core.residency import floors, heartbeats, readings
from arbiter.core.state import CoreState
from arbiter.core.tickets import companions, leases, loads, reclaim
from arbiter.core.types import Floor
from arbiter.core.view import IdleModel
from arbiter.units import HolderId, NodeId, TicketId, after, in_seconds


def fire_due(mind: CoreState) -> None:
    """Looks at everything whose time has come. A subject not yet due sets its alarm again."""
    for kind, name in mind.alarms.due(mind.now):
        RULES[kind](mind, name)


def on_ticket_timer(mind: CoreState, name: str) -> None:
    if entry := mind.ledger.find(TicketId(name)):
        on_timer(mind, entry)


def look_at_queue(mind: CoreState, node: str) -> None:
    """Something there has become lawful by time alone."""
    if node:
        mind.ledger.changed.add(NodeId(node))


def audit(mind: CoreState, _: str) -> None:
    """All the books, and every line: level-triggered, should a reason to look ever be missed."""
    audit_books(mind.ledger)
    for entry in mind.ledger.entries(State.RESIDENT, State.ASLEEP):
        if ("ticket", entry.ticket) not in mind.alarms:
            mind.watch(entry, mind.now)
    mind.ledger.changed.update(mind.line.nodes)
    mind.alarms.set(("audit", ""), after(mind.now, mind.settings.terms.audit))


def on_timer(mind: CoreState, entry: Ticket) -> None:
    if entry.ticket in mind.line:
        admission.reject_expired(mind, entry)
        grants.age(mind, entry)
    if entry.lives_in:
        return companions.on_timer(mind, entry)
    match entry.state:
        case State.LOADING:
            _tend_loading(mind, entry)
        case State.RESIDENT if entry.lease:
            _tend_lease(mind, entry)
        case State.RESIDENT | State.ASLEEP:
            on_idle(mind, entry)
        case State.DRAINING:
            eviction.on_draining_timer(mind, entry)
        case State.RECLAIMING:
            reclaim.on_timer(mind, entry)


def _tend_loading(mind: CoreState, entry: Ticket) -> None:
    """A load that hangs is ended."""
    if mind.now < entry.load_by:
        mind.watch(entry, entry.load_by)
        return
    limit = f"did not finish within {in_seconds(mind.settings.terms.load):.0f} s"
    loads.on_load_failed(mind, entry, limit, out_of_memory=False)
    reclaim.notify_holder(mind, entry.ticket, entry.holder, Reason.FAILED)


def _tend_lease(mind: CoreState, entry: Ticket) -> None:
    """It is told in time that its term ends, and at shutdown."""
    if mind.closing_by is not None:
        eviction.revoke(mind, entry, Reason.SHUTDOWN, None)
    elif mind.now >= (told_at := leases.notice_given_at(entry)):
        eviction.revoke(mind, entry, Reason.TERM, None)
    else:
        mind.watch(entry, told_at)


def on_idle(mind: CoreState, entry: Ticket) -> None:
    """Keep-warm (SPEC C8), and shutdown: an idle model goes with nobody asking. One that is in use
    sets the alarm when a heartbeat says that it is no longer."""
    if entry.inflight > 0 or entry.ticket in mind.line:
        return
    if mind.closing_by is not None:
        eviction.revoke(mind, entry, Reason.SHUTDOWN, None)
        return
    if floors.apply_lowered_floor(mind, entry):
        return
    if entry.state is State.ASLEEP and floors.floor_of(mind, entry) is Floor.HOST:
        return
    goes_at = mind.policies.keep_warm(IdleModel(entry.last_used, entry.keep_warm, entry.pinned))
    if goes_at is None:
        return
    goes_at = max(goes_at, entry.refused_until)
    if mind.now >= goes_at:
        eviction.revoke(mind, entry, Reason.IDLE, None)
    else:
        mind.watch(entry, goes_at)


# -- shutdown (SPEC A20) --------------------------------------------------------------------------


def start_closing(mind: CoreState) -> None:
    """Grants nothing more and refuses the line; idle models go, the rest as they fall idle."""
    if mind.closing_by is not None:
        return
    mind.closing_by = after(mind.now, mind.settings.terms.closing)
    mind.alarms.set(("closing", ""), mind.closing_by)
    mind.tell("closing", waiting=len(mind.line))
    admission.refuse_all(mind)
    for entry in mind.ledger.entries(State.RESIDENT, State.ASLEEP):
        on_timer(mind, entry)


def end_closing(mind: CoreState) -> None:
    """The bound on waiting for what is in use."""
    assert mind.closing_by is not None
    for entry in mind.ledger.entries(State.LOADING, State.RESIDENT, State.DRAINING, State.ASLEEP):
        if entry.lives_in is None:
            reclaim.kill_and_notify(mind, entry, Reason.SHUTDOWN)


def unload_asked(mind: CoreState, ticket: TicketId) -> None:
    """By hand. In use it stays, and says so."""
    entry = mind.live(ticket, State.RESIDENT, State.ASLEEP)
    if entry is None:
        return
    if entry.lives_in or entry.inflight > 0 or entry.ticket in mind.line:
        mind.tell("unload_refused", entry, inflight=entry.inflight)
    else:
        eviction.revoke(mind, entry, Reason.MANUAL, None)


RULES: dict[str, Callable[[CoreState, str], None]] = {
    "ticket": on_ticket_timer,
    "holder": lambda mind, name: heartbeats.on_timer(mind, HolderId(name)),
    "node": lambda mind, name: readings.on_timer(mind, NodeId(name)),
    "pressure": pressure.on_timer,
    "restore": lambda mind, _: loads.on_restore_timer(mind),
    "scale": replica_targets.on_timer,
    "closing": lambda mind, _: end_closing(mind),
    "floors": lambda mind, _: floors.enforce(mind),
    "audit": audit,
    "line": look_at_queue,
}
