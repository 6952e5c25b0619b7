"""Keeps watermarks (C4): above the high one of a budget idle tickets leave, down to the low one; in
between nothing happens, so that each sleep or load does not cost another one.

Host RAM: shared copies that no engine uses leave first (D4); then the cheapest asleep tickets let
go of their copies, except the ticket that fell asleep last, whose sleep would have been in vain.

A device, where watermarks are switched on: only while a ticket waits for its bytes or wants to
grow, and only victims that may leave for the first of these.
"""

from collections.abc import Iterator

from arbiter.core.decisions import Reason
from arbiter.core.eviction.eligibility import may_leave, may_revoke
from arbiter.core.eviction.eviction import revoke
from arbiter.core.eviction.oversize import may_exceed_budget as may_exceed
from arbiter.core.eviction.ranking import effective_priority, ranked_victims
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.priced_victim import PricedVictim
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.settings import Watermarks
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets import quotas
from arbiter.core.tickets.budget import fraction_of
from arbiter.core.tickets.failed_swaps import note_evicted_for
from arbiter.core.tickets.lendable_devices import unpinned_bytes
from arbiter.core.tickets.reclaim import is_counted_on
from arbiter.core.types import DeviceKind


def enforce(state: CoreState, node: Node) -> None:
    """Enforces the watermarks of a node's devices, after everything that could be granted there
    was."""
    on_host = state.settings.host_marks
    on_device = state.settings.device_marks
    for device, spec in node.devices.items():
        if spec.kind is DeviceKind.HOST:
            _keep_host(state, state.ledger.books[device], on_host)
        elif on_device:
            _keep_device(state, state.ledger.books[device], on_device)


def _bytes_staying(book: DeviceAccount) -> int:
    """Returns the bytes of a budget that stay taken once all leaving tickets have left. Host RAM
    reserved for a draining ticket does not count, because that ticket may never sleep in it."""
    going = sum(t.charge(book.device) for t in book.leaving.values() if is_counted_on(t))
    return book.budget_bytes - book.free_bytes - going


def _is_above(taken: int, book: DeviceAccount, marks: Watermarks) -> bool:
    """Says whether so many bytes are above the high watermark of a budget."""
    return taken > fraction_of(book.budget_bytes, marks.high_fraction)


def _keep_host(state: CoreState, book: DeviceAccount, marks: Watermarks) -> None:
    """Keeps the watermarks of host RAM."""
    staying = _bytes_staying(book)
    if not _is_above(staying, book, marks):
        return
    missing = staying - fraction_of(book.budget_bytes, marks.low_fraction)
    ranked = list(ranked_victims(state, book))
    asleep = [(t, option) for t, option in ranked if t.state is State.ASLEEP]
    newest = max((t for t, _ in asleep), key=lambda t: (t.since, t.id), default=None)
    for ticket, option in [*(pair for pair in ranked if pair[0].is_host_copy), *asleep]:
        if missing > 0 and ticket is not newest and may_leave(state, ticket):
            missing -= option.freed_bytes
            revoke(state, ticket, Reason.FIT, None)


# -- on a device ----------------------------------------------------------------------------------


def _keep_device(state: CoreState, book: DeviceAccount, marks: Watermarks) -> None:
    """Keeps the watermarks of a device while a ticket asks for its bytes. What that ticket was
    promised, and is on its way back, is left out."""
    asking = _first_asking(state, book)
    if asking is None or not _is_above(book.budget_bytes - book.free_bytes, book, marks):
        return
    missing = _bytes_staying(book) - fraction_of(book.budget_bytes, marks.low_fraction)
    spare = quotas.ReserveSlack(state, book, asking.client.tenant)
    for ticket, option in list(_evictable(state, book, asking)):
        if missing > 0 and (worth := spare.take(ticket, option.freed_bytes)):
            missing -= worth
            if asking.id in state.queue:
                note_evicted_for(state, asking, ticket)
            revoke(state, ticket, Reason.SWAP, asking)


def _first_asking(state: CoreState, book: DeviceAccount) -> Ticket | None:
    """Returns the first ticket that asks for bytes of a device. Tickets that want to grow are in
    service already, so they come before the queue."""
    asking_ids = [*state.growing, *(w.request.ticket for w in state.queue.first(book.node, 1))]
    asking = (state.ledger.find(ticket_id) for ticket_id in asking_ids)
    on_node = (t for t in asking if t and t.node == book.node)
    return next((t for t in on_node if _could_use(state, t, book)), None)


def _could_use(state: CoreState, ticket: Ticket, book: DeviceAccount) -> bool:
    """Says whether a ticket could be granted bytes of this device."""
    if ticket.home:
        return book.device in ticket.home
    queued = state.queue.find(ticket.id)
    return may_exceed(ticket) or queued is None or queued.need_bytes <= unpinned_bytes(book)


def _evictable(
    state: CoreState, book: DeviceAccount, asking: Ticket
) -> Iterator[tuple[Ticket, PricedVictim]]:
    """Yields victims, cheapest first, none more urgent than the asker."""
    for ticket, option in ranked_victims(state, book):
        if ticket is asking or not may_leave(state, ticket):
            continue
        if asking.id not in state.queue:
            is_lawful = effective_priority(state, ticket) >= asking.priority
        else:
            is_lawful = may_revoke(state, ticket, asking, asking.priority)
        if is_lawful:
            yield ticket, option
