"""Whether a request still fits into a tenant's day at a remote (J5): the arbiter decides it, and
the front asks the same of what it heard last."""

from datetime import UTC, datetime, timedelta

from arbiter.errors import RemoteBudgetSpent
from arbiter.protocol.messages import DaySpent, Egress

MILLION = 1_000_000


def refusal(egress: Egress, spent: DaySpent, now: datetime) -> RemoteBudgetSpent | None:
    """Returns why a request may not leave by the tenant's budget; None when it fits."""
    bounds = (
        (spent.tokens_count, egress.tokens_count, egress.most_tokens_count, 1, "tokens"),
        (spent.money_micros, egress.money_micros, egress.most_money_micros, MILLION, "money"),
    )
    for has, wants, most, unit, name in bounds:
        if most is not None and has + wants > most:
            amounts = has / unit, wants / unit, most / unit
            left_s = left_of_day_s(now)
            return RemoteBudgetSpent(egress.remote, egress.tenant, *amounts, name, left_s)
    return None


def day_of(now: datetime) -> str:
    """Returns the day in UTC, as `2026-11-23`."""
    return now.astimezone(UTC).date().isoformat()


def left_of_day_s(now: datetime) -> float:
    """Seconds until midnight UTC."""
    today = now.astimezone(UTC)
    midnight = datetime.combine(today.date() + timedelta(days=1), datetime.min.time(), UTC)
    return (midnight - today).total_seconds()
