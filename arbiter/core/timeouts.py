"""What time alone brings about: each alarm that rings leads to the rule of its subject."""

from collections.abc import Callable

from arbiter.core.decisions import Reason
from arbiter.core.eviction import eviction, pressure
from arbiter.core.queue import admission, grants
from arbiter.core.records.ledger import audit as audit_books
from arbiter.core.records.ticket import Entry, State
from arbiter.core.reports import replica_targets
from arbiter.core.residency import floors, heartbeats, readings
from arbiter.core.state import Mind
from arbiter.core.tickets import companions, leases, loads, reclaim
from arbiter.core.types import Floor
from arbiter.core.view import Idler
from arbiter.units import HolderId, NodeId, TicketId, after, in_seconds


def ring(mind: Mind) -> None:
    """Looks at everything whose time has come. A subject not yet due sets its alarm again."""
    for kind, name in mind.alarms.due(mind.now):
        RULES[kind](mind, name)


def tend_ticket(mind: Mind, name: str) -> None:
    if entry := mind.ledger.find(TicketId(name)):
        tend(mind, entry)


def look_at_line(mind: Mind, node: str) -> None:
    """Something there has become lawful by time alone."""
    if node:
        mind.ledger.changed.add(NodeId(node))


def audit(mind: Mind, _: str) -> None:
    """All the books, and every line: level-triggered, should a reason to look ever be missed."""
    audit_books(mind.ledger)
    for entry in mind.ledger.entries(State.RESIDENT, State.ASLEEP):
        if ("ticket", entry.ticket) not in mind.alarms:
            mind.watch(entry, mind.now)
    mind.ledger.changed.update(mind.line.nodes)
    mind.alarms.set(("audit", ""), after(mind.now, mind.settings.terms.audit))


def tend(mind: Mind, entry: Entry) -> None:
    if entry.ticket in mind.line:
        admission.expire(mind, entry)
        grants.ripen(mind, entry)
    if entry.lives_in:
        return companions.tend(mind, entry)
    match entry.state:
        case State.LOADING:
            _tend_loading(mind, entry)
        case State.RESIDENT if entry.lease:
            _tend_lease(mind, entry)
        case State.RESIDENT | State.ASLEEP:
            tend_idle(mind, entry)
        case State.DRAINING:
            eviction.tend_draining(mind, entry)
        case State.RECLAIMING:
            reclaim.tend(mind, entry)


def _tend_loading(mind: Mind, entry: Entry) -> None:
    """A load that hangs is ended."""
    if mind.now < entry.load_by:
        mind.watch(entry, entry.load_by)
        return
    limit = f"did not finish within {in_seconds(mind.settings.terms.load):.0f} s"
    loads.broke(mind, entry, limit, out_of_memory=False)
    reclaim.notify(mind, entry.ticket, entry.holder, Reason.FAILED)


def _tend_lease(mind: Mind, entry: Entry) -> None:
    """It is told in time that its term ends, and at shutdown."""
    if mind.closing_by is not None:
        eviction.revoke(mind, entry, Reason.SHUTDOWN, None)
    elif mind.now >= (told_at := leases.told_at(entry)):
        eviction.revoke(mind, entry, Reason.TERM, None)
    else:
        mind.watch(entry, told_at)


def tend_idle(mind: Mind, entry: Entry) -> None:
    """Keep-warm (SPEC C8), and shutdown: an idle model goes with nobody asking. One that is in use
    sets the alarm when a heartbeat says that it is no longer."""
    if entry.inflight > 0 or entry.ticket in mind.line:
        return
    if mind.closing_by is not None:
        eviction.revoke(mind, entry, Reason.SHUTDOWN, None)
        return
    if floors.settle(mind, entry):
        return
    if entry.state is State.ASLEEP and floors.of(mind, entry) is Floor.HOST:
        return
    goes_at = mind.policies.keep_warm(Idler(entry.last_used, entry.keep_warm, entry.pinned))
    if goes_at is None:
        return
    goes_at = max(goes_at, entry.refused_until)
    if mind.now >= goes_at:
        eviction.revoke(mind, entry, Reason.IDLE, None)
    else:
        mind.watch(entry, goes_at)


# -- shutdown (SPEC A20) --------------------------------------------------------------------------


def start_closing(mind: Mind) -> None:
    """Grants nothing more and refuses the line; idle models go, the rest as they fall idle."""
    if mind.closing_by is not None:
        return
    mind.closing_by = after(mind.now, mind.settings.terms.closing)
    mind.alarms.set(("closing", ""), mind.closing_by)
    mind.tell("closing", waiting=len(mind.line))
    admission.refuse_all(mind)
    for entry in mind.ledger.entries(State.RESIDENT, State.ASLEEP):
        tend(mind, entry)


def end_closing(mind: Mind) -> None:
    """The bound on waiting for what is in use."""
    assert mind.closing_by is not None
    for entry in mind.ledger.entries(State.LOADING, State.RESIDENT, State.DRAINING, State.ASLEEP):
        if entry.lives_in is None:
            reclaim.take(mind, entry, Reason.SHUTDOWN)


def unload_asked(mind: Mind, ticket: TicketId) -> None:
    """By hand. In use it stays, and says so."""
    entry = mind.live(ticket, State.RESIDENT, State.ASLEEP)
    if entry is None:
        return
    if entry.lives_in or entry.inflight > 0 or entry.ticket in mind.line:
        mind.tell("unload_refused", entry, inflight=entry.inflight)
    else:
        eviction.revoke(mind, entry, Reason.MANUAL, None)


RULES: dict[str, Callable[[Mind, str], None]] = {
    "ticket": tend_ticket,
    "holder": lambda mind, name: heartbeats.tend(mind, HolderId(name)),
    "node": lambda mind, name: readings.tend(mind, NodeId(name)),
    "pressure": pressure.tend,
    "restore": lambda mind, _: loads.tend_restores(mind),
    "scale": replica_targets.tend,
    "closing": lambda mind, _: end_closing(mind),
    "floors": lambda mind, _: floors.keep(mind),
    "audit": audit,
    "line": look_at_line,
}
