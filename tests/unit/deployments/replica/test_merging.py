"""When one adapter takes nearly all requests, its requests go to a copy that has it in its weights,
and as soon as that is not what they ask for, to the model again."""

import asyncio
import errno
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from arbiter.core.decisions import Reason
from arbiter.errors import TicketClosed
from arbiter.protocol import messages
from arbiter.units import TicketId
from deployments.adapters.safe_files import AdaptersAway
from deployments.replica import merging
from deployments.replica.held_model import HolderState
from deployments.replica.merging import Merging, TrafficShare
from tests.support.adapters import write
from tests.support.hung_folders import failing_folder, hung_folders
from tests.support.scripted_holder import ScriptedClient, ScriptedEngine, holder, revoke, until

pytestmark = pytest.mark.spec("F7")
SHAPES = {"layers.0.q_proj": (12, 8)}
COPY = "a+merged"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "LOOK_S", 0.01)


def table(folder: Path) -> dict[str, Any]:
    merge = {"share": 0.75, "requests": 4}
    adapters = {"folder": str(folder / "in"), "slots": 2, "merge": merge}
    model = {"source": str(folder / "base"), "adapters": adapters, "need": {"weights": 5}}
    return {"capabilities": {"c": {"role": "text", "engine": "vllm", "models": {"a": model}}}}


@asynccontextmanager
async def merging_holder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, grants: bool = True
) -> AsyncIterator[tuple[Any, Merging, ScriptedClient, ScriptedEngine]]:
    (folder / "base").mkdir()
    weights = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    save_file(weights, folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text("{}")
    monkeypatch.setenv("ARBITER_ADAPTERS", str(folder / "store"))
    write(folder / "in" / "x", SHAPES)
    write(folder / "in" / "y", SHAPES, rank=4)
    async with holder() as (residency, arbiter, engine):
        residency._on_command(messages.ConfigChanged(table(folder)))
        plan = await residency.plan("a")
        arbiter.grants_at_once = grants
        yield residency, Merging(residency, "a", plan.config), arbiter, engine


async def serve(of: Merging, *names: str) -> list[str]:
    """Which held model serves each request: those for `a` itself, and for adapters of it."""
    return [await of.served_by(f"a:{name}" if name != "a" else name, "default") for name in names]


async def merge(residency: Any, of: Merging, name: str = "x") -> None:
    await serve(of, *[name] * 4)
    await until(lambda: COPY in residency.models)
    await until(lambda: residency.models[COPY].state is HolderState.RESIDENT)


def test_share_counts_the_last_requests_once_there_are_enough() -> None:
    share = TrafficShare(4)
    for name in ("x", "y", "x"):
        share.note(name)
    assert share.of("x") is None
    for name in ("x", "x", "x"):
        share.note(name)
    assert (share.of("x"), share.of("y")) == (1.0, 0.0)
    share.forget()
    assert share.of("x") is None


async def test_adapter_with_the_share_is_merged_and_its_requests_go_to_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, arbiter, _):
        assert await serve(of, "x", "y", "a", "x", "x") == ["a"] * 5  # a half, then three quarters
        assert not arbiter.requests
        assert await serve(of, "x") == ["a"]
        await until(lambda: COPY in residency.models)
        await until(lambda: residency.models[COPY].state is HolderState.RESIDENT)
        plan = residency.models[COPY].plan
        assert plan.config["served_name"] == "a:x" and "adapters" not in plan.config
        merged = json.loads((Path(plan.config["merged"]) / "adapter_config.json").read_text())
        assert merged["r"] == 8, "the checked copy of x"
        assert not plan.slab_contents and plan.need.host_bytes == 0
        assert await serve(of, "x", "y", "a", "x") == [COPY, "a", "a", COPY]


async def test_copy_without_room_is_asked_for_again_a_window_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch, grants=False) as (residency, of, arbiter, _):
        await serve(of, *"xxxx")
        await until(lambda: arbiter.requests)
        arbiter.says(COPY, TicketClosed(TicketId("t")))
        await until(lambda: COPY not in residency.models and of._copy is None)
        assert await serve(of, *"xxx") == ["a"] * 3
        await asyncio.sleep(0)
        assert len(arbiter.requests) == 1
        await serve(of, "x")
        await until(lambda: len(arbiter.requests) == 2)


def replaced(folder: Path) -> None:
    write(folder / "in" / "x", SHAPES, rank=2)


def removed(folder: Path) -> None:
    shutil.rmtree(folder / "in" / "x")


@pytest.mark.spec("D5")
@pytest.mark.parametrize("change", [replaced, removed])
async def test_copy_of_an_adapter_that_changed_serves_no_request_more_and_leaves(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, arbiter, _):
        await merge(residency, of)
        async with residency.use(COPY) as begun:
            change(tmp_path)
            assert await serve(of, "x") == ["a"]
            await until(lambda: COPY not in residency.models)
            assert begun.is_open, "what it has begun it finishes"
        await until(lambda: "Released" in arbiter.kinds() and of._copy is None)


@pytest.mark.spec("D5")
async def test_copy_of_a_removed_adapter_leaves_without_any_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, arbiter, _):
        await merge(residency, of)
        removed(tmp_path)
        await until(lambda: COPY not in residency.models and "Released" in arbiter.kinds())


async def test_adapter_replaced_while_its_copy_loads_is_not_served_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, arbiter, engine):
        engine.loaded.clear()
        await serve(of, *"xxxx")
        await until(lambda: COPY in residency.models and residency.models[COPY].link)
        replaced(tmp_path)
        assert await serve(of, "x") == ["a"]
        await until(lambda: COPY not in residency.models and "Released" in arbiter.kinds())


async def test_copy_leaves_when_its_adapter_has_less_than_half_of_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, _, _):
        await merge(residency, of)
        assert await serve(of, *"xxyyx") == [COPY, COPY, "a", "a", COPY], "a half is enough"
        assert await serve(of, *"aax") == ["a", "a", "a"], "and the next request is already not its"
        await until(lambda: COPY not in residency.models)
        await until(lambda: of._copy is None)
        await merge(residency, of, "y")
        assert residency.models[COPY].plan.config["served_name"] == "a:y"


async def test_copy_that_was_revoked_hands_its_requests_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, _, _):
        await merge(residency, of)
        async with residency.use(COPY):
            revoke(residency, Reason.SWAP, model=COPY)
            assert await serve(of, "x") == ["a"], "its barrier is up"
        await until(lambda: COPY not in residency.models)
        assert await serve(of, "x") == ["a"]


async def test_tenants_adapter_of_the_same_name_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, _, _):
        write(tmp_path / "in" / "@acme" / "x", SHAPES, rank=2)
        await merge(residency, of)
        assert await of.served_by("a:x", "acme") == "a"
        assert await of.served_by("a:x", "default") == COPY


@pytest.mark.spec("D5")
async def test_server_that_hangs_delays_requests_for_adapters_and_none_for_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, _, _):
        await merge(residency, of)
        with hung_folders(monkeypatch) as server:
            asked = asyncio.ensure_future(serve(of, "x"))
            assert await serve(of, "a") == ["a"]
            assert not asked.done()
            of.end()
            await until(lambda: COPY not in residency.models)
            server.set()
            assert await asked == ["a"]


@pytest.mark.spec("D5")
async def test_copy_stays_while_the_folder_of_its_adapter_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, _, _):
        await merge(residency, of)
        copy = of._copy
        assert copy is not None
        with monkeypatch.context() as away:
            failing_folder(away, tmp_path / "in" / "x", errno.EIO)
            with pytest.raises(AdaptersAway):
                await serve(of, "x")
            await of._end_if_useless(copy)
        assert await serve(of, "x") == [COPY]


@pytest.mark.spec("E6")
async def test_copy_of_a_removed_tenants_adapter_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with merging_holder(tmp_path, monkeypatch) as (residency, of, _, _):
        write(tmp_path / "in" / "@default" / "x", SHAPES)
        await merge(residency, of)
        of.forget_tenant("other")
        assert await serve(of, "x") == [COPY]
        of.forget_tenant("default")
        assert await serve(of, "x") == ["a"]
        await until(lambda: COPY not in residency.models)
