"""The score of a replay."""

from dataclasses import replace

from arbiter.replay.score import Score, closed
from arbiter.units import Bytes, Span


def test_closed_gap_is_a_fraction_of_the_distance_to_the_best() -> None:
    worse, best = Score(9, 9, 0, 9, 0, 9, Bytes(100), Span(50), Span(0)), None
    best = replace(worse, missed_count=5, moved_bytes=Bytes(100), waited=Span(10))
    half = closed(worse, best, replace(worse, missed_count=7, waited=Span(20)))
    assert (half.missed_fraction, half.moved_fraction, half.waited_fraction) == (0.5, None, 0.75)
