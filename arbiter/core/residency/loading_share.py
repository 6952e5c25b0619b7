"""Watches the share of its time that a device spends loading (C13).

A device above the bound is thrashing. Its models stay longer before a request as urgent may take
their place: as many times their own load as keep loads within the bound
(`protection.min_residency_ends`).
"""

from arbiter.core.decisions import EventKind
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.lendable_devices import COMPUTE
from arbiter.units import SECOND, Instant, Span, after

LOOKED_EVERY = Span(10 * SECOND)  # a share of ten minutes moves by less than 0.02 meanwhile


def loading_fraction(state: CoreState, book: DeviceAccount, now: Instant) -> float:
    """Returns the share of the last ten minutes in which a device was loading."""
    under_way = [ticket.since for ticket in book.loading.values()]
    return state.loading_times.fraction(book.device, now, under_way)


def watch(state: CoreState) -> None:
    """Notes which devices are thrashing, and logs when that changes."""
    for book in state.ledger.books.values():
        _watch_device(state, book)


def watch_loaded(state: CoreState, ticket: Ticket) -> None:
    """Notes whether the devices on which a load has ended are thrashing."""
    for device in ticket.home:
        if book := state.ledger.books.get(device):
            _watch_device(state, book)


def watch_thrashing(state: CoreState) -> None:
    """Notes whether devices that were thrashing still are: time alone can end it."""
    for device in list(state.thrashing):
        _watch_device(state, state.ledger.books[device])


def _watch_device(state: CoreState, book: DeviceAccount) -> None:
    """Notes whether a device is thrashing, and logs when that changes."""
    if book.kind not in COMPUTE:
        return
    device, most = book.device, state.settings.loading_most_fraction
    fraction = loading_fraction(state, book, state.now)
    was_thrashing = device in state.thrashing
    if fraction > most:
        state.thrashing[device] = fraction
        state.timers.set(("loading", ""), after(state.now, LOOKED_EVERY))
    else:
        state.thrashing.pop(device, None)
    if was_thrashing != (fraction > most):
        state.mark_dirty(book.node)  # who may leave, and when, depends on it
        state.log(EventKind.LOADING_SHARE, device=device, fraction=round(fraction, 3), most=most)
