"""The replays of the last day: in a process of their own, with the demand of a living core."""

import asyncio
import os

import pytest

from arbiter.core import events as ev
from arbiter.replay.recorded import DemandReader
from arbiter.server.day_replays import DayReplays
from deployments.config.boot import DAY_REPLAY
from tests.support.core_driver import s
from tests.support.replays import in_turns, read_by

EVERY_S = 60.0


def replays(module: str = DAY_REPLAY) -> DayReplays:
    """Of a core that met twelve uses in twelve minutes."""
    reader = DemandReader()
    settings = read_by(reader, in_turns(12, EVERY_S))
    found = DayReplays(module, settings, lambda: s(12 * EVERY_S))
    found._reader = reader
    return found


@pytest.mark.spec("K2")
async def test_the_day_is_replayed_in_another_process() -> None:
    day = replays()
    niceness = os.nice(0)
    await day.replay()
    assert day.last
    loads = {policy: score.loads_count for policy, score in day.last.scores.items()}
    assert loads == {"chosen": 12, "lru": 12, "belady": 7}
    assert os.nice(0) == niceness


@pytest.mark.spec("K2")
async def test_a_replay_that_fails_leaves_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    day = replays("deployments.no_such_module")
    await day.replay()
    assert day.last is None
    assert "No module named" in caplog.text


@pytest.mark.spec("K2")
async def test_replay_that_fails_in_a_way_not_foreseen_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    day, failures = replays(), [KeyError("uses")]

    async def answer(_: bytes) -> object:
        if failures:
            raise failures.pop()
        return None

    monkeypatch.setattr(day, "_answer", answer)
    await day.replay()
    assert "the last day is not replayed for the metrics: KeyError('uses')" in caplog.text
    caplog.clear()
    await day.replay()
    assert not caplog.text


@pytest.mark.spec("K2")
async def test_nothing_is_replayed_while_no_model_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the uses that there are, and again after the next."""
    day, asked, twice = replays(), 0, asyncio.Event()

    async def answer(_: bytes) -> object:
        nonlocal asked
        asked += 1
        if asked == 2:
            twice.set()
        return None

    monkeypatch.setattr(day, "_answer", answer)
    running = asyncio.ensure_future(day.run(0.0))
    for _ in range(100):
        await asyncio.sleep(0)
    assert asked == 1
    seat = in_turns(1, EVERY_S).seats[0]
    wants = ev.Requested("t", "text-0", "text", "a", seat.need)  # type: ignore[arg-type]
    day.note(wants, s(13 * EVERY_S), [])
    async with asyncio.timeout(60):
        await twice.wait()
    running.cancel()


@pytest.mark.spec("K2")
def test_the_noted_demand_is_bounded() -> None:
    """The oldest uses go, and the replay says since when it knows."""
    most, reader = 100, DemandReader(100)
    read_by(reader, in_turns(300, 10.0))
    assert reader.uses_count >= 300
    kept = reader.demand()
    assert 0.9 * most <= len(kept.uses) <= most
    assert reader.began(s(0)) >= s(1_000)
    assert not reader._keys or len(reader._keys) <= 3
