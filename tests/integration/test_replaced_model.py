"""A model replaced on disk under its name, on a real cluster."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.replica.model_files import remote_files
from tests.support.engine_host import until
from tests.support.live_arbiter import capability, live_arbiter, model
from tests.support.tools import tool
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("D5")
async def test_a_model_replaced_on_disk_is_loaded_anew_awake_or_asleep(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    both = {
        "chat": capability(a=model(200) | {"source": str(tmp_path)}),
        "other": capability(b=model(200)),
    }
    async with live_arbiter(both) as d:
        chat, other = d.holder("chat"), d.holder("other")
        assert await chat.ask.remote("a") == 200
        [first] = await d.engines()
        weights.write_bytes(b"new")
        assert await chat.ask.remote("a") == 200
        assert len(await d.events("model_load")) == 2, "the next request is not the old engine's"
        await d.until(lambda s: first not in {t["ticket"] for t in s["tickets"]})
        assert await other.ask.remote("b") == 200
        await d.until(lambda s: any(t["state"] == "asleep" for t in s["tickets"]))
        weights.write_bytes(b"newer")
        assert await chat.ask.remote("a") == 200
        assert len(await d.events("model_load")) == 4 and not await d.events("model_wake")
        await d.books_are_true()


@pytest.mark.spec("D5")
async def test_request_that_waits_for_a_load_gets_the_files_that_came_meanwhile(
    tmp_path: Path,
) -> None:
    gate, weights = tmp_path / "gate", tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"old")
    slow = model(50, gate=str(gate)) | {"source": str(weights.parent)}
    async with live_arbiter({"chat": capability(a=slow)}) as d:
        waiting = d.holder().ask.remote("a")
        await eventually(gate.with_suffix(".reached").exists, 60)
        [first] = await d.engines()
        weights.write_bytes(b"newer")
        gate.touch()
        assert await waiting == 200

        async def first_has_gone() -> bool:
            return first not in await d.engines()

        await eventually(first_has_gone)  # the engine that had read the old files never answers
        [second] = await d.engines()
        [load] = await d.events("model_load")
        assert load["ticket"] == second
        await d.books_are_true()


@pytest.mark.spec("D5", "D1")
@pytest.mark.parametrize("wish", [{"pin": True}, {"floor": "device"}], ids=["pinned", "floor"])
async def test_model_that_is_to_stay_loaded_is_back_with_its_new_files_without_a_request(
    tmp_path: Path, wish: dict[str, object]
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    table = {"chat": capability(a=model(50) | {"source": str(tmp_path)} | wish)}
    async with live_arbiter(table) as d:
        d.holder()
        await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["resident"])
        [first] = await d.engines()
        weights.write_bytes(b"newer")
        await d.until(
            lambda s: [t["state"] for t in s["tickets"] if t["ticket"] != first] == ["resident"]
        )
        [unload] = await eventually(lambda: d.events("model_unload"))
        assert (unload["ticket"], unload["reason"]) == (first, "replaced")
        await d.books_are_true()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder, and the same one behind FUSE, where the kernel tells nothing of its changes."""
    bindfs, there, here = tool("bindfs"), tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    process = subprocess.Popen([bindfs, "-f", there, here])
    try:
        until(lambda: here.is_mount() or process.poll() is not None, 60)
        if process.poll() is not None:
            pytest.skip("nothing may be mounted here")
        yield there, here
    finally:
        process.terminate()  # it unmounts itself
        process.wait()


@pytest.mark.spec("D5")
async def test_model_replaced_where_the_kernel_does_not_tell_is_loaded_anew_by_the_next_request(
    mounted: tuple[Path, Path],
) -> None:
    there, here = mounted
    assert remote_files.is_remote(str(here)) and not remote_files.is_remote(str(there))
    weights, new = there / "model.safetensors", there / "new"
    weights.write_bytes(b"old")
    table = {"chat": capability(a=model(50, can_sleep=False) | {"source": str(here)})}
    async with live_arbiter(table) as d:
        holder = d.holder()
        for count in range(1, 5):
            assert await holder.ask.remote("a") == 200
            assert await holder.ask.remote("a") == 200
            assert len(await d.events("model_load")) == count, "one load for each change"
            if count % 2:
                weights.write_bytes(os.urandom(3))  # in place, and as long as before
            else:
                new.write_bytes(os.urandom(3))
                new.rename(weights)
        await d.books_are_true()
