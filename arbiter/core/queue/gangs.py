"""Places tickets that only make sense together, and tickets over several devices (A13, B5).

A gang is a set of tickets of one holder (models that one request uses together, as `use_all` asks
for them): none is granted before all of them can be, in the same step. A model larger than any one
device is split over several of its node, which is one ticket with several parts. Both are the same
question: is there room for all of these parts at once? All or none: no victim leaves for a part
while another part would still find no room.
"""

from dataclasses import dataclass

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.types import Split
from arbiter.units import Bytes, DeviceId

# Ways of an equal split. Tensor parallel engines divide heads, which come in powers of two; a node
# has at most sixteen GPUs.
EQUAL_WAYS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Part:
    """Puts so many bytes of a ticket on a device."""

    ticket: Ticket
    device: DeviceId
    size_bytes: Bytes


# -- where the parts of one ticket go -------------------------------------------------------------


def split(books: list[DeviceAccount], need: Bytes, how: Split, at_most: Sizes) -> Sizes | None:
    """Returns one ticket over several devices; None when all of them together are too small.
    `at_most`: what waiting can ever bring on each."""
    roomy = sorted(books, key=lambda b: (-at_most[b.device], b.device))
    if how is Split.EQUAL:
        return _equally(roomy, need, at_most)
    if how is Split.PROPORTIONAL:
        return _in_proportion(roomy, need, at_most)
    return None


def most_bytes(how: Split, at_most: Sizes) -> Bytes:
    """Returns the most that one ticket can have on devices of which each can bring so much."""
    sizes = sorted(at_most.values(), reverse=True)
    if how is Split.PROPORTIONAL:
        return Bytes(sum(sizes))
    ways = (1, *EQUAL_WAYS) if how is Split.EQUAL else (1,)
    return Bytes(max((n * sizes[n - 1] for n in ways if n <= len(sizes)), default=0))


def _equally(roomy: list[DeviceAccount], need: Bytes, at_most: Sizes) -> Sizes | None:
    """Splits over the fewest devices that hold an equal share each, those with the most free."""
    for ways in (w for w in EQUAL_WAYS if w <= len(roomy)):
        part = Bytes(-(-need // ways))
        fit = [b for b in roomy if at_most[b.device] >= part]
        if len(fit) >= ways:
            freest = sorted(fit, key=lambda b: (-b.free_bytes, b.device))[:ways]
            return {b.device: part for b in freest}
    return None


def _in_proportion(roomy: list[DeviceAccount], need: Bytes, at_most: Sizes) -> Sizes | None:
    """Splits over the fewest devices, by what is free there now if that is enough, else by what
    waiting can bring."""
    for count in range(2, len(roomy) + 1):
        chosen = roomy[:count]
        most = [int(at_most[b.device]) for b in chosen]
        free = [max(0, min(b.free_bytes, m)) for b, m in zip(chosen, most, strict=True)]
        weights = free if sum(free) >= need else most
        if sum(weights) < need:
            continue
        parts = [need * w // sum(weights) for w in weights]
        rest = need - sum(parts)  # of rounding: at most one byte each
        for i in range(count):
            more = min(rest, weights[i] - parts[i])
            parts[i] = parts[i] + more
            rest = rest - more
        return {b.device: Bytes(p) for b, p in zip(chosen, parts, strict=True) if p}
    return None


# -- where the members of a gang go ---------------------------------------------------------------


def members(state: CoreState, ticket: Ticket) -> list[Ticket] | None:
    """Returns all members of a gang, which are queued; None while one has not asked yet, or is
    gone."""
    tickets = [state.ledger.find(ticket_id) for ticket_id in ticket.gang]
    queued = [t for t in tickets if t and t.state is State.QUEUED and t.holder == ticket.holder]
    return queued if len(queued) == len(ticket.gang) else None


def assign(
    sizes: list[tuple[Ticket, Bytes]], books: list[DeviceAccount], at_most: Sizes
) -> list[Part]:
    """Returns a device for each process, the largest first, where it leaves the smallest hole;
    empty when a process finds none. `at_most`: what each device could hold."""
    room = dict(at_most)
    parts = []
    for ticket, size in sorted(sizes, key=lambda pair: (-pair[1], pair[0].id)):
        fit = [b.device for b in books if room[b.device] >= size]
        if not fit:
            return []
        device = min(fit, key=lambda d: (room[d] - size, d))
        room[device] = Bytes(room[device] - size)
        parts.append(Part(ticket, device, size))
    return parts


# -- all or none ----------------------------------------------------------------------------------


def totals(parts: list[Part]) -> Sizes:
    """Returns the bytes of these parts by device."""
    sums: Sizes = {}
    for part in parts:
        sums[part.device] = Bytes(sums.get(part.device, 0) + part.size_bytes)
    return sums
