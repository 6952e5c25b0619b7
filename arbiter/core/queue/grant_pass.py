"""One pass over a node's queue: which tickets are tried, in order, and when to stop (C6)."""

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


def run(state: CoreState) -> None:
    if not state.is_settled or state.closing_by is not None:
        return
    quotas.requeue_relieved_tenants(state)
    for name in state.take_dirty_nodes():
        node = state.nodes.get(name)
        if node is not None:  # else its agent has not introduced itself yet
            while not state.queue.is_empty(name) and not _run_node(state, node):
                pass  # somebody became due by a grant: each turn grants one more
            watermarks.enforce(state, node)


def _run_node(state: CoreState, node: Node) -> bool:
    """Once through the line; False: look again, from the front."""
    books, reserves = compute_books(state, node), quotas.reserves(state)
    most = max((on_demand_of(b) for b in books), default=Bytes(0))
    pass_ = GrantPass(
        node,
        {b.device: b for b in readable_devices(state, node)},
        max((b.budget_bytes for b in books), default=Bytes(0)),
        most,
        Bytes(most - sum(reserves.values())),
        reserves,
        unwalked=dict(state.queue.stats(node.node).urgencies),
    )
    for waiting in state.queue.walk(node.node):
        pass_.unwalked[urgency_of(waiting.request)] -= 1
        if not pass_.can_skip(waiting, state.estimates.version):
            _try_entry(state, pass_, waiting)
        if pass_.restart_needed:
            return False
        if pass_.can_stop(waiting, state):
            break
    else:
        state.queue.weigh(node.node)  # the least of them may have gone
    if pass_.is_waiting:
        _set_next_pass(state, pass_)
    return True


def _try_entry(state: CoreState, pass_: GrantPass, waiting: QueueEntry) -> None:
    entry = state.ledger.find(waiting.request.ticket)
    if entry is None or entry.ticket not in state.queue:
        return  # turned away or granted with its gang
    if not state.is_silent(entry.holder):  # else it keeps its place; a grant would only lie there
        _try_ticket(state, pass_, entry, waiting)


def _try_ticket(state: CoreState, pass_: GrantPass, entry: Ticket, waiting: QueueEntry) -> None:
    if entry.state is State.QUEUED:
        if pass_.books and pass_.reserved_devices.issuperset(pass_.books):
            pass_.is_waiting = True
        elif entry.gang:
            place_gang(state, pass_, entry, waiting)
        else:
            place(state, pass_, entry, waiting)
    elif entry.state is State.ASLEEP:
        wake(state, pass_, entry, waiting)
    elif entry.state is State.RESIDENT:
        return_to_service(state, entry)


# -- later ----------------------------------------------------------------------------------------


def _set_next_pass(state: CoreState, pass_: GrantPass) -> None:
    """Minimum residency, refusals and urgency end by themselves. Of a device with very many tickets
    one does surely soon."""
    moments: list[Instant] = []
    for book in pass_.books.values():
        if len(book.entries) > SCANNED_COUNT:
            moments.append(after(state.now, Span(SECOND)))
            continue
        for entry in book.entries.values():
            fades_at = priority_fades_at(state, entry) or state.now
            moments += (min_residency_ends(state, entry), entry.declined_until, fades_at)
    if later := [at for at in moments if at > state.now]:
        state.timers.set(("queue", pass_.node.node), min(later))
