"""Slabs on a real cluster: the agent lends them, the arbiter has those of removed models erased."""

import contextlib
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.node.slab_files import SlabFiles
from arbiter.pool import Rows, Slab, SlabView
from arbiter.pool.layout import tenant_digest
from arbiter.pool.slab_file import save as slab_save
from arbiter.protocol.messages import SlabRequest, SpawnSpec
from arbiter.units import KIB, MIB, Bytes, Content, TicketId
from deployments.config import boot
from models.train_vision import QUESTIONS
from tests.support.drawings import drawing, uri
from tests.support.engine_host import slab_bytes
from tests.support.live_arbiter import ENGINE, LiveArbiter, capability, live_arbiter, model
from tests.support.slabs import slab_file, writer
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("D9", "E6", "G4")
async def test_slabs_of_a_removed_model_are_erased_once_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBITER_ADAPTERS", str(tmp_path))
    copies = [tmp_path / f"@{tenant}" / ("a" * 32) for tenant in ("acme", "other")]
    for copy in copies:
        copy.mkdir(parents=True)
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
        await eventually(lambda: [copy.is_dir() for copy in copies] == [False, True])


BUDGET = 128 * MIB
KEPT = {  # by model, which all become idle at the same time
    "talk": Content.KV,
    "law": Content.ADAPTER,
    "eyes": Content.PICTURE,
    "chat": Content.KV,
}


@pytest.mark.spec("E4", "C4")
async def test_idle_slabs_leave_in_the_order_of_their_contents_between_the_watermarks() -> None:
    table = {"chat": capability(**{name: model(50) for name in KEPT})}
    async with live_arbiter(table, host_pool=BUDGET) as d:
        await _lend(d, *KEPT)
        agent = (await (await d.agent()).pids.remote())["agent"]
        with contextlib.ExitStack() as stack:
            slabs = {name: stack.enter_context(_writer(agent, name)) for name in KEPT}
            for name, percent in {"talk": 25, "law": 20, "eyes": 20, "chat": 18}.items():
                _grow(slabs[name], percent)
            await d.until(lambda s: _idle(s) == set(KEPT) and _filled(s) >= 0.83)
            _grow(slabs["talk"], 27)  # the next reading shows it, so that a turn has passed
            await d.until(lambda s: _filled(s) >= 0.85)
            assert await d.events("slab_dropped") == [], "it is below the high mark"
            _grow(slabs["chat"], 28)
            state = await d.until(lambda s: _idle(s) == {"talk", "law", "chat"})
            assert 0.7 < _filled(state) <= 0.8, "no more than the low mark asks for"
            _grow(slabs["chat"], 48)
            state = await d.until(lambda s: _idle(s) == {"talk", "chat"})
            told = [(e["content"], e["owner"], e["reason"]) for e in await d.events("slab_dropped")]
            assert told == [("picture", "chat/eyes", "full"), ("adapter", "chat/law", "full")]


@pytest.mark.spec("B4")
async def test_budgets_of_ram_fall_by_what_slabs_of_each_content_take_of_it() -> None:
    """So that they lend no more and no less than before of what is free, whatever else takes RAM
    meanwhile."""
    names = ("talk", "law", "eyes")
    table = {"chat": capability(**{name: model(50) for name in names})}
    async with live_arbiter(table, arenas={}) as d:
        await _lend(d, *names)
        before = _beyond_free(await d.until(lambda s: not s["tickets"]))
        assert before.keys() == {"cpu", "host"}
        agent = (await (await d.agent()).pids.remote())["agent"]
        with contextlib.ExitStack() as stack:
            for count, name in enumerate(names, start=1):
                slab = stack.enter_context(_writer(agent, name))
                _grow(slab, 50)
                # A slab that grew during a reading is all on the books with the next.
                await d.until(partial(_is_level, before, count / 2))


ADAPTERS = tuple(f"a{number}" for number in range(8))
RANK = 256  # of their slots, so that their images take more than two extents of 32 MiB
SEEN = (0, 60, 150)  # of the drawings
GROWS_BY = {"kv": 32 * MIB, "adapter": 64 * MIB, "picture": 32 * MIB}


@pytest.mark.spec("B4")
async def test_budgets_of_ram_count_every_byte_of_the_slabs_that_engines_of_vllm_fill(
    tiny: Path, describer: Path
) -> None:
    """As many as the kernel says, whatever else takes RAM meanwhile."""
    async with live_arbiter(_writers(tiny, describer), arenas={}) as d:
        agent = (await d.pids())["agent"]
        chat, vision = d.holder("chat"), d.holder("vision")
        await _complete(chat, "talk", tokens=8)  # no whole block
        await _see(vision)
        before = await d.until(lambda s: _slabs(s).keys() == GROWS_BY.keys() and _adds_up(s, agent))
        for name in ("talk", *ADAPTERS):
            await _complete(chat, name, tokens=200)
        await _see(vision, *SEEN)

        def is_stored(state: dict[str, Any]) -> bool:
            rows = {kind: slab["rows_count"] for kind, slab in _slabs(state).items()}
            return (rows["adapter"], rows["picture"]) == (len(ADAPTERS), len(SEEN))

        after = await d.until(lambda s: is_stored(s) and _adds_up(s, agent))
        assert all(slab["ticket"] for slab in _slabs(after).values()), "their engines serve"
        for kind, least in GROWS_BY.items():
            sizes = [_slabs(state)[kind]["allocated_bytes"] for state in (before, after)]
            assert sizes[1] - sizes[0] >= least, kind


def _writers(text: Path, eyes: Path) -> dict[str, Any]:
    """A model of text with adapters, and a model of vision, each by vLLM."""
    slots = {"folder": f"{text}-adapters", "max_rank": RANK, "slots": 2}
    args = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": "32 MiB"}
    common = {"can_sleep": False, "keep_warm_s": -1, "engine_args": args}
    talk = {"source": str(text), "adapters": slots, **common}
    sees = {"source": str(eyes), "keep_kv": False, **common}
    return {
        "chat": {"role": "text", "engine": "vllm", "models": {"talk": talk}},
        "vision": {"role": "vision", "engine": "vllm", "models": {"eyes": sees}},
    }


async def _complete(holder: Any, name: str, tokens: int) -> None:
    """Has the model go on after so many with its adapter of that name, or by itself."""
    body = {"model": name, "prompt": [n + 3 for n in range(tokens)], "max_tokens": 1}
    raw = json.dumps(body).encode()
    said = json.loads(await holder.post.remote("talk", "/v1/completions", raw))
    assert said["model"] == name, said


async def _see(holder: Any, *drawings: int) -> None:
    """Has the model answer about each drawing, or without one."""
    text = {"type": "text", "text": QUESTIONS["describe"][0]}
    pictures = [{"type": "image_url", "image_url": {"url": uri(drawing(n))}} for n in drawings]
    for parts in [[picture, text] for picture in pictures] or [[text]]:
        body = {"model": "eyes", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        raw = json.dumps(body).encode()
        said = json.loads(await holder.post.remote("eyes", "/v1/chat/completions", raw))
        assert said["choices"], said


def _slabs(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By content, of which each has one."""
    found = {row["slab"]["content"]: row["slab"] for row in state["slabs"]}
    assert len(found) == len(state["slabs"])
    return found


def _adds_up(state: dict[str, Any], agent: int) -> bool:
    """Whether the slabs are as large as the kernel says, and each budget of RAM counts them: what
    is foreign in it has their bytes beside those that are neither free nor an engine's."""
    slabs = slab_bytes(agent)
    engines = sum(x["measured_bytes"] for x in state["devices"])
    counted = []
    for x in state["devices"]:
        assert x["free_bytes"] + x["charged_bytes"] + x["foreign_bytes"] == x["budget_bytes"]
        others = x["capacity_bytes"] - x["physical_free_bytes"] - engines - slabs
        counted.append(x["foreign_bytes"] - others)
    assert len(counted) == 2, "of the CPU and of the host"
    shown = sum(slab["allocated_bytes"] for slab in _slabs(state).values())
    return shown == slabs and all(abs(size - slabs) <= MIB for size in counted)


def _beyond_free(state: dict[str, Any]) -> dict[str, int]:
    """What each budget of RAM would lend beyond what is physically free; less than none."""
    return {x["kind"]: x["free_bytes"] - x["physical_free_bytes"] for x in state["devices"]}


def _is_level(before: dict[str, int], part: float, state: dict[str, Any]) -> bool:
    """Whether slabs fill this part of the pool, and each budget is as far from what is free as
    before."""
    beyond = _beyond_free(state)
    is_near = all(abs(beyond[kind] - size) <= 2 * MIB for kind, size in before.items())
    return _filled(state) >= part and is_near


async def _lend(d: LiveArbiter, *names: str) -> None:
    """Has an engine with a slab run in the place of each model's, until the holder sees that its
    own are gone."""
    holder = d.holder()
    for name in names:
        assert await holder.ask.remote(name) == 200
    agent, pid = await d.agent(), await holder.pid.remote()
    os.kill(pid, signal.SIGSTOP)
    try:
        for row in (await d.state())["tickets"]:
            name = row["model"]
            slab = SlabRequest(KEPT[name], f"chat/{name}", f"key-{name}")
            spec = SpawnSpec(ENGINE, {"served_name": name, "engine_args": {}}, slabs=(slab,))
            await agent.respawn.remote(TicketId(row["ticket"]), spec)
    finally:
        os.kill(pid, signal.SIGCONT)
    await d.until(lambda s: _idle(s) == set(names))


def _writer(agent: int, name: str) -> contextlib.closing[Slab]:
    """The slab of a model, opened as its engine would."""
    [path, *_] = [
        f
        for f in Path(f"/proc/{agent}/fd").iterdir()
        if _target(f).split(" ")[0].endswith(f".key-{name}.chat/{name}")
    ]
    row, extent = Bytes(64 * KIB), Bytes(MIB)
    return contextlib.closing(Slab(path, KEPT[name], b"n" * 32, row, extent_bytes=extent))


def _target(descriptor: Path) -> str:
    """What a descriptor of another process is open on; nothing once it has closed it."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(descriptor)
    return ""


def _grow(slab: Slab, percent: int) -> None:
    """To so much of the pool's budget, although it is idle and has no limit to grow to."""
    while slab.allocated_bytes < percent * BUDGET // 100:
        slab.file.limit_bytes = slab.file.capacity
        slab.grow()


def _idle(state: dict[str, Any]) -> set[str]:
    slabs = [row["slab"] for row in state["slabs"]]
    return {slab["owner"].partition("/")[2] for slab in slabs if not slab["ticket"]}


def _filled(state: dict[str, Any]) -> float:
    """The part of the budget that all slabs take."""
    return float(sum(row["slab"]["allocated_bytes"] for row in state["slabs"]) / BUDGET)


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
