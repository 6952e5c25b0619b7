"""Explains why a ticket waits, and why a victim was chosen, with the numbers (K3).

Reads the state and changes nothing. Every reason comes from the rule itself: `eligibility` says
which tickets may not be revoked, `ranking` at what price, `eviction_history` what was weighed then.
"""

from dataclasses import dataclass

from arbiter.core.decisions import Reason
from arbiter.core.eviction import pressure
from arbiter.core.eviction.eviction import returning_bytes, waits_for_cheaper_until
from arbiter.core.eviction.obstacle_text import obstacle_text
from arbiter.core.eviction.ranking import MAY_LEAVE, price_victim
from arbiter.core.eviction.waste import compaction_obstacle, wasted_bytes
from arbiter.core.queue import gangs, hours, placement
from arbiter.core.records.eviction_history import EvictionRecord, ScoredVictim, in_words
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.priced_victim import PricedVictim
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import quotas
from arbiter.core.tickets.exclusion import excluded_by
from arbiter.core.tickets.lendable_devices import compute_books
from arbiter.core.types import Priority
from arbiter.errors import UnknownTicket
from arbiter.units import Bytes, DeviceId, Instant, Span, TicketId, human, in_seconds, since


@dataclass(frozen=True, slots=True)
class ChargedTicket:
    """Describes a ticket charged on a device that is short."""

    ticket: TicketId
    model: str
    state: str
    charged_bytes: Bytes
    inflight: int
    idle: Span
    rank: tuple[str, ...]
    cost_s: float
    obstacle: str | None  # why it may not make room for this ticket; None: it may
    why: str = ""  # what its cost comes from, in words; empty where the policy does not say


@dataclass(frozen=True, slots=True)
class Shortage:
    """Describes one device that the ticket could go to."""

    device: DeviceId
    need_bytes: Bytes
    free_bytes: Bytes
    coming_bytes: Bytes  # asked for or being reclaimed already
    short_bytes: Bytes  # what is missing beyond those; 0: it is on its way
    foreign_bytes: Bytes
    kept_bytes: Bytes  # of what is free or on its way back, reserved for other tenants
    charged_tickets: tuple[ChargedTicket, ...]  # the cheapest to lose first
    leavable_bytes: Bytes  # what those of them that may leave would give it
    cheaper_in: Span  # until cheaper ones may leave, for which it waits; 0: it waits for none


@dataclass(frozen=True, slots=True)
class PastEviction:
    """Describes an eviction that the ticket had to do with."""

    ago: Span
    part: str  # asked, went or spared
    waiting: TicketId
    waiting_model: str
    device: DeviceId
    short_bytes: Bytes
    policy: str
    weighed: tuple[ScoredVictim, ...]
    is_compaction: bool = False  # what went is loaded again, smaller


@dataclass(frozen=True, slots=True)
class Explanation:
    """Says why a ticket waits or why it left, in numbers and in sentences."""

    ticket: TicketId
    model: str
    state: str
    in_state: Span
    ahead: tuple[TicketId, ...]  # before it in its node's queue; empty when it does not wait
    shortages: tuple[Shortage, ...]
    past: tuple[PastEviction, ...]  # newest first
    sentences: tuple[str, ...]  # the same for a person, a sentence each


def explain(state: CoreState, ticket_id: TicketId, now: Instant) -> Explanation:
    """Returns the explanation of a ticket. Raises UnknownTicket for a ticket that is neither on the
    books nor remembered."""
    ticket = state.ledger.find(ticket_id)
    past = tuple(_past(choice, ticket_id, now) for choice in state.evictions.about(ticket_id))[::-1]
    if ticket is None:
        return _closed(state, ticket_id, past)
    ahead, shortages = _waiting(state, ticket) if ticket_id in state.queue else ((), ())
    sentences = (
        *_current_sentences(state, ticket, ahead, shortages, now),
        *(_eviction_sentence(p, ticket_id) for p in past),
    )
    in_state = since(ticket.since, now)
    return Explanation(
        ticket_id, ticket.model, ticket.state.value, in_state, ahead, shortages, past, sentences
    )


def _closed(state: CoreState, ticket_id: TicketId, past: tuple[PastEviction, ...]) -> Explanation:
    """Returns the explanation of a ticket that is off the books. Raises UnknownTicket where nothing
    is remembered of it."""
    answer = state.answers.get(ticket_id)
    if answer is None and not past:
        raise UnknownTicket(ticket_id)
    model = next((w.model for p in past for w in p.weighed if w.ticket == ticket_id), "")
    last = (f"It is closed: {answer}.",) if answer else ("It is closed.",)
    sentences = (*last, *(_eviction_sentence(p, ticket_id) for p in past))
    return Explanation(ticket_id, model, State.CLOSED.value, Span(0), (), (), past, sentences)


# -- now ------------------------------------------------------------------------------------------


def _waits_for_cheaper(
    state: CoreState,
    book: DeviceAccount,
    ticket: Ticket,
    short: Bytes,
    priced: list[tuple[PricedVictim, Ticket]],
) -> Span:
    """Returns for how long it waits for cheaper victims. The prices are those of this reading: the
    device's own order of victims is renewed by what asks for them, and no reading may do that."""
    priority = _asker_priority(state, ticket)
    victims = [o for o, t in priced if t.state in MAY_LEAVE]
    until = short and waits_for_cheaper_until(state, book, ticket, short, priority, victims)
    return since(state.now, until) if until else Span(0)


def _waiting(state: CoreState, ticket: Ticket) -> tuple[tuple[TicketId, ...], tuple[Shortage, ...]]:
    """Returns the tickets before a queued ticket, and what it lacks on each device that it could go
    to."""
    tickets = [w.request.ticket for w in state.queue.at(ticket.node)]  # it competes with these only
    ahead = tuple(tickets[: tickets.index(ticket.id)])
    node = state.nodes.get(ticket.node)
    books = compute_books(state, node) if node else []
    needs = _needs(state, ticket, books)
    return ahead, tuple(
        _shortage(state, ticket, b, needs[b.device]) for b in books if b.device in needs
    )


def _needs(state: CoreState, ticket: Ticket, books: list[DeviceAccount]) -> Sizes:
    """Returns what a queued ticket needs on each device that it may go to: on all of them where it
    wakes, or is larger than any one; else on one of them."""
    if ticket.home:  # it wakes where its process lives; some of that is charged already
        return {d: Bytes(max(0, size - ticket.charge(d))) for d, size in ticket.home.items()}
    need = placement.estimated_bytes(state, ticket, placement.most_unpinned_bytes(books))
    most = quotas.at_most(state, ticket.client.tenant, books)
    is_one = need <= max(most.values(), default=need)
    several = None if is_one else gangs.split(books, need, ticket.split, most)
    return several or {book.device: need for book in books}


def _shortage(state: CoreState, ticket: Ticket, book: DeviceAccount, need: Bytes) -> Shortage:
    """Returns what a queued ticket lacks on a device, and what each other ticket there holds."""
    coming = returning_bytes(book)
    priority = _asker_priority(state, ticket)
    tenant = ticket.client.tenant
    reserved_bytes = quotas.reserved_for_others(quotas.reserves(state), book, tenant, has_left=True)
    short = Bytes(max(0, need - book.free_bytes - coming + reserved_bytes))
    others = (t for t in book.tickets.values() if t is not ticket)
    priced = sorted(
        ((price_victim(state, book, t), t) for t in others), key=lambda pair: pair[0].place
    )
    charged_tickets = tuple(
        _charged_ticket(state, t, book.device, o, obstacle_text(state, t, ticket, priority))
        for o, t in priced
    )
    spare = quotas.ReserveSlack(state, book, ticket.client.tenant)
    lawful = (book.tickets[x.ticket] for x in charged_tickets if x.obstacle is None)
    leavable = Bytes(sum(spare.take(t, t.charge(book.device)) for t in lawful))
    return Shortage(
        book.device,
        need,
        book.free_bytes,
        coming,
        short,
        book.foreign_bytes,
        reserved_bytes,
        charged_tickets,
        leavable,
        _waits_for_cheaper(state, book, ticket, short, priced),
    )


def _charged_ticket(
    state: CoreState, ticket: Ticket, device: DeviceId, option: PricedVictim, obstacle: str | None
) -> ChargedTicket:
    """Describes a ticket on a device that is short, with what losing it costs and why it may
    stay."""
    return ChargedTicket(
        ticket.id,
        ticket.model,
        ticket.state.value,
        ticket.charge(device),
        ticket.inflight,
        Span(0) if ticket.inflight else since(ticket.last_used, state.now),
        tuple(map(str, option.rank)),
        option.cost_s,
        obstacle,
        in_words(option.why),
    )


def _asker_priority(state: CoreState, ticket: Ticket) -> Priority:
    """Returns the priority with which a ticket asks: an aged ticket asks with that of the most
    urgent it holds up."""
    queued = state.queue.find(ticket.id)
    assert queued is not None
    held_up = state.queue.at(ticket.node) if queued.is_aged else ()
    return min([queued.request.priority, *(w.request.priority for w in held_up if not w.is_held)])


def _current_sentences(
    state: CoreState,
    ticket: Ticket,
    ahead: tuple[TicketId, ...],
    shortages: tuple[Shortage, ...],
    now: Instant,
) -> list[str]:
    """Says in what state a ticket is, and all that keeps it there."""
    for_s = in_seconds(since(ticket.since, now))
    sentences = [f"{ticket.model} ({ticket.id}) is {ticket.state.value} for {for_s:.1f} s."]
    sentences += _waste_sentences(state, ticket)
    sentences += _hours_sentences(state, ticket, now)
    if ticket.id not in state.queue:
        return sentences
    if not state.is_settled:
        sentences.append("Nothing is granted yet: holders of the last epoch are waited for.")
    if state.is_silent(ticket.holder):
        sentences.append(_silence_sentence(state, ticket, now))
    tenant = ticket.client.tenant
    if too_much := quotas.over_limit(state, tenant, _needs_bytes(state, ticket)):
        sentences.append(f"With it {tenant} would hold {human(too_much)} more than it may have.")
    node = state.nodes.get(ticket.node)
    if node is not None and node.may_gain_devices:
        size = "until they do, no ticket is refused for its size"
        sentences.append(f"Devices of {ticket.node} have not answered yet: {size}.")
    if ahead:
        sentences.append(f"{len(ahead)} wait before it: {', '.join(ahead[:5])}.")
    sentences += _exclusion_sentences(state, ticket)
    sentences += [
        f"No load begins on {s.device} while memory there is critical."
        for s in shortages
        if pressure.is_closed_to(state, ticket, s.device)
    ]
    return sentences + _shortages_sentences(ticket, shortages)


def _needs_bytes(state: CoreState, ticket: Ticket) -> Bytes:
    """Returns what a queued ticket will be charged beyond what it is charged now."""
    if ticket.home:
        return Bytes(sum(size - ticket.charge(d) for d, size in ticket.home.items()))
    node = state.nodes.get(ticket.node)
    books = compute_books(state, node) if node else []
    return placement.estimated_bytes(state, ticket, placement.most_unpinned_bytes(books))


def _exclusion_sentences(state: CoreState, ticket: Ticket) -> list[str]:
    """Says which models of its exclusion group keep a queued ticket waiting, whatever is free
    (A11)."""
    if ticket.node not in state.nodes:
        return []
    others = excluded_by(state, ticket.node, ticket.role, ticket.model_name)
    only = f"of role {ticket.role} one model is awake on a node"
    return [
        f"It waits until {t.model} ({t.id}) has left, because {only}."
        if (why := obstacle_text(state, t, ticket, _asker_priority(state, ticket))) is None
        else f"{t.model} ({t.id}) stays, and {only}: {why}."
        for t in others
    ]


def _hours_sentences(state: CoreState, ticket: Ticket, now: Instant) -> list[str]:
    """Says that a ticket waits for hours to begin, or that its model leaves outside of them
    (C13)."""
    name = ticket.model_name
    own = state.registry.hours.get(name, "")
    if queued := state.queue.find(ticket.id):
        goes_at = hours.held_until(state, ticket, queued)
        if goes_at is None:
            return []
        left_s = in_seconds(since(now, goes_at))
        if state.opens_at(name) is None:
            return [
                f"Batch work waits for its hours, {state.batch_hours_of(name)}: {left_s:.0f} s."
            ]
        return [f"It waits for the hours of its model, {own}: {left_s:.0f} s."]
    if ticket.lease or state.opens_at(name) is None:
        return []
    return [f"It is outside the hours of its model, {own}, and leaves once it is idle."]


def _waste_sentences(state: CoreState, ticket: Ticket) -> list[str]:
    """Says that a ticket is being compacted, or what a compaction would give back, and what keeps
    it from that now (D7)."""
    if ticket.leaving is Reason.COMPACT:
        return ["It is unloaded to be loaded again, because it held more than it needs."]
    wasted = wasted_bytes(state, ticket)
    if not wasted:
        return []
    held = f"It holds {human(wasted)} more than a new load of it would"
    if why := compaction_obstacle(state, ticket):
        return [f"{held}, and is not compacted now: {why}."]
    return [f"{held}; `arbiter compact {ticket.model}` gives that back."]


def _silence_sentence(state: CoreState, ticket: Ticket, now: Instant) -> str:
    holder = state.holders.get(ticket.holder)
    if holder is None:
        return "The holder has not joined; nothing is granted to it until it does."
    silence_s = in_seconds(since(holder.heard_at, now))
    sent = f"The holder has sent no heartbeat for {silence_s:.0f} s"
    return f"{sent}; nothing is granted to it until it does."


def _shortages_sentences(ticket: Ticket, shortages: tuple[Shortage, ...]) -> list[str]:
    """Says what a queued ticket lacks on each device that it could go to."""
    if not shortages:
        return ["No node agent has introduced a device it could go to."]
    sentences = [line for shortage in shortages for line in _shortage_sentences(shortage)]
    if len(ticket.home) > 1 and any(s.short_bytes for s in shortages):
        home = f"It wakes on {len(ticket.home)} devices"
        sentences.append(f"{home}: no ticket leaves before all of them can have room.")
    return sentences


def _shortage_sentences(s: Shortage) -> list[str]:
    """Says what a queued ticket lacks on one device, and which tickets there may leave or stay."""
    reserved = f" ({human(s.kept_bytes)} of both reserved for others)" if s.kept_bytes else ""
    head = f"On {s.device} it needs {human(s.need_bytes)}, {human(s.free_bytes)} are free"
    coming = human(s.coming_bytes)
    if not s.short_bytes:
        return [f"{head}, and {coming} are on their way back{reserved}."]
    sentences = [f"{head}, {coming} on their way back{reserved}: {human(s.short_bytes)} short."]
    lawful = [x for x in s.charged_tickets if x.obstacle is None]
    if lawful:
        only = "only " if s.leavable_bytes < s.short_bytes else ""
        names = ", ".join(x.model for x in lawful)
        sentences.append(f"Tickets that may leave hold {only}{human(s.leavable_bytes)}: {names}.")
    if s.cheaper_in:
        sentences.append(
            f"It waits {in_seconds(s.cheaper_in):.1f} s, until cheaper tickets may leave."
        )
    sentences += [
        f"{x.model} ({x.ticket}) holds {human(x.charged_bytes)} and stays: {x.obstacle}."
        for x in s.charged_tickets
        if x.obstacle
    ]
    return sentences


# -- then -----------------------------------------------------------------------------------------


def _past(choice: EvictionRecord, ticket_id: TicketId, now: Instant) -> PastEviction:
    """Describes an eviction by the part that a ticket had in it."""
    part = "asked" if ticket_id == choice.waiting else "spared"
    if any(w.ticket == ticket_id and w.is_chosen for w in choice.weighed):
        part = "went"
    return PastEviction(
        since(choice.at, now),
        part,
        choice.waiting,
        choice.waiting_model,
        choice.device,
        choice.short_bytes,
        choice.policy,
        choice.weighed,
        choice.is_compaction,
    )


def _eviction_sentence(past: PastEviction, ticket_id: TicketId) -> str:
    """Says what an eviction chose and spared, and what part a ticket had in it."""
    ago = f"{in_seconds(past.ago):.1f} s ago"
    chosen = ", ".join(_priced(w) for w in past.weighed if w.is_chosen)
    spared = ", ".join(_priced(w) for w in past.weighed if not w.is_chosen) or "none"
    lacked = f"{human(past.short_bytes)} were missing on {past.device}"
    if past.is_compaction:
        return _compaction_sentence(past, f"{ago} {lacked}", chosen, spared)
    if past.part == "asked":
        return f"{ago} {lacked} for it; by {past.policy} these went: {chosen}; spared: {spared}."
    verb = "it was asked to leave" if past.part == "went" else "it was spared"
    whom = f"for {past.waiting_model} ({past.waiting})"
    return f"{ago} {lacked} {whom}; {verb} by {past.policy}: went {chosen}; spared {spared}."


def _compaction_sentence(past: PastEviction, lacked: str, chosen: str, spared: str) -> str:
    """Says which models were unloaded and loaded again for a queued ticket (D7)."""
    whom = f"for {past.waiting_model} ({past.waiting})"
    held = "these held more than they need and were unloaded, to be loaded again smaller"
    return f"{lacked} {whom}; {held}: {chosen}; spared {spared}."


def _priced(w: ScoredVictim) -> str:
    why = f", {w.why}" if w.why else ""
    return f"{w.model} ({human(w.freed_bytes)}, rank {_rank(w)}, cost {w.cost_s:.3g} s{why})"


def _rank(w: ScoredVictim) -> str:
    return "/".join(str(part) for part in w.rank)
