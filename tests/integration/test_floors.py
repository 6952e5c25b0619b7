"""Managed from outside, and removal, on a real cluster."""

import asyncio
from typing import Any

import pytest

from arbiter.client import call_arbiter, subscribe
from arbiter.errors import NotResident, UnknownModel
from arbiter.events import Floor
from deployments import boot
from tests.support.desk import WITHIN_S, capability, desk, model

pytestmark = pytest.mark.usefixtures("cluster")


async def first(kind: str, after: int) -> dict[str, Any]:
    async with asyncio.timeout(WITHIN_S):
        async for event in subscribe(after):
            if event["kind"] == kind:
                return event
    raise AssertionError("a subscription does not end")


@pytest.mark.spec("D2", "D8", "J7")
async def test_a_control_plane_says_what_is_resident_and_requests_load_nothing() -> None:
    managed = {"chat": capability(a=model(50)) | {"managed": "external"}}
    async with desk(managed) as d:
        holder = d.holder()
        with pytest.raises(NotResident):
            await holder.ask.remote("a")
        seen = (await d.state())["sequence"]
        await call_arbiter("set_floor", "chat", "a", Floor.DEVICE)
        assert (await first("model_load", seen))["model"] == "a"
        assert await holder.ask.remote("a") == 200
        await d.until(lambda s: s["tickets"][0]["idle_s"] is not None)
        await call_arbiter("set_floor", "chat", "a", Floor.COLD)
        await d.until(lambda s: not s["tickets"])
        with pytest.raises(NotResident):
            await holder.ask.remote("a")
        await d.books_are_true()


@pytest.mark.spec("D9")
async def test_a_removed_model_leaves_the_device_the_host_and_what_was_learned() -> None:
    both = {"chat": capability(a=model(50), b=model(50))}
    async with desk(both) as d:
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        seen = (await d.state())["sequence"]
        table = d.table.model_dump(mode="json", exclude_defaults=True)
        del table["capabilities"]["chat"]["models"]["a"]
        await call_arbiter("configure", boot.configuration(type(d.table).model_validate(table)))
        assert (await first("model_removed", seen))["model"] == "a"
        assert not (await d.state())["tickets"] and await d.engines() == {}
        with pytest.raises(UnknownModel):
            await holder.ask.remote("a")
        assert await holder.ask.remote("b") == 200
