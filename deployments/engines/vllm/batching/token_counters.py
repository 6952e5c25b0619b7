"""Virtual token counters: how much service each tenant, and each adapter of a tenant, has had.

A counter is the weighted tokens of what a name was served, and the name with the least is served
next. A name that had nothing waiting begins at the least of those that do, so that it can save up
nothing while it is idle. Two names that both always have requests waiting are then never further
apart than twice the most that one batch holds, however long it goes on.

Pure. Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI '24, algorithm 2 and
theorem 4.4, from which the two weights are too.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

PROMPT_WEIGHT, ANSWER_WEIGHT = 1, 2  # of a token; tokens of an answer cost a step each

# Names kept without a request, beyond which those go that a return would lift anyway.
MOST_IDLE = 4_096


@dataclass(slots=True)
class TokenCounters:
    """The counters of names that compete with each other."""

    served: Counter[str] = field(default_factory=Counter)  # weighted tokens
    waiting: Counter[str] = field(default_factory=Counter)  # requests, none of them zero
    last_waited: str = ""  # the last name whose last waiting request entered or was given up

    def begin_wait(self, name: str) -> None:
        """Counts a request that begins to wait."""
        comes_back = name not in self.waiting
        if comes_back:
            self.served[name] = max(self.served[name], self._least())
        self.waiting[name] += 1
        if comes_back:
            self._forget_idle()  # after the name counts as waiting, so that it is not forgotten

    def end_wait(self, name: str) -> None:
        """Counts off a request that waits no more: it entered, or it was given up."""
        self.waiting[name] -= 1
        if not self.waiting[name]:
            del self.waiting[name]
            self.last_waited = name

    def charge(self, name: str, weighted: int) -> None:
        """Adds what a name was served. `weighted`: tokens times their weight."""
        self.served[name] += weighted

    def copy(self) -> "TokenCounters":
        return TokenCounters(self.served.copy(), self.waiting.copy(), self.last_waited)

    def _least(self) -> int:
        if self.waiting:
            return min(self.served[name] for name in self.waiting)
        return self.served[self.last_waited]

    def _forget_idle(self) -> None:
        if len(self.served) <= len(self.waiting) + MOST_IDLE:
            return
        least, kept = self._least(), self.waiting.keys() | {self.last_waited}
        self.served = Counter(
            {name: n for name, n in self.served.items() if n > least or name in kept}
        )


@dataclass(slots=True)
class FairShare:
    """Counters of tenants, which share the engine, and for each tenant of its adapters, which share
    what the tenant gets: a tenant with a hundred adapters gets no more than one with one."""

    tenants: TokenCounters = field(default_factory=TokenCounters)
    adapters: dict[str, TokenCounters] = field(default_factory=dict)  # by tenant

    def begin_wait(self, tenant: str, adapter: str) -> None:
        self.tenants.begin_wait(tenant)
        self.adapters.setdefault(tenant, TokenCounters()).begin_wait(adapter)
        if len(self.adapters) > len(self.tenants.served):  # some of these were forgotten
            known = self.tenants.served
            self.adapters = {name: own for name, own in self.adapters.items() if name in known}

    def end_wait(self, tenant: str, adapter: str) -> None:
        self.tenants.end_wait(tenant)
        self.adapters[tenant].end_wait(adapter)

    def charge(self, tenant: str, adapter: str, weighted: int) -> None:
        self.tenants.charge(tenant, weighted)
        # Not `setdefault`, which would make counters for nothing at each token.
        own = self.adapters.get(tenant)
        if own is None:
            own = self.adapters[tenant] = TokenCounters()
        own.charge(adapter, weighted)

    def of(self, tenant: str, adapter: str) -> tuple[int, int]:
        """Returns the weighted tokens that the tenant was served, and how many of them this adapter
        of the tenant was. Requests are ordered by this pair, the least first."""
        own = self.adapters.get(tenant)
        return self.tenants.served[tenant], own.served[adapter] if own else 0

    def copy(self, tenants: Collection[str]) -> "FairShare":
        """Returns a copy with the adapters of these tenants alone. A plan makes a copy for each
        request that ends, so it is kept small."""
        own = {name: self.adapters[name].copy() for name in tenants if name in self.adapters}
        return FairShare(self.tenants.copy(), own)
