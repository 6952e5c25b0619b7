"""Slabs on a real cluster: the agent lends them, the arbiter has those of removed models erased."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.node.slab_files import SlabFiles
from arbiter.pool import Rows, SlabView
from arbiter.pool.layout import tenant_digest
from arbiter.pool.slab_file import save as slab_save
from arbiter.protocol.messages import SlabRequest, SpawnSpec
from arbiter.units import MIB, Bytes, Content, TicketId
from deployments.config import boot
from tests.support.live_arbiter import ENGINE, capability, live_arbiter, model
from tests.support.slabs import slab_file, writer
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("D9", "E6", "G4")
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
        _save_row_of("acme", files[-1] if files[-1].exists() else files[0])
        await call_arbiter("remove_tenant", "acme")
        await eventually(lambda: not any(f.exists() for f in files))
        [removed] = await d.events("tenant_removed")
        assert (removed["tenant"], removed["nodes"]) == ("acme", 1)


def _save_row_of(tenant: str, file: Path) -> None:
    """A file with one row, as the agent would have saved it."""
    digest, clock = tenant_digest(tenant), time.time
    with slab_file() as fd, contextlib.closing(writer(fd)) as slab:
        rows = Rows(slab, 100.0, clock)
        rows.reserve([b"key"], tenant=digest)
        rows.mark_ready(b"key", digest)
        with contextlib.closing(SlabView(fd)) as view:
            most, wanted = Bytes(MIB), lambda: True
            assert slab_save(view, file, now_s=clock(), most_bytes=most, is_wanted=wanted) == 1
