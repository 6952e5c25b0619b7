"""Keeps what each client has caused (C10): requests, and device bytes times the time they were
held.

A ticket is on the account of the client that used it last. Holders count requests and report them
with their heartbeats; bytes are those of the books, of devices that compute. An account is settled
when its bytes change, so an account that changes nothing costs nothing.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

from arbiter.core.events import Usage
from arbiter.core.records.holdings import Holdings
from arbiter.core.types import Client
from arbiter.units import SECOND, Bytes, Instant, Span, since


@dataclass(slots=True)
class Account:
    """Holds what one client has used, as of `settled`."""

    settled: Instant
    requests_count: int = 0
    byte_ns: int = 0  # device bytes times nanoseconds
    average_bytes: float = 0.0  # held lately, older time fading

    def settle(self, held: Bytes, now: Instant, window: Span) -> None:
        """Brings the account up to `now`, for a client that held `held` all the time since
        `settled`. The average fades over `window`."""
        span = since(self.settled, now)
        keeps = exp(-span / window)
        self.byte_ns += held * span
        self.average_bytes = self.average_bytes * keeps + held * (1 - keeps)
        self.settled = now


@dataclass(slots=True)
class Accounts:
    """Keeps the accounts of all clients, in a bounded number: beyond `most_count` the oldest that
    hold nothing become one row of their tenant."""

    window: Span
    most_count: int
    rows: dict[Client, Account] = field(default_factory=dict)  # the last to be touched is the last
    cooling: dict[str, None] = field(default_factory=dict)  # tenants over their average
    # By tenant, for fair share: see `virtual_start_of`.
    finish_bytes: dict[str, float] = field(default_factory=dict)
    virtual_bytes: float = 0.0
    removed: dict[str, Instant] = field(default_factory=dict)  # tenants, and when

    def used(self, usage: Usage, now: Instant) -> None:
        """Counts requests of a client that have ended."""
        self._touch(usage.client, now).requests_count += usage.requests_count

    def settle(self, holdings: Holdings, now: Instant) -> None:
        """Settles every client whose bytes changed in this step: until now it held what it held
        before."""
        unsettled = holdings.unsettled
        holdings.unsettled = {}
        for client, before in unsettled.items():
            self._touch(client, now).settle(before, now, self.window)
        self._fold(holdings.by_client, now)

    def average(self, held: Counter[Client], tenant: str, now: Instant) -> Bytes:
        """Returns what a tenant held on average over the last window, up to `now`."""
        total = 0.0
        for client, account in self.rows.items():
            if client.tenant == tenant:
                keeps = exp(-since(account.settled, now) / self.window)
                total += account.average_bytes * keeps + held[client] * (1 - keeps)
        return Bytes(int(total))

    def falls_in(self, average: Bytes, bound: Bytes) -> Span:
        """Returns how long the average of a tenant that holds nothing any more takes to fall to
        `bound`."""
        return Span(int(self.window * log(max(1.0, average / max(1, bound)))))

    def cool_down(self, tenant: str) -> None:
        """Lets nothing more be loaded for a tenant until its average has fallen."""
        self.cooling[tenant] = None

    def end_cool_down(self, tenant: str) -> None:
        """Lets a tenant load again; safe for a tenant that was not cooling down."""
        self.cooling.pop(tenant, None)

    def note_removed(self, tenant: str, now: Instant) -> None:
        """Remembers that a tenant was removed (E6)."""
        self.removed[tenant] = now

    def lately_removed(self, within: Span, now: Instant) -> dict[str, Span]:
        """Returns how long ago each tenant was removed that was removed within that time. Forgets
        the others."""
        ages = {tenant: since(at, now) for tenant, at in self.removed.items()}
        lately = {tenant: age for tenant, age in ages.items() if age < within}
        self.removed = {tenant: self.removed[tenant] for tenant in lately}
        return lately

    # -- fair share ----------------------------------------------------------------------------

    def virtual_start_of(self, tenant: str, work_bytes: float) -> Bytes:
        """Returns where a ticket that joins the queue stands by what its tenant has asked for
        already: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), with bytes as the
        work. `work_bytes`: what the ticket needs, by the share of its tenant."""
        start = max(self.virtual_bytes, self.finish_bytes.get(tenant, 0.0))
        self.finish_bytes[tenant] = start + work_bytes
        return Bytes(int(start))

    def not_served(self, tenant: str, virtual_start: Bytes, work_bytes: float) -> None:
        """Takes back what a ticket that leaves the queue without a grant was to cost its tenant, as
        far as later grants have not passed it. The places of queued tickets stay."""
        left_bytes = min(work_bytes, virtual_start + work_bytes - self.virtual_bytes)
        if left_bytes > 0 and tenant in self.finish_bytes:
            finish = self.finish_bytes[tenant] - left_bytes
            self.finish_bytes[tenant] = max(self.virtual_bytes, finish)

    def served(self, virtual_start: Bytes) -> None:
        """Has tickets that join from now on start no earlier than what was granted last."""
        self.virtual_bytes = max(self.virtual_bytes, float(virtual_start))
        late = [t for t, finish in self.finish_bytes.items() if finish <= self.virtual_bytes]
        for tenant in late:
            del self.finish_bytes[tenant]

    # -- across restarts -----------------------------------------------------------------------

    def export(self) -> list[list[Any]]:
        """Returns rows of tenant, name, requests, byte-nanoseconds and average bytes."""
        return [
            [c.tenant, c.name, a.requests_count, a.byte_ns, a.average_bytes]
            for c, a in self.rows.items()
        ]

    def restore(self, rows: list[list[Any]], now: Instant) -> None:
        """Takes back the rows of `export`."""
        for tenant, name, requests, byte_ns, average in rows:
            self.rows[Client(tenant, name)] = Account(now, requests, byte_ns, average)

    def _touch(self, client: Client, now: Instant) -> Account:
        account = self.rows.pop(client, None) or Account(now)
        self.rows[client] = account
        return account

    def _fold(self, held: Counter[Client], now: Instant) -> None:
        """Adds the oldest accounts beyond `most_count` that hold nothing to the row of their
        tenant."""
        if len(self.rows) <= self.most_count:
            return
        idle = [c for c in self.rows if c.name and not held[c]]
        for client in idle[: len(self.rows) - self.most_count]:
            gone = self.rows.pop(client)
            gone.settle(Bytes(0), now, self.window)
            rest = self._touch(Client(client.tenant), now)
            rest.settle(Bytes(held[Client(client.tenant)]), now, self.window)
            rest.requests_count += gone.requests_count
            rest.byte_ns += gone.byte_ns
            rest.average_bytes += gone.average_bytes


def byte_seconds(byte_ns: int) -> int:
    """Turns byte-nanoseconds into whole byte-seconds."""
    return byte_ns // SECOND
