"""Slabs on a real cluster: the agent lends them, the arbiter has those of removed models erased."""

import os
import signal
from pathlib import Path

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.node.slab_files import SlabFiles
from arbiter.protocol.messages import SlabRequest, SpawnSpec
from arbiter.units import MIB, Bytes, Content, TicketId
from deployments.config import boot
from tests.support.live_arbiter import ENGINE, capability, live_arbiter, model
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("D9", "E6")
async def test_slabs_of_a_removed_model_are_erased_once_it_has_left() -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(50))}) as d:
        holder = d.holder()
        for name in ("a", "b"):
            assert await holder.ask.remote(name) == 200
        asked: list[SlabRequest] = []
        agent, pid = await d.agent(), await holder.pid.remote()
        os.kill(pid, signal.SIGSTOP)  # so that it does not miss the engines that it had
        try:
            for row in (await d.state())["tickets"]:
                name = row["model"]
                slab = SlabRequest(Content.KV, f"chat/{name}", f"key-{name}")
                asked.append(slab)
                spec = SpawnSpec(ENGINE, {"served_name": name, "engine_args": {}}, slabs=(slab,))
                await agent.respawn.remote(TicketId(row["ticket"]), spec)
            await d.until(lambda s: [bool(x["slab"]["ticket"]) for x in s["slabs"]] == [True, True])
        finally:
            os.kill(pid, signal.SIGCONT)
        await d.until(lambda s: [x["slab"]["ticket"] for x in s["slabs"]] == [None, None])
        folder = Path(d.table.arbiter.state_file or "").with_name("slabs")
        files = [SlabFiles(folder, Bytes(MIB))._path(request) for request in asked]
        for file in files:
            file.touch()
        table = d.table.model_dump(mode="json", exclude_defaults=True)
        del table["capabilities"]["chat"]["models"]["a"]
        await call_arbiter("configure", boot.configuration(type(d.table).model_validate(table)))
        await d.until(lambda s: [x["slab"]["owner"] for x in s["slabs"]] == ["chat/b"])
        [dropped] = await d.events("slab_dropped")
        assert (dropped["owner"], dropped["reason"]) == ("chat/a", "removed")
        await eventually(lambda: not [f for f in files if f.exists()][1:])
        assert [request.owner for request, f in zip(asked, files, strict=True) if f.exists()] == [
            "chat/b"
        ]
