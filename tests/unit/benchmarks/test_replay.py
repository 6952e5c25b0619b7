"""Traces: thinning keeps shares, skew is the service's, a missing trace says what to do."""

import pytest

from arbiter.core.settings import DEFAULTS
from arbiter.units import Instant
from benchmarks.replay import mixes, traces
from benchmarks.replay.table import Case, mean_closed, run


@pytest.mark.spec("N4")
def test_default_policy_beats_lru_on_clients_with_a_daily_swing() -> None:
    """The public traces say by how much (docs/benchmarks.md); drawn ones must agree in kind."""
    arrivals = traces.synthetic(2000, seed=5)
    case = Case("synthetic", mixes.SERVER, 0.3)
    means = mean_closed(list(run(case, arrivals, arrivals[-1][0] / 2, [DEFAULTS.evict], seed=5)))
    assert means[DEFAULTS.evict]["waited_fraction"] > 0.2
    assert means["belady"]["waited_fraction"] == 1.0


def test_thinning_keeps_each_clients_share_and_a_seed_gives_the_same_arrivals() -> None:
    windows = {0: [(t * 600.0, 9.0, 5.0) for t in range(99)], 1: [(0.0, 99.0, 1.0)]}
    drawn = traces.thinned(windows, 0.02, seed=1)
    assert drawn == traces.thinned(windows, 0.02, seed=1) == sorted(drawn)
    counts = [sum(client == c for _, client in drawn) for c in (0, 1)]
    assert counts[0] == pytest.approx(99 * 600 * 9 * 0.02, rel=0.1)
    assert counts[1] == pytest.approx(600 * 99 * 0.02, rel=0.15)
    assert all(at < 600 for at, client in drawn if client == 1)


def test_trace_skew_is_that_of_the_service_it_is_named_for() -> None:
    weights = traces.skew()
    assert sum(weights[:5]) / sum(weights) == pytest.approx(0.7, abs=1e-6)
    assert len(weights) == 87


def test_missing_traces_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARBITER_TRACES", raising=False)
    with pytest.raises(traces.TracesAbsent, match="--synthetic"):
        traces.folder(None)


def test_a_budget_holds_the_largest_model_however_small_its_share() -> None:
    asked = mixes.demand([(0.0, 1), (5.0, 2)], mixes.SERVER, 0.0001, seed=1)
    largest = max(seat.need.device_bytes for seat in asked.seats)
    assert asked.nodes[0].devices[0].total_bytes >= largest
    assert asked.uses.end == Instant(5_000_000_000)
