"""EgressBook: what leaves for remotes is written down and paid for before it leaves (J5).

A request reserves the most that it may cost; its end puts what it did cost in that place, once. The
front tells an end until it is written down. A request whose end was never told, because the front
died, stays reserved until midnight UTC: a crash counts too much rather than too little. A budget is
per tenant and remote, over all sessions of one state file.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from arbiter.core.decisions import EventKind, LogEvent
from arbiter.errors import EgressRefused, EgressUnsettled
from arbiter.protocol.egress_budget import MILLION, day_of, refusal
from arbiter.protocol.messages import DaySpent, Egress, EgressEnd, Plain
from arbiter.server.store import Store
from arbiter.units import Bytes


class EgressBook:
    """Budgets of tenants at remotes, per day of UTC: tokens are counts, money is in millionths of
    the operator's currency. `tell` gets a line of the event log for each egress and each end."""

    def __init__(
        self,
        store: Store,
        tell: Callable[[LogEvent], None],
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._tell, self._unix_s = store, tell, unix_s

    def reserve(self, egress: Egress) -> DaySpent:
        """Reserves the price of a request that is about to leave; done once for an id.
        Returns what its tenant has spent at the remote today, reservations included. Raises
        RemoteBudgetSpent, EgressRefused."""
        now, tenant, remote = self._now(), egress.tenant, egress.remote
        day = day_of(now)
        spent = DaySpent(*self._store.spent(day, tenant, remote))
        if self._store.is_reserved(egress.id):
            return spent
        if error := refusal(egress, spent, now):
            raise error
        wants = egress.tokens_count, egress.money_micros
        if not self._store.reserve(egress.id, day, tenant, remote, *wants) or self._store.trouble:
            raise EgressRefused(remote, self._store.trouble or "the state file is closed")
        self._tell(LogEvent(EventKind.REMOTE_EGRESS, _about(egress), size_bytes=egress.size_bytes))
        return DaySpent(*self._store.spent(day, tenant, remote))

    def settle(self, end: EgressEnd) -> DaySpent:
        """Puts what a request did cost in the place of what it had reserved. Done once for an id,
        and not for an id that has reserved nothing. Returns what its tenant has spent at the remote
        today. Raises EgressUnsettled: then it is to be told again."""
        egress = end.egress
        tokens = end.prompt_tokens_count + end.answer_tokens_count
        if self._store.is_reserved(egress.id):
            if not self._store.settle(egress.id, tokens, end.money_micros):
                raise self._unsettled(egress)
            spent: Plain = {
                "outcome": end.outcome,
                "prompt_tokens": end.prompt_tokens_count,
                "answer_tokens": end.answer_tokens_count,
                "sent_bytes": egress.size_bytes,
                "money": end.money_micros / MILLION,
            }
            about = _about(egress) | spent
            answer = Bytes(end.answer_bytes)
            self._tell(LogEvent(EventKind.REMOTE_ANSWER, about, size_bytes=answer, took=end.took))
        elif self._store.trouble:  # it could not be read, either
            raise self._unsettled(egress)
        return DaySpent(*self._store.spent(day_of(self._now()), egress.tenant, egress.remote))

    def today(self) -> list[Plain]:
        return self._store.spending(day_of(self._now()))

    def _unsettled(self, egress: Egress) -> EgressUnsettled:
        return EgressUnsettled(egress.remote, self._store.trouble or "the state file is closed")

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._unix_s(), UTC)


def _about(egress: Egress) -> dict[str, str | int | float | bool | None]:
    """Returns the fields of an egress for the event log. They hold no prompt, because the message
    has none."""
    return {
        "egress": egress.id,
        "remote": egress.remote,
        "model": egress.model,
        "tenant": egress.tenant,
        "tokens_at_most": egress.tokens_count,
        "money_at_most": egress.money_micros / MILLION,
    }
