"""Chooses an irreducible set of victims that frees enough at least cost (C3). Arithmetic only.

Ranks come before costs. A set is dear by its dearest rank: the sum of costs there decides, then the
sum in the next cheaper rank, and so on; so no number of victims of a low rank is worth a victim of
a higher. A policy whose ranks all differ (priority_lru) thereby names an order, a policy whose
ranks are all alike (cost_aware) a sum.
"""

from collections.abc import Iterable
from itertools import accumulate, groupby
from operator import attrgetter

from arbiter.core.records.priced_victim import PricedVictim
from arbiter.units import Bytes

EXACT_COUNT = 12  # C3: at most this many of one rank are solved exactly, at most 2^12 sets
PLACE = attrgetter("place")
RANK = attrgetter("rank")


def choose(options: Iterable[PricedVictim], short: Bytes) -> list[PricedVictim]:
    """Returns the cheapest set that frees `short` bytes, cheapest first; empty when all of them
    together do not."""
    ranked = sorted(options, key=PLACE)
    cheaper = freed(ranked)
    missing = int(short)
    if cheaper < missing:
        return []
    chosen: list[PricedVictim] = []
    groups = [list(members) for _, members in groupby(ranked, key=RANK)]
    for group in reversed(groups):  # the dearest rank gives only what all cheaper ranks lack
        cheaper -= freed(group)
        if missing > cheaper:
            part = _cheapest_cover(group, missing - cheaper)
            chosen += part
            missing -= freed(part)
    return sorted(chosen, key=PLACE)


def freed(options: Iterable[PricedVictim]) -> int:
    """Returns the bytes that all of these free."""
    return sum([o.freed_bytes for o in options])


def _cheapest_cover(group: list[PricedVictim], short: int) -> list[PricedVictim]:
    """Covers `short` from options of one rank, which come cheapest per byte first."""
    if len(group) == 1:
        return group
    greedy = _minimal_greedy(group, short)
    if _cost(greedy)[0] * group[0].freed_bytes <= short * group[0].cost_s:
        return greedy  # no byte more than asked, at the least price per byte
    if len(group) > EXACT_COUNT:
        alone = [o for o in group if o.freed_bytes >= short]
        return min([greedy, *([o] for o in alone)], key=_cost)
    return _Search(group, greedy).best(short)


def _minimal_greedy(group: list[PricedVictim], short: int) -> list[PricedVictim]:
    """Takes the first options that suffice, and drops any that turns out not to be needed, the
    dearest first."""
    chosen: list[PricedVictim] = []
    missing = short
    for option in group:
        if missing <= 0:
            break
        chosen.append(option)
        missing -= option.freed_bytes
    for option in sorted(chosen, key=lambda o: (-o.cost_s, o.ticket)):
        if missing + option.freed_bytes <= 0:
            chosen.remove(option)
            missing += option.freed_bytes
    return chosen


def _cost(options: list[PricedVictim]) -> tuple[float, int]:
    """Orders sets by cost; of equals the set that frees more comes first, because cheaper ranks
    then give less."""
    return sum([o.cost_s for o in options]), -freed(options)


class _Search:
    """Searches the subsets of one rank by branch and bound (Martello and Toth, Knapsack Problems,
    ch. 2): what is missing costs at least the price per byte of the next option."""

    def __init__(self, group: list[PricedVictim], known: list[PricedVictim]) -> None:
        self._group = group
        self._rest = [*accumulate((o.freed_bytes for o in reversed(group)), initial=0)][::-1]
        self._best = known
        self._least = _cost(known)

    def best(self, short: int) -> list[PricedVictim]:
        self._try(0, [], 0.0, short)
        return self._best

    def _try(self, at: int, picked: list[PricedVictim], cost: float, missing: int) -> None:
        if missing <= 0:
            if (picked_cost := _cost(picked)) < self._least:
                self._best = picked
                self._least = picked_cost
            return
        if self._rest[at] < missing:
            return
        option = self._group[at]
        if cost + missing * option.cost_s / option.freed_bytes > self._least[0]:
            return
        self._try(at + 1, [*picked, option], cost + option.cost_s, missing - option.freed_bytes)
        self._try(at + 1, picked, cost, missing)
