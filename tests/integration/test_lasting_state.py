"""What outlives the arbiter on a real cluster: registrations from Python, and what was learned."""

import asyncio
import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from arbiter.client.admin import call_arbiter, record_arbiter, start_arbiter, stop_arbiter
from arbiter.core.types import CapabilitySpec, Floor, ModelSpec
from arbiter.errors import CapabilityConflict, UnknownCapability
from arbiter.protocol import messages
from arbiter.server import state_lock
from arbiter.units import seconds
from deployments.config import boot, runtime_settings
from deployments.config.schema import Table, parse_table
from deployments.front.access import keys
from tests.support import pages
from tests.support.live_arbiter import LiveArbiter, capability, gone, kill, live_arbiter, model
from tests.support.waits import WITHIN_S, eventually

pytestmark = pytest.mark.usefixtures("cluster")
VAD = CapabilitySpec("vad", "vad", "m:f", (ModelSpec("silero", seconds(60)),), seconds(300))


async def new_epoch(d: LiveArbiter) -> None:
    first = (await d.state())["epoch"]
    await asyncio.to_thread(record_arbiter, str(d.folder / f"events-{first}"))
    await d.until(lambda s: s["epoch"] > first)


def changed(d: LiveArbiter, **capabilities: Any) -> messages.Configuration:
    """The table with other capabilities."""
    return boot.configuration(parse_table(boot.as_plain(d.table) | {"capabilities": capabilities}))


async def registered_is_known() -> None:
    """Raises UnknownCapability when it is not."""
    await call_arbiter("set_floor", "vad", "silero", Floor.COLD, within_s=WITHIN_S)


@pytest.mark.spec("A2", "A18")
async def test_registration_outlives_a_kill_of_the_arbiter_and_a_change_of_the_table() -> None:
    async with live_arbiter() as d:
        await call_arbiter("register", VAD)
        before = await d.arbiter_pid()
        kill(before)
        await gone(before)
        await registered_is_known()
        await call_arbiter("configure", changed(d, chat=capability(b=model(10))))
        await registered_is_known()
        with pytest.raises(CapabilityConflict):
            await call_arbiter("configure", changed(d, vad=capability(c=model(10))))
        assert await d.holder().ask.remote("b") == 200
        await call_arbiter("unregister", "vad")
        with pytest.raises(UnknownCapability) as caught:
            await registered_is_known()
        assert caught.value.known == ("chat",)


@pytest.mark.spec("A2", "C12", "J5")
async def test_what_was_set_goes_on_in_the_next_life_unless_the_file_has_changed() -> None:
    async with live_arbiter() as d:
        first = await runtime_settings.read_config()
        tasks = {"sum": {"ladder": ["a"]}}
        said = await runtime_settings.change_config(first.generation, {"bypass_count": 3}, tasks)
        await d.until(lambda s: s["epoch"] > 0 and s["generation"] == said.generation)
        await call_arbiter("register", VAD)

        await begin_another_life(d.table)
        again = await runtime_settings.read_config()
        assert (again.generation, again.table) == (said.generation, said.table)
        await registered_is_known()
        await call_arbiter("configure", boot.configuration(d.table))  # the front reads its file
        assert await runtime_settings.read_config() == again

        edited = d.table.arbiter.model_copy(update={"bypass_count": 7})
        await begin_another_life(d.table.model_copy(update={"arbiter": edited}))
        other = await runtime_settings.read_config()
        assert (other.generation, other.table.arbiter.bypass_count) == (said.generation + 1, 7)
        assert not other.table.tasks
        await registered_is_known()
        await call_arbiter("unregister", "vad")
        await begin_another_life(d.table)
        with pytest.raises(UnknownCapability):
            await registered_is_known()


async def begin_another_life(table: Table) -> None:
    """Ends the arbiter in order, as the end of its cluster does, and starts it from a file."""
    await asyncio.to_thread(stop_arbiter, 20.0)
    await start_arbiter(boot.boot(table))


@pytest.mark.spec("C1", "C12")
async def test_role_and_a_capability_of_it_reach_a_running_arbiter_with_one_change() -> None:
    async with live_arbiter({"chat": capability(a=model(20))}) as d:
        chat = d.holder()
        assert await chat.ask.remote("a") == 200
        before = await d.state()
        table = boot.as_plain(d.table)
        table["arbiter"] |= {"roles": {"wiki": {"rank": 1, "act": "its pages are missing"}}}
        table["capabilities"] |= {"pages": capability("wiki", w=model(20))}
        wanted = boot.configuration(parse_table(table))
        await call_arbiter("change_settings", wanted, before["generation"])
        await d.until(lambda s: s["epoch"] > before["epoch"])
        assert await d.holder("pages").ask.remote("w") == 200
        assert await d.states() == {"a": "resident", "w": "resident"}


@pytest.mark.spec("A17")
async def test_load_time_line_outlives_a_restart() -> None:
    """The first load of another model of the capability is predicted from it: as many bytes take
    as long."""
    models = {name: model(50, load_seconds=0.5) for name in "ab"}
    async with live_arbiter({"chat": capability(**models)}) as d:
        h = d.holder()
        assert await h.ask.remote("a") == 200
        [first] = await eventually(lambda: loads(d, "a"))
        await new_epoch(d)
        assert await h.ask.remote("b") == 200
        [load] = await eventually(lambda: loads(d, "b"))
        assert not first["predicted_ns"]
        assert load["predicted_ns"] / 1e9 == pytest.approx(first["took_s"])


async def loads(d: LiveArbiter, name: str) -> list[messages.Plain]:
    """Those of a model that the arbiter has heard the end of."""
    return [e for e in await d.events("model_load") if e["model"] == name]


@pytest.mark.spec("C11")
async def test_habit_outlives_a_restart() -> None:
    """Three times `b` followed `a`; in the next epoch the use of `a` brings `b` in."""
    async with live_arbiter({"chat": capability(a=model(50), b=model(50))}, preload="history") as d:
        h = d.holder()
        for name in "ababab":
            assert await h.ask.remote(name) == 200
            if name == "b":
                await eventually(lambda: size_is_learned(d, "b"))
            await unload_all(d)
        await new_epoch(d)
        assert await h.ask.remote("a") == 200
        await d.until(lambda s: {t["model"] for t in s["tickets"]} == {"a", "b"})
        [told] = await d.events("model_preload")
        assert (told["model"], told["after"], told["why"]) == ("b", "a", "history")


async def size_is_learned(d: LiveArbiter, name: str) -> bool:
    return any(line["model"] == name for line in await d.events("estimate_error"))


async def unload_all(d: LiveArbiter) -> None:
    state = await d.until(lambda s: all(t["idle_s"] is not None for t in s["tickets"]))
    for ticket in state["tickets"]:
        await call_arbiter("unload", ticket["ticket"])
    await d.until(lambda s: not s["tickets"])


@pytest.mark.spec("A18")
async def test_system_whose_state_file_another_has_says_so_and_starts_once_that_has_ended(
    tmp_path: Path,
) -> None:
    file = tmp_path / "arbiter.sqlite"
    lock = state_lock.hold(file, "of another system")
    assert lock is not None
    with pytest.raises(RayActorError) as refused:
        async with live_arbiter(state_file=str(file)):
            raise AssertionError("it started")
    for word in ("StateFileInUse", str(file), "of another system", "arbiter.state_file"):
        assert word in str(refused.value)
    os.close(lock)
    async with live_arbiter(state_file=str(file)) as d:
        assert await d.holder().ask.remote("a") == 200
        pid = await d.arbiter_pid()
        kill(pid)
        await gone(pid)
        await d.until(lambda state: len(state["holders"]) == 1)
        assert await d.arbiter_pid() != pid, "Ray's next one is not locked out"


@pytest.mark.spec("M3", "A17")
async def test_arbiter_of_a_restored_backup_knows_the_size_of_a_model(tmp_path: Path) -> None:
    """Both blocks of docs/deploy.md, as they stand there."""
    deploy = pages.blocks(pages.ROOT / "docs" / "deploy.md")
    back_up, restore = (block for block in deploy if block.text.startswith("STATE="))
    home = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    folder = tmp_path / "state" / "serve-arbiter"
    keys.ensure_first(folder / "keys.json")
    pages.as_checkout(tmp_path)
    table = {"chat": capability(a=model(50, load_seconds=0.5))}
    file = str(folder / "arbiter.sqlite")
    async with live_arbiter(table, state_file=file) as d:
        assert await d.holder().ask.remote("a") == 200
        [unknown] = await eventually(lambda: loads(d, "a"))
        await eventually(lambda: loads_kept(file))
        await asyncio.to_thread(pages.run, back_up.text, tmp_path, home)
    shutil.rmtree(folder)
    await asyncio.to_thread(pages.run, restore.text, tmp_path, home)
    async with live_arbiter(table, state_file=file) as d:
        assert await d.holder().ask.remote("a") == 200
        [known] = await eventually(lambda: loads(d, "a"))
    assert not unknown["predicted_ns"]
    assert known["predicted_ns"] / 1e9 == pytest.approx(unknown["took_s"])


def loads_kept(state_file: str) -> int:
    """How many loads of models are in it; what else is learned may be written sooner."""
    with sqlite3.connect(state_file) as db:
        rows = [json.loads(row[0]) for row in db.execute("SELECT value FROM learned_rows")]
    return sum(len(row.get("loads_ns", ())) for row in rows)
