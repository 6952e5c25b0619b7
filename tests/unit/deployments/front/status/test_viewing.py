"""One subscription at the arbiter for all who look at the console."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from deployments.front.status.viewing import Viewing
from deployments.monitoring.view import Facts
from tests.support.console_front import ScriptedArbiter
from tests.support.waits import eventually

Messages = AsyncIterator[dict[str, Any]]


async def facts() -> Facts:
    return Facts({"talk": "chat", "next": "chat"})


@pytest.fixture
def arbiter() -> ScriptedArbiter:
    made = ScriptedArbiter()
    made.books.holds("talk", 300)
    made.tell("model_load", "talk")
    return made


@pytest.fixture
def viewing(arbiter: ScriptedArbiter) -> Viewing:
    async def state() -> Any:
        return await arbiter("state")

    async def events(after: int, wait_s: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await arbiter("events", after, wait_s)
        return found

    return Viewing(state, events)


async def first(messages: Messages, part: str) -> dict[str, Any]:
    """The next message that has this part."""
    async with asyncio.timeout(60):
        async for message in messages:
            if part in message:
                return message
    raise AssertionError("the stream has ended")


@pytest.mark.spec("K4")
async def test_a_viewer_gets_all_rows_and_events_and_then_only_what_changes(
    viewing: Viewing, arbiter: ScriptedArbiter
) -> None:
    async with aclosing(viewing.follow(facts, 0)) as stream:
        begun = await first(stream, "view")
        assert {row["model"] for row in begun["models"]} == {"talk", "next"}
        assert [event["kind"] for event in begun["events"]] == ["model_load"]
        assert begun["view"]["devices"][0]["parts"][0]["label"] == "talk"
        assert begun["samples"][0]["is_first"]
        arbiter.books.leaves("talk")
        arbiter.tell("model_unload", "talk", reason="swap", to="gone")
        later = await first(stream, "models")
        assert [(row["model"], row["state"]) for row in later["models"]] == [("talk", "cold")]
        assert "policy" not in later["view"] and "devices" in later["view"]
        assert [event["mark"] for event in later["events"]] == ["talk leaves: swap"]
        assert not later["samples"][-1]["is_first"]


@pytest.mark.spec("K4")
async def test_twenty_viewers_share_one_subscription(
    viewing: Viewing, arbiter: ScriptedArbiter
) -> None:
    streams = [viewing.follow(facts, 0) for _ in range(20)]
    for stream in streams:
        await first(stream, "view")
    await eventually(lambda: arbiter.waiting == 1)
    assert viewing.viewers_count == 20
    before = arbiter.calls["state"]
    arbiter.books.holds("next", 10)
    arbiter.tell("model_load", "next")
    for stream in streams:
        changed = (await first(stream, "models"))["models"]
        assert ("next", "resident") in [(row["model"], row["state"]) for row in changed]
    assert arbiter.calls["state"] == before + 1
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.spec("K4")
async def test_without_a_viewer_the_arbiter_is_asked_nothing(
    viewing: Viewing, arbiter: ScriptedArbiter
) -> None:
    assert not arbiter.calls
    async with aclosing(viewing.follow(facts, 0)) as stream:
        await first(stream, "view")
        await eventually(lambda: arbiter.waiting == 1)
    await eventually(lambda: arbiter.waiting == 0)
    before = arbiter.calls.copy()
    arbiter.tell("model_load", "talk")
    for _ in range(100):
        await asyncio.sleep(0)
    assert arbiter.calls == before


@pytest.mark.spec("K4")
async def test_at_rest_no_state_is_read_until_something_happens(
    viewing: Viewing, arbiter: ScriptedArbiter
) -> None:
    async with aclosing(viewing.follow(facts, 0)) as stream:
        await first(stream, "view")
        await eventually(lambda: arbiter.waiting == 1)
        reads, polls = arbiter.calls["state"], arbiter.calls["events"]
        again = asyncio.ensure_future(first(stream, "models"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert (arbiter.calls["state"], arbiter.calls["events"]) == (reads, polls)
        arbiter.books.holds("next", 10)
        arbiter.tell("model_load", "next")
        await again
        assert arbiter.calls["state"] == reads + 1


@pytest.mark.spec("K4", "A18")
async def test_viewers_are_told_that_the_arbiter_is_away_and_back(
    viewing: Viewing, arbiter: ScriptedArbiter
) -> None:
    async with aclosing(viewing.follow(facts, 0)) as stream:
        await first(stream, "view")
        arbiter.is_away = True
        assert (await first(stream, "away_unix_s"))["away_unix_s"] is not None
        arbiter.is_away = False
        arbiter.books.epoch = 2
        back = await first(stream, "away_unix_s")
        assert (back["away_unix_s"], back["view"]["epoch"]) == (None, 2)


@pytest.mark.spec("K4")
async def test_a_stream_resumes_behind_the_last_event_that_a_viewer_has(
    viewing: Viewing, arbiter: ScriptedArbiter
) -> None:
    async with aclosing(viewing.follow(facts, 0)) as stream:
        seen = (await first(stream, "events"))["events"][-1]["seq"]
    arbiter.tell("model_unload", "talk", reason="idle", to="gone")
    async with aclosing(viewing.follow(facts, seen)) as stream:
        told = (await first(stream, "events"))["events"]
    assert [event["kind"] for event in told] == ["model_unload"]


@pytest.mark.spec("K4")
async def test_a_viewer_hears_of_a_bug_instead_of_waiting_for_ever(
    arbiter: ScriptedArbiter,
) -> None:
    async def broken() -> Any:
        raise LookupError("no such field")

    async def events(after: int, wait_s: float) -> list[dict[str, Any]]:
        return []

    viewing = Viewing(broken, events)
    async with aclosing(viewing.follow(facts, 0)) as stream:
        with pytest.raises(LookupError, match="no such field"):
            await first(stream, "view")
