"""What the hours of the day usually bring (arbiter/core/records/usage_rates.py)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.core.records.usage_rates import (
    AHEAD_COUNT,
    FADE,
    HOUR,
    HOURS_COUNT,
    LEAN_DAYS,
    HourlyUsage,
    UsageRates,
)
from arbiter.units import Instant, Span

BEGAN = Instant(1000 * HOUR + 5)
MORNING, OTHER = ("text", "morning"), ("text", "other")


def at(day: int, hour: float) -> Instant:
    """Since the first full hour."""
    return Instant(round((1001 + day * HOURS_COUNT + hour) * HOUR))


def after_days(days_count: int) -> HourlyUsage:
    """A model used ten times at nine each day, and one used ten times at twenty."""
    hours = HourlyUsage(BEGAN)
    for day in range(days_count):
        hours.used(MORNING, 10, at(day, 9.5))
        hours.used(OTHER, 10, at(day, 20.5))
    return hours


@pytest.mark.spec("C3")
def test_hourly_usage_predicts_a_daily_use_before_its_hour_and_not_after() -> None:
    hours = after_days(3)
    early, late = at(3, 9 - AHEAD_COUNT + 1), at(3, 10)
    assert hours.ahead(MORNING, early, 0) > 8
    assert hours.ahead(OTHER, early, 0) == 0
    assert hours.ahead(MORNING, late, 0) == 0


@pytest.mark.spec("C3")
def test_uses_of_the_current_hour_do_not_count_as_hourly_usage_yet() -> None:
    hours = after_days(3)
    before = hours.ahead(MORNING, at(3, 9.1), 0)
    hours.used(MORNING, 99, at(3, 9.2))
    assert hours.ahead(MORNING, at(3, 9.3), 0) == before
    assert hours.ahead(MORNING, at(4, 8), 0) > 2 * before


def test_prior_of_hourly_usage_fades_as_days_are_seen() -> None:
    hours = HourlyUsage(BEGAN)
    assert hours.ahead(MORNING, at(0, 3), 7.0) == 7.0
    leaning = [after_days(n).ahead(("text", "never"), at(n, 3), 7.0) for n in range(4)]
    assert leaning == sorted(leaning, reverse=True)
    assert leaning[1] == pytest.approx(7.0 * LEAN_DAYS / (LEAN_DAYS + 1), rel=0.2)


@given(st.lists(st.integers(0, 3), min_size=30, max_size=100), st.integers(0, 60))
def test_hourly_usage_equals_a_sum_over_the_whole_history(uses: list[int], later: int) -> None:
    """Each hour's uses, faded by the hours since; so many a faded pass of the hours ahead."""
    hours = HourlyUsage(BEGAN)
    for n, count in enumerate(uses):
        if count:
            hours.used(MORNING, count, at(0, n + 0.5))
    asked = len(uses) + later
    seen, days = 0.0, 0.0
    for n in range(-1, asked):  # the hour in which it began counts as one
        if (n - asked) % HOURS_COUNT < AHEAD_COUNT:
            days += FADE ** (asked - n) / AHEAD_COUNT
            seen += FADE ** (asked - n) * (uses[n] if 0 <= n < len(uses) else 0)
    ahead = hours.ahead(MORNING, at(0, asked + 0.5), 2.0)
    assert ahead == pytest.approx((seen + LEAN_DAYS * 2) / (days + LEAN_DAYS))
    assert hours.ahead(MORNING, at(0, asked + 0.5), 2.0) == ahead  # asking changes nothing


def test_removed_model_has_no_hourly_usage() -> None:
    hours = after_days(3)
    hours.forget(MORNING)
    assert hours.ahead(MORNING, at(3, 9), 0) == 0


@pytest.mark.spec("C3")
def test_usage_rates_fade_to_a_third_within_a_window_and_add_up() -> None:
    rates = UsageRates(Span(100))
    rates.used(("c", "m"), 2, Instant(0))
    rates.used(("c", "m"), 1, Instant(100))
    assert rates.recent(("c", "m"), Instant(100)) == pytest.approx(1 + 2 * 0.3679, rel=1e-3)
    assert rates.recent(("c", "other"), Instant(100)) == 0
