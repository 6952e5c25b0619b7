"""Who is overtaken by a grant (SPEC C6): so often, and then it is due and overtaken no more."""

from arbiter.ledger import Sizes, State
from arbiter.rules import gangs
from arbiter.rules.look import Look
from arbiter.rules.mind import Mind
from arbiter.rules.sites import on_demand_of
from arbiter.units import Bytes, HolderId, TicketId


def overtake(mind: Mind, look: Look, turn: int, home: Sizes) -> None:
    """Those who had asked before and could have used these bytes: perhaps a long line, so what most
    of them need not be asked is asked last."""
    most = max(on_demand_of(mind.ledger.books[d]) for d in home)
    silent: dict[HolderId, bool] = {}  # each holder is asked for once
    for other in mind.line.at(look.node.node):
        waiter, holder = other.waiter, other.holder
        if holder not in silent:
            silent[holder] = mind.is_silent(holder)
        if waiter.turn > turn or other.is_due or silent[holder]:
            continue
        is_plain = not (waiter.is_asleep or other.is_of_gang)
        if other.need_bytes <= most if is_plain else _could_use(mind, waiter.ticket, home, most):
            mind.line.overtaken(other, mind.settings.bypass_count)
            look.is_over = look.is_over or other.is_due


def _could_use(mind: Mind, ticket: TicketId, home: Sizes, most: Bytes) -> bool:
    """A sleeper, or one of several that only make sense together."""
    entry, waiting = mind.ledger.find(ticket), mind.line.find(ticket)
    assert entry is not None and waiting is not None
    if entry.state is State.ASLEEP:
        return bool(entry.home.keys() & home.keys())
    if entry.state is not State.QUEUED or gangs.members(mind, entry) is None:
        return False  # it has bytes of its own to come, or does not compete
    return waiting.need_bytes <= most
