"""Orders the tickets charged on a device as they would leave, cheapest first (C2, C3).

Before the policy's price come three parts of the rank that no policy can turn round. A ticket for
which no request waits leaves before a ticket for which a request waits; of these an idle ticket
before a ticket in use; of these the less urgent first.

The order is kept from one search to the next. A ticket that has changed is priced again at once, as
is a ticket whose priority has faded; the rest are priced again in turn, because prices drift.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import chain
from math import ceil

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.priced_victim import PricedVictim
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.records.timers import Timers
from arbiter.core.state import CoreState
from arbiter.core.types import Priority
from arbiter.core.view import Candidate, Key, Price
from arbiter.units import SECOND, Instant, Span, TicketId, after, since

# In no other state is a ticket a victim (eligibility.is_evictable), so it is priced only for a
# reader that wants all: a victim that drains and the load in its place would cost 10 us each.
MAY_LEAVE = (State.RESIDENT, State.ASLEEP)  # a tuple: two comparisons take less than a hash
SWEPT_COUNT = 4  # priced again with a sweep, 6 us each
# Until then rates drift by less than a thousandth: a look soon after another is free.
SWEPT_EVERY = SECOND
# No price is older. Rates fade by a hundredth meanwhile; what the coming hours usually bring
# (usage_rates.HourlyUsage) jumps at the full hour, and an order may be as old as this then.
PRICED_FOR = Span(60 * SECOND)
# Nor is a price older than this by the clock of turnovers (reuse.ReuseLearner), on which prices
# drift with each load; it is small against reuse.SOON.
PRICED_FOR_TURNOVERS = 0.02
COST_LEAST_S = 1e-9  # what no request will miss still costs this, so that none leaves for nothing


class Ranking:
    """Keeps the tickets of one device in the order in which they would leave."""

    def __init__(self, evict: Callable[[Candidate], Price]) -> None:
        self.evict = evict  # whose order it is
        self._options: dict[TicketId, PricedVictim | None] = {}  # None: not priced, it stays anyway
        self._order: list[Key] = []  # their places; each ends with its ticket
        self._to_reprice: list[TicketId] = []  # round robin, the next at the end
        self._fading = Timers()
        self._looked: Instant | None = None
        self._swept = Instant(0)
        self._swept_turnovers = 0.0

    def refresh(self, state: CoreState, book: DeviceAccount) -> None:
        """Brings the order up to date: prices what has changed or faded, and the next few in
        turn."""
        changed = book.take_stale()
        if self._looked != state.now:
            changed.update(TicketId(name) for _, name in self._fading.due(state.now))
            changed.update(self._next_to_reprice(state))
            self._looked = state.now
        if 2 * len(changed) > len(self._order):
            self._reprice_most(state, book, sorted(changed))
            return
        for ticket_id in sorted(changed):
            self._reprice(state, book, ticket_id)

    def _next_to_reprice(self, state: CoreState) -> list[TicketId]:
        """Returns the tickets whose turn it is to be priced again, because prices drift with time
        and with turnovers."""
        count = len(self._options)
        unswept = since(self._swept, state.now)
        turned = state.usage.reuse.clock - self._swept_turnovers
        is_current = unswept < SWEPT_EVERY and not turned
        if is_current and not state.foresight:  # the future changes with every use
            return []
        self._swept = state.now
        self._swept_turnovers = state.usage.reuse.clock
        by_turnovers = ceil(count * turned / PRICED_FOR_TURNOVERS)
        due_count = max(SWEPT_COUNT, count * unswept // PRICED_FOR, by_turnovers)
        if due_count >= count or state.foresight:
            self._to_reprice = []
            return list(self._options)
        if not self._to_reprice:
            self._to_reprice = list(self._options)
        due = self._to_reprice[-due_count:]
        del self._to_reprice[-due_count:]
        return due

    def _reprice_most(self, state: CoreState, book: DeviceAccount, tickets: list[TicketId]) -> None:
        """Does what `_reprice` does for each of most tickets: one sort is less than a search for
        each old place and each new one."""
        for ticket_id in tickets:
            self._options.pop(ticket_id, None)
            self._price(state, book, ticket_id)
        self._order = sorted(option.place for option in self._options.values() if option)

    def _reprice(self, state: CoreState, book: DeviceAccount, ticket_id: TicketId) -> None:
        """Prices a ticket again and puts it into its place."""
        if old := self._options.pop(ticket_id, None):
            del self._order[bisect_left(self._order, old.place)]
        if priced := self._price(state, book, ticket_id):
            insort(self._order, priced.place)

    def _price(
        self, state: CoreState, book: DeviceAccount, ticket_id: TicketId
    ) -> PricedVictim | None:
        """Returns the price of a ticket as it is now; None where it has left the device, or may not
        leave."""
        ticket = book.tickets.get(ticket_id)
        if ticket is None:
            return None
        may_leave = ticket.state in MAY_LEAVE
        self._options[ticket_id] = priced = price_victim(state, book, ticket) if may_leave else None
        fades_at = priority_fades_at(state, ticket)
        if fades_at is not None and fades_at > state.now:
            self._fading.set(("ticket", ticket_id), fades_at)
        return priced

    def all(self, state: CoreState, book: DeviceAccount) -> Iterator[PricedVictim]:
        """Yields all tickets charged on the device, cheapest first."""
        for ticket_id in [
            ticket_id for ticket_id, option in self._options.items() if option is None
        ]:
            self._options[ticket_id] = priced = price_victim(state, book, book.tickets[ticket_id])
            insort(self._order, priced.place)
        return self._at(0, len(self._order))

    def no_more_urgent(self, priority: Priority) -> Iterator[PricedVictim]:
        """Yields the tickets that may leave, without those more urgent than `priority`: the idle,
        then those in use. Then it yields all for which a request waits, whatever their urgency,
        because of those the queue decides (eligibility.find_obstacle)."""
        order = self._order
        idle_end = bisect_left(order, ((False, False, 1 - priority),))
        busy = bisect_left(order, ((False, True),), idle_end)
        busy_end = bisect_left(order, ((False, True, 1 - priority),), busy)
        awaited = bisect_left(order, ((True,),), busy_end)
        return chain(self._at(0, idle_end), self._at(busy, busy_end), self._at(awaited, len(order)))

    def _at(self, first: int, end: int) -> Iterator[PricedVictim]:
        for at in range(first, end):
            option = self._options[self._order[at][-1]]
            assert option is not None
            yield option


def ranking(state: CoreState, book: DeviceAccount) -> Ranking:
    """Returns the order of a device as of now."""
    cached: Ranking | None = state.rankings.get(book.device)
    if cached is None or book.stale is None or cached.evict is not state.policies.evict:
        cached = state.rankings[book.device] = Ranking(state.policies.evict)
        book.begin_order()
    cached.refresh(state, book)
    return cached


def ranked_victims(state: CoreState, book: DeviceAccount) -> Iterator[tuple[Ticket, PricedVictim]]:
    """Yields all tickets charged on a device, lawful or not, with their prices."""
    options = ranking(state, book).all(state, book)
    return ((book.tickets[option.ticket], option) for option in options)


def victims_no_more_urgent(
    state: CoreState, book: DeviceAccount, priority: Priority
) -> Iterator[PricedVictim]:
    """Yields the priced tickets of a device that may have to yield to a request so urgent, lawful
    or not. None that loads or leaves is among them."""
    return ranking(state, book).no_more_urgent(priority)


def price_victim(state: CoreState, book: DeviceAccount, ticket: Ticket) -> PricedVictim:
    """Returns what losing a ticket costs, by the policy."""
    priority = effective_priority(state, ticket)
    freed_bytes = ticket.charge(book.device)
    name = ticket.model_name
    counts = state.usage.counts(name, state.now)
    role = state.policies.roles.get(ticket.role)
    price = state.policies.evict(
        Candidate(
            ticket.id,
            ticket.holder,
            ticket.role_rank,
            freed_bytes,
            ticket.inflight,
            ticket.last_used,
            reload_span(state, ticket),
            priority,
            state.now,  # by place from here on too: by name all of these take twice the time
            book.budget_bytes,
            counts.recent_count,
            counts.lasting_count,
            counts.usual_count,
            state.usage.reuse.reuse(name, counts),
            state.foresight(name, state.now) if state.foresight else None,
            role.evict_cost_s if role else 0.0,
        )
    )
    rank = (ticket.id in state.queue, ticket.inflight > 0, -priority, *price.rank)
    return PricedVictim(ticket.id, freed_bytes, rank, max(COST_LEAST_S, price.cost_s), price.why)


def reload_span(state: CoreState, ticket: Ticket) -> Span:
    """Returns how long it takes to have a ticket back: a wake if it would fall asleep, else a load;
    0 when never measured."""
    key = ticket.model_key
    if ticket.state is State.RESIDENT and ticket.need.host_bytes and state.estimates.can_sleep(key):
        if woken := state.estimates.wake_time(key):
            return woken
    return state.estimates.load_time(key, ticket.need.weights_bytes)


# -------------------------------------------------------------------------------------------------
# How urgent a model is (C2): as its last request, for its keep-warm seconds; then batch.


def effective_priority(state: CoreState, ticket: Ticket) -> Priority:
    """Returns the priority that counts now: that of the last request, or BATCH once it has
    faded."""
    fades_at = priority_fades_at(state, ticket)
    return ticket.priority if fades_at is None or state.now < fades_at else Priority.BATCH


def priority_fades_at(state: CoreState, ticket: Ticket) -> Instant | None:
    """Returns when a ticket begins to count as batch; None while it is in use. A model with
    unlimited keep-warm still falls to BATCH after `carry_most`, or it could never be evicted."""
    if ticket.inflight > 0:
        return None
    most = state.settings.carry_most
    return after(ticket.last_used, most if ticket.keep_warm < 0 else min(ticket.keep_warm, most))
