"""Windows of the day as people write them, and what the clock on the wall makes of them (C13)."""

import time
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.opening_hours import DAY_MINUTES, OpeningHours, check_zone, parse

pytestmark = pytest.mark.spec("C13")
BERLIN = ZoneInfo("Europe/Berlin")
HOUR_S = 3600


def at(text: str, zone: ZoneInfo = BERLIN, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%d %H:%M")


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("22-07", "22:00-07:00"),
        ("9-12, 13:30-18", "09:00-12:00, 13:30-18:00"),
        ("20-24 Europe/Berlin", "20:00-24:00 Europe/Berlin"),
        ("00:00-06:15 UTC", "00:00-06:15 UTC"),
    ],
)
def test_hours_are_read_as_written_and_again_as_shown(text: str, means: str) -> None:
    hours = parse(text)
    assert str(hours) == means
    assert parse(str(hours)) == hours


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a window"),
        ("night", "'night' is not a window; write it as 22-07"),
        ("22", "is not a window"),
        ("25-07", "from one time of day to another"),
        ("22-07:60", "from one time of day to another"),
        ("24-07", "from one time of day to another"),
        ("07-07", "from one time of day to another"),
        ("00-24", "is the whole day; leave the hours out"),
        ("22-07, 07-22", "is the whole day"),
        ("22-07 Europe/Nowhere", "no time zone 'Europe/Nowhere'"),
        ("22-07 ../etc/passwd", "no time zone"),
        ("22-07 Europe", "no time zone"),
    ],
)
def test_what_are_no_hours_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_no_zone_is_the_local_time_of_the_machine() -> None:
    assert check_zone("") == ""
    noon = time.mktime((2026, 1, 15, 12, 0, 0, 0, 0, -1))  # local
    assert parse("11-13").is_open(noon) and not parse("13-14").is_open(noon)


def test_a_window_over_midnight_is_open_on_both_sides_of_it_and_its_end_is_out() -> None:
    hours = parse("22-07 Europe/Berlin")
    states = {
        clock: hours.is_open(at(f"2026-01-15T{clock}"))
        for clock in ("21:59", "22:00", "23:59", "00:00", "06:59", "07:00", "12:00")
    }
    assert [clock for clock, is_open in states.items() if not is_open] == [
        "21:59",
        "07:00",
        "12:00",
    ]
    assert hours.changes_at(at("2026-01-15T12:00:30")) == at("2026-01-15T22:00")
    assert hours.changes_at(at("2026-01-15T22:00")) == at("2026-01-16T07:00")


def test_the_night_in_which_clocks_go_forward_is_an_hour_shorter() -> None:
    hours = parse("22-07 Europe/Berlin")
    begins = at("2026-03-28T22:00")
    assert hours.changes_at(begins) - begins == 8 * HOUR_S


def test_the_night_in_which_clocks_go_back_is_an_hour_longer() -> None:
    hours = parse("22-07 Europe/Berlin")
    begins = at("2026-10-24T22:00")
    assert hours.changes_at(begins) - begins == 10 * HOUR_S


def test_a_window_that_begins_in_the_hour_that_is_skipped_begins_with_the_next() -> None:
    hours = parse("02:30-04 Europe/Berlin")
    assert utc(hours.changes_at(at("2026-03-29T00:00"))) == "29 01:00"  # 03:00 follows 01:59


def test_a_window_within_the_hour_that_is_skipped_opens_a_day_later() -> None:
    hours = parse("02-03 Europe/Berlin")
    assert utc(hours.changes_at(at("2026-03-29T00:00"))) == "30 00:00"


def test_a_window_within_the_hour_that_comes_twice_opens_twice() -> None:
    hours = parse("02-02:30 Europe/Berlin")
    opens = hours.changes_at(at("2026-10-25T00:00"))
    changes = [opens]
    for _ in range(3):
        changes.append(hours.changes_at(changes[-1]))
    assert list(map(utc, changes)) == ["25 00:00", "25 00:30", "25 01:00", "25 01:30"]


MINUTES = st.integers(0, DAY_MINUTES - 1)
YEAR = (at("2026-01-01T00:00"), at("2027-01-01T00:00"))


@given(
    st.lists(st.tuples(MINUTES, MINUTES).filter(lambda w: w[0] != w[1]), min_size=1, max_size=3),
    st.floats(*YEAR),
    st.sampled_from(["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "UTC"]),
)
def test_hours_stay_as_they_are_until_they_change(
    windows: list[tuple[int, int]], now_s: float, zone: str
) -> None:
    hours = OpeningHours(tuple(windows), zone)
    if all(map(hours.covers, range(DAY_MINUTES))):
        return
    changes_s = hours.changes_at(now_s)
    assert now_s < changes_s <= now_s + 2 * DAY_MINUTES * 60 + 2 * HOUR_S
    assert hours.is_open(changes_s) is not hours.is_open(now_s)
    assert hours.is_open(changes_s - 1) is hours.is_open(now_s)
