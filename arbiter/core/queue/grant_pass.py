"""One pass over a node's queue: which tickets are tried, in order, and when to stop (SPEC C6)."""

from arbiter.core.eviction import watermarks
from arbiter.core.eviction.eligibility import min_residency_ends
from arbiter.core.eviction.ranking import priority_fades_at
from arbiter.core.queue.grants import place, place_gang, return_to_service, wake
from arbiter.core.queue.pass_state import GrantPass
from arbiter.core.records.request_queue import QueueEntry, urgency_of
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets import quotas
from arbiter.core.tickets.device_limits import compute_books, on_demand_of, readable_devices
from arbiter.units import SECOND, Bytes, Instant, Span, after

SCANNED_COUNT = 32  # tickets on a device, looked through for the next moment at 1 us each


def run(mind: CoreState) -> None:
    if not mind.is_settled or mind.closing_by is not None:
        return
    quotas.requeue_relieved_tenants(mind)
    for name in mind.take_changed():
        node = mind.nodes.get(name)
        if node is not None:  # else its agent has not introduced itself yet
            while not mind.line.is_empty(name) and not _run_node(mind, node):
                pass  # somebody became due by a grant: each turn grants one more
            watermarks.enforce(mind, node)


def _run_node(mind: CoreState, node: Node) -> bool:
    """Once through the line; False: look again, from the front."""
    books, reserves = compute_books(mind, node), quotas.reserves(mind)
    most = max((on_demand_of(b) for b in books), default=Bytes(0))
    look = GrantPass(
        node,
        {b.device: b for b in readable_devices(mind, node)},
        max((b.budget_bytes for b in books), default=Bytes(0)),
        most,
        Bytes(most - sum(reserves.values())),
        reserves,
        unwalked=dict(mind.line.crowd(node.node).urgencies),
    )
    for waiting in mind.line.walk(node.node):
        look.unwalked[urgency_of(waiting.waiter)] -= 1
        if not look.passes_over(waiting, mind.estimates.version):
            _try_entry(mind, look, waiting)
        if look.is_over:
            return False
        if look.is_rest_hopeless(waiting, mind):
            break
    else:
        mind.line.weigh(node.node)  # the least of them may have gone
    if look.is_waiting:
        _set_next_pass(mind, look)
    return True


def _try_entry(mind: CoreState, look: GrantPass, waiting: QueueEntry) -> None:
    entry = mind.ledger.find(waiting.waiter.ticket)
    if entry is None or entry.ticket not in mind.line:
        return  # turned away or granted with its gang
    if not mind.is_silent(entry.holder):  # else it keeps its place; a grant would only lie there
        _try_ticket(mind, look, entry, waiting)


def _try_ticket(mind: CoreState, look: GrantPass, entry: Ticket, waiting: QueueEntry) -> None:
    if entry.state is State.QUEUED:
        if look.books and look.held.issuperset(look.books):
            look.is_waiting = True
        elif entry.gang:
            place_gang(mind, look, entry, waiting)
        else:
            place(mind, look, entry, waiting)
    elif entry.state is State.ASLEEP:
        wake(mind, look, entry, waiting)
    elif entry.state is State.RESIDENT:
        return_to_service(mind, entry)


# -- later ----------------------------------------------------------------------------------------


def _set_next_pass(mind: CoreState, look: GrantPass) -> None:
    """Minimum residency, refusals and urgency end by themselves. Of a device with very many tickets
    one does surely soon."""
    moments: list[Instant] = []
    for book in look.books.values():
        if len(book.entries) > SCANNED_COUNT:
            moments.append(after(mind.now, Span(SECOND)))
            continue
        for entry in book.entries.values():
            fades_at = priority_fades_at(mind, entry) or mind.now
            moments += (min_residency_ends(mind, entry), entry.refused_until, fades_at)
    if later := [at for at in moments if at > mind.now]:
        mind.alarms.set(("line", look.node.node), min(later))
