"""Managed from outside, and removal, on a real cluster."""

import json
import sqlite3
from pathlib import Path

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.types import Floor
from arbiter.errors import NotResident, UnknownModel
from arbiter.units import MIB
from deployments.config import boot
from tests.support.live_arbiter import capability, first, live_arbiter, model
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("D2", "D8", "J7")
async def test_a_control_plane_says_what_is_resident_and_requests_load_nothing() -> None:
    managed = {"chat": capability(a=model(50)) | {"managed": "external"}}
    async with live_arbiter(managed) as d:
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


@pytest.mark.spec("D1", "D8")
async def test_configured_floor_loads_its_model_unasked_and_a_table_without_it_lets_it_go() -> None:
    async with live_arbiter({"chat": capability(a=model(50, floor="device"), b=model(50))}) as d:
        holder = d.holder()
        assert await holder.pid.remote()
        await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["resident"])
        table = d.table.model_dump(mode="json", exclude_defaults=True)
        del table["capabilities"]["chat"]["models"]["a"]["floor"]
        await call_arbiter("configure", boot.configuration(type(d.table).model_validate(table)))
        await d.until(lambda s: not s["tickets"])
        await d.books_are_true()


@pytest.mark.spec("D1", "B4")
async def test_model_with_the_host_floor_sleeps_when_its_keep_warm_time_is_over() -> None:
    table = {"chat": capability(a=model(50, floor="host", keep_warm_s=0.5))}
    async with live_arbiter(table) as d:
        holder = d.holder()
        for times in (1, 2):
            assert await holder.ask.remote("a") == 200
            state = await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["asleep"])
            [unload] = (await d.events("model_unload"))[times - 1 :]
            assert (unload["reason"], unload["to"]) == ("idle", "asleep")
        assert len(await d.events("model_load")) == len(await d.events("model_wake")) == 1
        [ticket] = state["tickets"]
        [host] = [x for x in state["devices"] if x["kind"] == "host"]
        assert host["charged_bytes"] == ticket["charged_bytes"][host["device"]] >= 50 * MIB
        await call_arbiter("set_floor", "chat", "a", Floor.COLD)
        await d.until(lambda s: not s["tickets"])
        assert ticket["ticket"] not in await d.engines()
        await d.books_are_true()


@pytest.mark.spec("D9")
async def test_removed_model_leaves_the_device_and_later_requests_are_refused() -> None:
    both = {"chat": capability(a=model(50), b=model(50))}
    async with live_arbiter(both) as d:
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


@pytest.mark.spec("D9")
async def test_model_removed_while_in_use_serves_on_and_then_leaves_with_its_rates() -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(50))}) as d:
        holder = d.holder()
        assert await holder.ask.remote("b") == 200
        await holder.keep.remote("a")
        file = Path(d.table.arbiter.state_file or "")
        await eventually(lambda: usage_names(file, "a"))
        table = d.table.model_dump(mode="json", exclude_defaults=True)
        del table["capabilities"]["chat"]["models"]["a"]
        await call_arbiter("configure", boot.configuration(type(d.table).model_validate(table)))
        [ticket] = [t for t in (await d.state())["tickets"] if t["model"] == "a"]
        assert ticket["inflight"] == 1 and ticket["ticket"] in await d.engines()
        assert not await d.events("model_removed")
        await holder.let_go.remote("a")
        await d.until(lambda s: [t["model"] for t in s["tickets"]] == ["b"])
        await eventually(lambda: usage_names(file, "b") and not usage_names(file, "a"))
        await d.books_are_true()


def usage_names(state_file: Path, model: str) -> bool:
    """Whether rates or transitions of a model are saved; they are with each look at the nodes."""
    with sqlite3.connect(f"file:{state_file}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT value FROM session_facts WHERE name = 'usage'").fetchall()
    return any(json.dumps(model) in row[0].decode() for row in rows)


def learned(state_file: Path) -> set[str]:
    """Models of which the state file says something. A row without a model is of a capability."""
    with sqlite3.connect(f"file:{state_file}?mode=ro", uri=True) as db:
        return {row[0] for row in db.execute("SELECT model FROM learned_rows") if row[0]}


async def is_learned(state_file: Path, of: set[str]) -> None:
    await eventually(lambda: learned(state_file) == of)


@pytest.mark.spec("D9")
async def test_a_model_removed_while_it_sleeps_leaves_the_host_and_the_state_file() -> None:
    async with live_arbiter({"chat": capability(a=model(200), b=model(200))}) as d:
        holder = d.holder()
        for name in ("a", "b"):
            assert await holder.ask.remote(name) == 200
        await d.until(lambda s: any(t["state"] == "asleep" for t in s["tickets"]))
        file = Path(d.table.arbiter.state_file or "")
        await is_learned(file, {"a", "b"})
        seen = (await d.state())["sequence"]
        table = d.table.model_dump(mode="json", exclude_defaults=True)
        del table["capabilities"]["chat"]["models"]["a"]
        await call_arbiter("configure", boot.configuration(type(d.table).model_validate(table)))
        assert (await first("model_removed", seen))["model"] == "a"
        state = await d.until(lambda s: len(s["tickets"]) == 1)
        host = next(x for x in state["devices"] if x["device"].endswith("/host"))
        assert state["tickets"][0]["model"] == "b" and host["charged_bytes"] == 0
        await is_learned(file, {"b"})
        await d.books_are_true()
