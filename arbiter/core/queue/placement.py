"""Says where on its node a ticket could go, best first, and how much it would be granted (C9)."""

from collections.abc import Iterable

from arbiter.core.eviction import pressure
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.lendable_devices import unpinned_bytes
from arbiter.core.view import PlacementOption
from arbiter.units import Bytes, DeviceId


def devices_for(
    state: CoreState, books: Iterable[DeviceAccount], ticket: Ticket, need: Bytes
) -> list[DeviceId]:
    """Returns the devices of `books` that could ever hold a ticket of `need` bytes and on which
    pressure lets its load begin, best first by the policy."""
    able = [
        book
        for book in books
        if need <= unpinned_bytes(book) and not pressure.is_closed_to(state, ticket, book.device)
    ]
    if len(able) < 2:  # nothing to order, as on most nodes
        return [book.device for book in able]
    last = state.last_home.get((ticket.node, ticket.model_name))
    options = [
        PlacementOption(
            b.device,
            need,
            b.free_bytes,
            copies_count=b.copies[ticket.model_name],
            tickets_count=len(b.tickets),
            was_home=b.device == last,
        )
        for b in able
    ]
    return [option.device for option in sorted(options, key=state.policies.place)]


def most_unpinned_bytes(books: Iterable[DeviceAccount]) -> Bytes:
    """Returns the most that waiting can ever bring a ticket on any one of these devices."""
    return max((unpinned_bytes(book) for book in books), default=Bytes(0))


def estimated_bytes(state: CoreState, ticket: Ticket, most: Bytes) -> Bytes:
    """Returns what a ticket will be granted. An estimate that was learned, from a failure for
    memory or from a peak with its headroom, is cut to `most`, which `most_unpinned_bytes` returned:
    there is nothing beyond it to try, and the model has run there before."""
    estimate = state.estimates.size(ticket.model_key, ticket.need, ticket.need_is_explicit)
    if estimate.source in ("corrected", "learned") and most >= ticket.need.device_bytes:
        return min(estimate.device_bytes, most)
    return estimate.device_bytes
