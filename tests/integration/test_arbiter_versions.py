"""One arbiter's code replaces another's only when nobody holds anything of it, or when told to."""

import asyncio

import pytest

from arbiter.client.admin import start_arbiter, upgrade_arbiter
from arbiter.protocol import messages
from deployments.config import boot
from tests.support.live_arbiter import live_arbiter

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A20")]


async def test_an_upgrade_keeps_every_engine_and_holder() -> None:
    async with live_arbiter() as d:
        h = d.holder()
        await h.ask.remote("a")
        before = await d.until(lambda s: all(t["measured_bytes"] for t in s["tickets"]))
        engines, agent = await d.engines(), (await d.pids())["agent"]
        report = await asyncio.to_thread(upgrade_arbiter, boot.read)
        assert report["holders"] == 1 and report["epoch"] > before["epoch"]
        after = await d.until(lambda s: s["tickets"] and s["tickets"][0]["measured_bytes"])
        assert after["tickets"][0]["ticket"] == before["tickets"][0]["ticket"]
        assert await d.engines() == engines and (await d.pids())["agent"] != agent
        assert await h.ask.remote("a") == 200
        await d.books_are_true()


async def test_other_code_does_not_replace_an_arbiter_with_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with live_arbiter() as d:
        await d.holder().ask.remote("a")
        pid = await d.arbiter_pid()
        monkeypatch.setattr(messages, "identity", lambda: "9.9.9/other")
        with pytest.raises(messages.VersionMismatch, match="arbiter upgrade"):
            await start_arbiter(boot.boot(d.table))
        assert await d.arbiter_pid() == pid


async def test_arbiter_without_holders_is_replaced_by_other_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with live_arbiter() as d:
        pid = await d.arbiter_pid()
        monkeypatch.setattr(messages, "identity", lambda: "9.9.9/other")
        await start_arbiter(boot.boot(d.table))
        assert await d.arbiter_pid() != pid
