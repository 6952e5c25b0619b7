"""The event log (K1): as JSON lines up to the last unload of a shutdown, and how much it keeps."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from arbiter.client.admin import call_arbiter, stop_arbiter
from arbiter.protocol import messages
from arbiter.server.event_log import LINES_MOST
from arbiter.units import MIB
from deployments.config import boot
from deployments.config.schema import parse_table
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("K1")]


async def test_event_file_tells_of_a_shutdown_and_what_it_unloaded(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    async with live_arbiter(event_file=str(file)) as d:
        assert await d.holder().ask.remote("a") == 200
        await d.until(lambda s: s["tickets"][0]["idle_s"] is not None)
        heard = await d.events()
        await asyncio.to_thread(stop_arbiter, 20.0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[: len(heard)] == heard
    numbers = [line["seq"] for line in lines]
    assert numbers == list(range(numbers[0], numbers[0] + len(lines)))
    kinds = [line["kind"] for line in lines[len(heard) :]]
    [unload] = [line for line in lines if line["kind"] == "model_unload"]
    assert (unload["reason"], unload["to"], unload["model"]) == ("shutdown", "gone", "a")
    assert unload["size_bytes"] > 0 and unload["took_s"] is not None
    assert kinds.index("closing") < kinds.index("model_unload")


async def test_idle_model_that_holds_more_than_its_ticket_leaves_because_all_do_not_fit() -> None:
    both = {"chat": capability(a=model(50, can_sleep=False), b=model(100, can_sleep=False))}
    both["chat"]["models"]["a"]["engine_args"]["bytes"] = 300 * MIB
    async with live_arbiter(both) as d:
        h = d.holder()
        await h.keep.remote("b")
        assert await h.ask.remote("a") == 200
        await d.until(lambda s: [t["model"] for t in s["tickets"]] == ["b"])
        [unload] = await d.events("model_unload")
        assert (unload["model"], unload["reason"]) == ("a", "fit")
        assert unload["size_bytes"] > 200 * MIB  # as measured last, not as granted
        await d.books_are_true()


async def test_ring_keeps_the_newest_lines_and_no_more() -> None:
    """Each configuration sets the floor of 3,000 models, and each floor is a line."""
    async with live_arbiter() as d:
        for floor in ("host", "cold"):
            models = {f"m{i}": model(10, floor=floor) for i in range(3_000)}
            await call_arbiter("configure", with_capability(d, capability(**models)))
        lines, newest = await d.events(), (await d.state())["sequence"]
        assert len(lines) == LINES_MOST < 2 * 3_000
        assert [line["seq"] for line in lines] == list(range(newest - LINES_MOST + 1, newest + 1))
        assert [line["floor"] for line in lines if line["kind"] == "floor_set"][-3_000:] == [
            "cold"
        ] * 3_000


def with_capability(d: LiveArbiter, made: dict[str, Any]) -> messages.Configuration:
    """The table with this one beside its own."""
    table = boot.as_plain(d.table)
    table["capabilities"] |= {"many": made}
    return boot.configuration(parse_table(table))
