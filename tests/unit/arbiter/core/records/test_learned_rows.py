"""What was learned is the same after it was written as JSON and read by the next epoch."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.core import events as ev
from arbiter.core.decisions import Grant
from arbiter.core.records.estimates import SETTINGS_KEPT_COUNT, Estimates, ModelKey
from arbiter.core.records.run_times import KEPT_COUNT, SAVED_EACH_COUNT
from arbiter.core.records.usage import Usage
from arbiter.core.records.usage_rates import UsageCounts
from arbiter.core.settings import DEFAULTS
from arbiter.core.types import ModelName, Need
from arbiter.units import Bytes, Instant, NodeId, Span, TicketId
from tests.support.core_driver import CPU, CoreDriver

KEYS = [ModelKey(c, m, k) for c in ("text", "voice") for m in ("a", "b") for k in ("", "other")]
BYTES = st.integers(1, 1 << 40).map(Bytes)
SPANS = st.integers(1, 10**13).map(Span)
CALLS = st.one_of(
    st.tuples(st.just("saw_peak"), st.sampled_from(KEYS), BYTES),
    st.tuples(st.just("loaded"), st.sampled_from(KEYS), SPANS, BYTES),
    st.tuples(st.just("woke"), st.sampled_from(KEYS), SPANS),
    st.tuples(st.just("ran_out"), st.sampled_from(KEYS), BYTES),
    st.tuples(st.just("note_turnover"), st.sampled_from(["text", "voice"]), SPANS),
    st.tuples(st.just("saw_overhead"), st.sampled_from(KEYS), BYTES.map(Need), BYTES),
    st.tuples(st.just("forget_model"), st.sampled_from([ModelName("text", m) for m in "ab"])),
)

RUNS = st.tuples(st.just("ran"), st.sampled_from(KEYS), SPANS)  # not each one is written at once


def through_json(exported: Any) -> Any:
    return json.loads(json.dumps(exported))


def answers(known: Estimates) -> list[object]:
    """Everything that rules ask of it."""
    need = Need(Bytes(10**9))
    return [
        *(known.size(k, need, explicit) for k in KEYS for explicit in (True, False)),
        *(known.load_time(k, Bytes(weights)) for k in KEYS for weights in (0, 10**9, 10**11)),
        *(known.wake_time(k) for k in KEYS),
        *(known.slowest_load(k.name) for k in KEYS),
        *(known.proven(k.name) for k in KEYS),
        *(known.turnover(c) for c in ("text", "voice")),
        *(known.run_times(k.name) for k in KEYS),
    ]


@pytest.mark.spec("A17")
@given(st.lists(CALLS | RUNS, max_size=30), CALLS)
def test_restored_estimates_answer_as_the_exported_ones(
    calls: list[tuple[Any, ...]], later: tuple[Any, ...]
) -> None:
    known, restored = Estimates(DEFAULTS), Estimates(DEFAULTS)
    for name, *arguments in calls:
        getattr(known, name)(*arguments)
    restored.restore(through_json(known.export()))
    assert restored.export() == known.export()
    assert answers(restored) == answers(known)
    for one in (known, restored):  # and they go on learning alike
        getattr(one, later[0])(*later[1:])
    assert answers(restored) == answers(known)


@pytest.mark.spec("A17", "N2")
@given(st.lists(st.tuples(CALLS, st.booleans()), min_size=1, max_size=30))
def test_rows_that_have_changed_are_those_that_differ(
    calls: list[tuple[tuple[Any, ...], bool]],
) -> None:
    known = Estimates(DEFAULTS)
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    count = known.changes_count
    for (name, *arguments), is_saved in calls:
        getattr(known, name)(*arguments)
        if is_saved:
            rows, forgotten = known.changed_since(count)
            count = known.changes_count
            kept |= {(r["capability"], r["model"], r["settings_key"]): r for r in rows}
            for key in forgotten:
                kept.pop(key, None)
            assert sorted(kept.values(), key=repr) == sorted(known.export(), key=repr)
    answers(known)
    assert known.changed_since(known.changes_count) == ([], [])


@pytest.mark.spec("A17", "N2")
def test_a_load_changes_the_rows_of_its_model_and_capability_alone() -> None:
    known = Estimates(DEFAULTS)
    for key in KEYS:
        known.loaded(key, Span(5))
    count = known.changes_count
    known.loaded(KEYS[0], Span(6))
    rows, forgotten = known.changed_since(count)
    assert {(row["capability"], row["model"]) for row in rows} == {KEYS[0].name, ("text", "")}
    assert forgotten == []


SETTINGS = [ModelKey("text", "a", f"settings {n}") for n in range(SETTINGS_KEPT_COUNT + 2)]


def settings_of(rows: list[dict[str, Any]], model: str = "a") -> set[str]:
    return {row["settings_key"] for row in rows if row["model"] == model}


@pytest.mark.spec("A17")
def test_settings_of_a_model_that_were_used_longest_ago_are_forgotten_beyond_a_bound() -> None:
    known, other = Estimates(DEFAULTS), ModelKey("text", "b", "settings 0")
    for key in (other, *SETTINGS[:SETTINGS_KEPT_COUNT]):
        known.loaded(key, Span(5))
        known.saw_peak(key, Bytes(7))
    known.ran(SETTINGS[0], Span(1))  # used once more
    count = known.changes_count
    for key in SETTINGS[SETTINGS_KEPT_COUNT:]:
        known.loaded(key, Span(5))
    gone = SETTINGS[1:3]
    left = {key.settings_key for key in SETTINGS} - {key.settings_key for key in gone}
    assert settings_of(known.export()) == left and settings_of(known.export(), "b")
    assert known.changed_since(count)[1] == gone
    assert (known.load_time(gone[0]), known.load_time(SETTINGS[0])) == (0, 5)


@pytest.mark.spec("A17")
def test_rows_beyond_the_bound_are_forgotten_as_they_are_taken_back_the_newest_kept() -> None:
    row = {"peak_bytes": 7, "corrected_bytes": 0, "loads_ns": [5], "wakes_ns": [], "version": 1}
    known = Estimates(DEFAULTS)
    known.restore([row | key._asdict() for key in SETTINGS])
    left = {key.settings_key for key in SETTINGS[2:]}
    assert settings_of(known.export()) == left
    assert known.changed_since(0) == ([], SETTINGS[:2]), "these leave the file, none is written"


@pytest.mark.spec("J5")
def test_runs_give_their_median_and_the_longest_of_the_newest() -> None:
    known, key = Estimates(DEFAULTS), KEYS[0]
    known.loaded(key, Span(5))
    assert known.run_times(key.name) is None
    before = known.changes_count
    for took in (10**12, *range(1, KEPT_COUNT + 1)):
        known.ran(key, Span(took))
    assert known.run_times(key.name) == (KEPT_COUNT // 2 + 1, KEPT_COUNT), "the first is forgotten"
    assert known.changes_count - before == 1 + KEPT_COUNT // SAVED_EACH_COUNT, "few writes"
    known.forget_model(key.name)
    assert known.run_times(key.name) is None


def test_rows_without_a_version_give_their_medians() -> None:
    first = {"capability": "text", "model": "a", "settings_key": "", "peak_bytes": 7}
    known = Estimates(DEFAULTS)
    known.restore([first | {"load_ns": 5, "wake_ns": 3}])
    known.restore([first | {"model": "b", "load_ns": 5}])  # older still
    assert (known.load_time(KEYS[0]), known.wake_time(KEYS[0])) == (5, 3)
    assert known.slowest_load(ModelName("text", "b")) == 5


def test_rows_of_an_unknown_version_are_left_out() -> None:
    known = Estimates(DEFAULTS)
    known.restore([{"version": 99, "capability": "text", "model": "a", "settings_key": ""}])
    assert known.export() == []


# -- rates, hours, followers ----------------------------------------------------------------------

NAMES = [ModelName("text", "a"), ModelName("text", "b"), ModelName("voice", "a")]
USES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(1, 50), st.integers(0, 4 * 10**14)), max_size=25
)


NO_COUNTS = UsageCounts()


def usage_at(now: int) -> Usage:
    return Usage(DEFAULTS.rate_window, DEFAULTS.lasting_window, Instant(now))


@pytest.mark.spec("C3", "C11")
@given(USES, st.integers(0, 10**15))
def test_restored_usage_answers_as_the_exported_one(
    uses: list[tuple[tuple[str, str], int, int]], away_ns: int
) -> None:
    known, saved_at = usage_at(10**15), Instant(10**15)
    for name, times_count, later_ns in sorted(uses, key=lambda use: use[2]):
        saved_at = Instant(10**15 + later_ns)
        for rates in (known.rates, known.lasting_rates, known.hours):
            rates.used(name, times_count, saved_at)
        known.reuse.used(name, times_count)
        known.reuse.loaded(0.1)
        known.transition_counts.setdefault(name, {})[NAMES[0]] = times_count
    now = Instant(saved_at + away_ns)
    restored = usage_at(now)
    restored.restore(through_json(known.export(None, saved_at)), now)
    assert restored.transition_counts == known.transition_counts
    for name in NAMES:
        assert restored.rates.recent(name, now) == known.rates.recent(name, now)
        assert restored.reuse.reuse(name, NO_COUNTS) == known.reuse.reuse(name, NO_COUNTS)
        assert restored.lasting_rates.recent(name, now) == known.lasting_rates.recent(name, now)
        assert restored.hours.ahead(name, now, 3.0) == known.hours.ahead(name, now, 3.0)


def test_usage_from_a_clock_ahead_of_this_one_is_left_out() -> None:
    before, ahead = Instant(10**14), Instant(10**15)
    known, restored = usage_at(ahead), usage_at(before)
    known.rates.used(NAMES[0], 5, ahead)
    restored.restore(through_json(known.export(None, ahead)), before)
    assert restored.rates.recent(NAMES[0], before) == 0
    restored.restore({"version": 99}, before)


@pytest.mark.spec("A17", "N4")
def test_usage_exported_before_reuse_was_learned_is_restored_without_it() -> None:
    now = Instant(10**15)
    known, restored = usage_at(now), usage_at(now)
    known.rates.used(NAMES[0], 5, now)
    exported = through_json(known.export(None, now))
    del exported["reuse"]
    restored.restore(exported, now)
    assert restored.rates.recent(NAMES[0], now) == 5
    assert restored.reuse.clock == 0


@pytest.mark.spec("A17")
def test_next_epoch_adds_the_overhead_that_the_last_one_measured() -> None:
    driver, later = CoreDriver(), CoreDriver()
    driver.resident(0, "a", 30, explicit=False)
    driver.engines["a"] = {CPU: 36}
    for t in (1, 2):
        driver.read(t)
    driver.at(3, ev.EngineGone(NodeId("n"), TicketId("a"), True))
    later.arbiter.restore_learned(through_json(driver.arbiter.export_learned()))
    [grant] = later.ask(3, "b", 20, explicit=False)
    assert isinstance(grant, Grant) and grant.devices[0].size_bytes == 26 << 30


@pytest.mark.spec("A17")
def test_next_epoch_corrects_after_a_failure_for_memory_in_the_last_one() -> None:
    driver, later = CoreDriver(), CoreDriver()
    driver.ask(0, "a", 20)
    driver.at(1, ev.LoadBroke(TicketId("a"), "out of memory", True))
    later.arbiter.restore_learned(through_json(driver.arbiter.export_learned()))
    for one in (driver, later):
        one.gone(2, "a")
        [grant] = [d for d in one.ask(3, "a2", 20, model="a") if isinstance(d, Grant)]
        assert grant.devices[0].size_bytes > 20 << 30
