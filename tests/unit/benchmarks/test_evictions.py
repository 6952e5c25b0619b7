"""What events say of an eviction, and the configuration that has one with each request."""

import threading
from typing import Any

import pytest

from arbiter.units import MIB
from benchmarks import evictions
from benchmarks.first_token import shipped, table_of
from deployments.config.schema import parse_table


def event(seq: int, kind: str, ticket: str, **more: Any) -> dict[str, Any]:
    return {"seq": seq, "kind": kind, "ticket": ticket, "model": "joe", "unix_s": seq / 2, **more}


EVENTS = [
    event(1, "eviction", "old", size_bytes=5 * MIB),
    event(2, "model_unload", "old", to="gone"),
    event(3, "eviction", "new", size_bytes=7 * MIB),
    event(4, "model_load", "another"),
    event(7, "model_unload", "new", to="asleep"),
]


def test_newest_departure_is_told() -> None:
    found = evictions.departure(EVENTS, "joe")
    assert found == {"charged_mib": 7.0, "seconds": 2.0, "to": "asleep"}


@pytest.mark.parametrize("events", [[], EVENTS[:1], EVENTS[:4]])
def test_model_that_has_not_left_is_an_error(events: list[dict[str, Any]]) -> None:
    with pytest.raises(RuntimeError, match="joe was not evicted"):
        evictions.departure(events, "joe")


def test_ring_goes_round_and_has_every_capability() -> None:
    assert set(evictions.RING) == set(table_of(shipped(1, 1))["capabilities"])
    assert evictions.laps(("a", "b"), 2) == [("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")]


def test_neighbours_of_the_ring_run_on_different_libraries() -> None:
    capabilities = table_of(shipped(1, 1))["capabilities"]
    for victim, asker in evictions.laps(evictions.RING, 1):
        assert capabilities[victim]["engine"] != capabilities[asker]["engine"]


def test_all_capabilities_are_one_exclusion_group() -> None:
    config = shipped(1, 1)
    evictions.exclusive(config)
    table = parse_table(table_of(config), "a table")
    assert {c.role for c in table.capabilities.values()} == {evictions.GROUP}
    assert table.arbiter.as_settings().one_resident_roles == {evictions.GROUP}


def test_rise_counts_from_the_lowest_point_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions, "available_bytes", lambda: 500)
    free = evictions.Rise()
    for free_bytes in (510, 460, 560, 300, 340):
        free.see(free_bytes)
    assert free.bytes == 100


def test_free_bytes_of_this_machine_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evictions.available_bytes() > 0
    seen = threading.Event()
    told = iter([100, 70])

    def available() -> int:
        free_bytes = next(told, 90)
        if free_bytes == 90:
            seen.set()
        return free_bytes

    monkeypatch.setattr(evictions, "available_bytes", available)
    with evictions.Rise() as free:
        assert seen.wait(60)
    assert free.bytes == 20
