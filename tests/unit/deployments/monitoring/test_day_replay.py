"""What the last day costs under each policy."""

import pytest

from arbiter.core.settings import DEFAULTS
from arbiter.replay.recorded import DAY, DemandReader
from arbiter.units import Instant, seconds
from deployments.monitoring.day_replay import replayed
from tests.support.core_driver import s
from tests.support.replays import LOAD_S, in_turns, read_by

EVERY_S = 60.0


@pytest.mark.spec("K2")
def test_regret_is_what_the_policy_loads_beyond_foresight() -> None:
    reader = DemandReader()
    settings = read_by(reader, in_turns(12, EVERY_S))
    found = replayed(reader, settings, s(12 * EVERY_S))
    assert found and found.span == seconds(12 * EVERY_S)
    loads = {policy: score.loads_count for policy, score in found.scores.items()}
    assert loads == {"chosen": 12, "lru": 12, "belady": 7}
    for score in found.scores.values():
        assert score.loading == seconds(score.loads_count * LOAD_S)


@pytest.mark.spec("K2")
def test_what_is_older_than_a_day_does_not_count() -> None:
    reader = DemandReader()
    settings = read_by(reader, in_turns(12, EVERY_S))
    found = replayed(reader, settings, Instant(DAY + s(7.5 * EVERY_S)))
    assert found and found.span == DAY
    assert found.scores["chosen"].loads_count == 4
    assert replayed(reader, settings, Instant(DAY + s(13 * EVERY_S))) is None


@pytest.mark.spec("K2")
def test_nothing_is_replayed_before_the_first_load() -> None:
    assert replayed(DemandReader(), DEFAULTS, s(1)) is None
