"""The order in which the holders of a device's bytes would leave, cheapest first (SPEC C2, C3).

In front of every policy stands what none may turn round: nobody waits for it, it is idle, it is the
least urgent. A device with few tickets is priced anew each time; one with many keeps its order, in
which only those are priced again that have changed, and a few in turn, because prices drift.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from arbiter.ledger import Book, Entry, State
from arbiter.rules import urgency
from arbiter.rules.mind import Mind
from arbiter.rules.victims import COST_LEAST, Option
from arbiter.units import Span, TicketId
from arbiter.view import Candidate, Key

SCANNED_COUNT = 32  # a price takes about 4 us, so up to here the whole is priced in 0.13 ms
SWEPT_COUNT = 8  # priced again in turn with each look: of 10,000 each within 1,250 looks


class Ranking:
    """One large device's order."""

    def __init__(self) -> None:
        self._place: dict[TicketId, Key] = {}
        self._order: list[Key] = []  # a place ends with its ticket
        self._turn: list[TicketId] = []  # whose turn it is to be priced again

    def refresh(self, mind: Mind, book: Book) -> None:
        assert book.stale is not None
        changed, book.stale = book.stale, set()
        if not self._turn:
            self._turn = list(self._place)
        changed.update(self._turn[-SWEPT_COUNT:])
        del self._turn[-SWEPT_COUNT:]
        for ticket in sorted(changed):
            self._put(mind, book, ticket)

    def _put(self, mind: Mind, book: Book, ticket: TicketId) -> None:
        old = self._place.pop(ticket, None)
        if old is not None:
            del self._order[bisect_left(self._order, old)]
        if entry := book.entries.get(ticket):
            self._place[ticket] = place = option(mind, book, entry).place
            insort(self._order, place)

    def tickets(self) -> Iterator[TicketId]:
        return (place[-1] for place in self._order)


def in_order(mind: Mind, book: Book) -> Iterator[tuple[Entry, Option]]:
    """All who are charged on it, lawful or not, at today's price."""
    if len(book.entries) <= SCANNED_COUNT:
        book.stale = None
        mind.rankings.pop(book.device, None)
        priced = ((e, option(mind, book, e)) for e in book.entries.values())
        yield from sorted(priced, key=lambda pair: pair[1].place)
        return
    if book.stale is None:
        mind.rankings[book.device], book.stale = Ranking(), set(book.entries)
    ranking = mind.rankings[book.device]
    ranking.refresh(mind, book)
    for ticket in ranking.tickets():
        entry = book.entries[ticket]
        yield entry, option(mind, book, entry)


def option(mind: Mind, book: Book, entry: Entry) -> Option:
    urgent = urgency.of(mind, entry)
    freed_bytes = entry.charge(book.device)
    name = (entry.capability, entry.model)
    price = mind.policies.evict(
        Candidate(
            entry.ticket, entry.holder, entry.role_rank, freed_bytes, entry.inflight,
            entry.last_used, _reload(mind, entry), urgent,
            now=mind.now, budget_bytes=book.budget_bytes,
            recent_count=mind.rates.recent(name, mind.now),
            lasting_count=mind.lasting_rates.recent(name, mind.now),
            next_use=mind.foresight(*name, mind.now) if mind.foresight else None,
        )
    )  # fmt: skip
    rank = (entry.ticket in mind.line, entry.inflight > 0, -urgent, *price.rank)
    return Option(entry.ticket, freed_bytes, rank, max(COST_LEAST, price.cost_s))


def _reload(mind: Mind, entry: Entry) -> Span:
    """To have it back: a wake if it would fall asleep, else a load; 0 when never measured."""
    key = mind.key_of(entry)
    if entry.state is State.RESIDENT and entry.need.host_bytes and mind.estimates.can_sleep(key):
        if woken := mind.estimates.wake_time(key):
            return woken
    return mind.estimates.load_time(key, entry.need.weights_bytes)
