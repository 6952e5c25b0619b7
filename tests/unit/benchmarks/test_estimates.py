"""The best constant, and figures computed anew from a report's rows."""

import json
import statistics

import pytest

from benchmarks import estimates


def missed(constant: float, seen: list[float]) -> float:
    return statistics.median(abs(constant - x) / x for x in seen)


@pytest.mark.parametrize(
    "seen", [[1.0, 1.0, 1.0, 10.0], [1.0, 2.0, 3.0, 9.0, 10.0], [1.0, 10.0], [4.0]]
)
def test_best_constant_has_the_smallest_error_of_all_constants(seen: list[float]) -> None:
    best = missed(estimates.best_constant(seen), seen)
    between = [min(seen) + n / 1000 * (max(seen) - min(seen)) for n in range(1001)]
    assert best <= min(missed(constant, seen) for constant in (*between, *seen))


def test_best_constant_is_not_the_median() -> None:
    seen = [1.0] * 4 + [3.0] * 3 + [3.2] * 3
    assert missed(estimates.best_constant(seen), seen) < missed(statistics.median(seen), seen)


def test_figures_are_computed_anew_from_the_rows_of_a_report() -> None:
    rows = [("a", 90, 100, 0.0, 2.0), ("b", 300, 250, 1.0, 1.5), ("a", 100, 100, 2.0, 2.5)]
    found = estimates.figures([estimates.Load(*row) for row in rows])
    report = json.loads(json.dumps(found))
    again = estimates.figures([estimates.Load(**row) for row in report["rows"]])
    assert json.loads(json.dumps(again)) == report
