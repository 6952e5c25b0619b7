"""The event log as JSON lines, up to the last unload of a shutdown (K1)."""

import asyncio
import json
from pathlib import Path

import pytest

from arbiter.client.admin import stop_arbiter
from tests.support.live_arbiter import live_arbiter

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
