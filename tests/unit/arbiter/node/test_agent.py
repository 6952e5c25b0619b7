"""A node agent without Ray: what it reads and reports of its engines."""

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from arbiter.core import events as ev
from arbiter.core.types import ModelName
from arbiter.node import host_copies, procfs, reports
from arbiter.node.device_probe import Readings, Tree
from arbiter.pool import Rows, SavedRows, Slab
from arbiter.protocol.messages import CopyRequest, SlabRequest, SpawnSpec
from arbiter.units import MIB, Bytes, Content, DeviceId, NodeId, TicketId, seconds
from deployments.engines.lent import receive
from tests.support.engine_host import is_gone, until
from tests.support.heap_trims import begun_trims
from tests.support.host_copies import Grants
from tests.support.local_agent import BROKEN_ZYGOTE, FAKE_ENGINE, START_S, agent_in
from tests.support.waits import eventually

T = TicketId("t")

pytestmark = pytest.mark.usefixtures("granted")


@pytest.mark.spec("A10")
async def test_end_of_an_engine_is_reported_during_a_slow_reading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: asyncio.Queue[ev.Event] = asyncio.Queue()
    is_over = threading.Event()

    async def send(events: tuple[ev.Event, ...]) -> bool:
        for event in events:
            said.put_nowait(event)
        return True

    def read(trees: list[Tree], pool_bytes: int) -> Readings:
        is_over.wait(START_S)
        return Readings((), ())

    running = agent_in(folder)
    monkeypatch.setattr(running._reports, "send", send)
    monkeypatch.setattr(running._probe, "read", read)
    async with asyncio.timeout(START_S / 2):
        await running.spawn(T, FAKE_ENGINE)
        await running.kill(T)
        assert await said.get() == ev.EngineGone(NodeId("n"), T, bytes_back=True)
    is_over.set()
    await running.close()


@pytest.mark.spec("A10", "B1")
async def test_reading_is_taken_again_when_an_engine_came_or_went_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of the one may be lent again by then, and those of the other count as foreign."""
    reported: list[ev.Event] = []
    taken: list[tuple[threading.Event, list[TicketId]]] = []
    other = TicketId("other")

    async def send(events: tuple[ev.Event, ...]) -> bool:
        reported.extend(events)
        return True

    def read(trees: list[Tree], pool_bytes: int) -> Readings:
        names = [tree.ticket for tree in trees]
        taken.append((is_over := threading.Event(), names))
        if len(taken) <= 3:
            is_over.wait(START_S)
        return Readings((), tuple(ev.EngineReading(name, ()) for name in names))

    def readings() -> list[list[TicketId]]:
        measured = [event for event in reported if isinstance(event, ev.Measured)]
        return [[engine.ticket for engine in reading.engines] for reading in measured]

    running = agent_in(folder)
    monkeypatch.setattr(running._reports, "send", send)
    monkeypatch.setattr(running._probe, "read", read)
    async with asyncio.timeout(START_S):
        await eventually(lambda: taken)
        await running.spawn(T, FAKE_ENGINE)
        taken[0][0].set()
        await eventually(lambda: len(taken) == 2)
        await running.spawn(other, FAKE_ENGINE)
        await running.kill(T)
        await eventually(lambda: ev.EngineGone(NodeId("n"), T, bytes_back=True) in reported)
        taken[1][0].set()
        await eventually(lambda: len(taken) == 3)
        assert readings() == [] and taken[1][1] == [T]
        taken[2][0].set()
        assert (await eventually(readings))[0] == [other]
        await running.close()


@pytest.mark.spec("A10", "B1")
async def test_reading_at_whose_end_an_engine_dies_is_taken_again(
    no_arbiter: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held was measured, and was not in use any more: as much of others' would be missing
    from what is foreign, before the agent hears of the end."""
    running = agent_in(folder, BROKEN_ZYGOTE)
    engine = subprocess.Popen(["sleep", "1000"])
    reads_count = itertools.count(1)

    def read(trees: list[Tree], pool_bytes: int) -> Readings:
        if (count := next(reads_count)) == 1:
            engine.kill()
            os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)
        host = ev.DeviceReading(DeviceId("n/host"), Bytes(1), Bytes(count))
        return Readings((host,), ())

    monkeypatch.setattr(running, "_trees", lambda: [Tree(T, frozenset([engine.pid]))])
    monkeypatch.setattr(running._probe, "read", read)
    async with asyncio.timeout(START_S):
        [host] = (await running._read()).devices
        assert host.foreign_bytes == 2
        await running.close()
    engine.wait()


@pytest.mark.spec("A10", "B1")
async def test_reading_comes_where_engines_come_and_go_without_end_and_names_none_that_ended(
    no_arbiter: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = agent_in(folder, BROKEN_ZYGOTE)
    numbers = itertools.count()

    def trees() -> list[Tree]:
        newest = next(numbers)
        return [Tree(TicketId(f"t{number}"), frozenset()) for number in (newest, newest + 1)]

    def read(trees: list[Tree], pool_bytes: int) -> Readings:
        return Readings((), tuple(ev.EngineReading(tree.ticket, ()) for tree in trees))

    monkeypatch.setattr(running, "_trees", trees)
    monkeypatch.setattr(running._probe, "read", read)
    async with asyncio.timeout(START_S):
        reading = await running._read()
        there = next(numbers) - 1  # when it was begun and when it was over
        assert [engine.ticket for engine in reading.engines] == [f"t{there}"]
        await running.close()


@pytest.mark.spec("A18", "D1")
async def test_reading_is_taken_once_the_arbiter_is_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One from before would deny what a model that fell asleep meanwhile gave back."""
    is_asked, is_back = asyncio.Event(), asyncio.Event()
    reported: list[ev.Event] = []
    read_when_back: list[bool] = []

    async def send(events: tuple[ev.Event, ...]) -> bool:
        is_asked.set()
        await is_back.wait()
        reported.extend(events)
        return True

    def read(trees: list[Tree], pool_bytes: int) -> Readings:
        read_when_back.append(is_back.is_set())
        return Readings((), ())

    running = agent_in(folder, BROKEN_ZYGOTE)
    monkeypatch.setattr(running._reports, "send", send)
    monkeypatch.setattr(running._probe, "read", read)
    async with asyncio.timeout(START_S):
        await is_asked.wait()
        is_back.set()
        await eventually(lambda: reported)
        assert read_when_back[0]
        await running.close()


@pytest.mark.spec("A17")
async def test_readings_of_engines_are_exact_while_the_zygote_that_forked_them_lives(
    folder: Path,
) -> None:
    running = agent_in(folder)
    async with asyncio.timeout(START_S):
        await running.spawn(T, FAKE_ENGINE)
        reading = ev.EngineReading(T, ())
        assert running._with_exactness(reading).exact
        dead = running._engines.supervisor.process
        assert dead is not None
        os.kill(dead[0], 9)
        await eventually(lambda: not running._engines.supervisor.is_alive())
        assert not running._with_exactness(reading).exact
        await eventually(
            lambda: (
                running._engines.supervisor.process not in (dead, None)
                and running._engines.supervisor.is_up
            )
        )
        assert not running._with_exactness(reading).exact
        await running.close()


async def test_what_an_engine_leaves_in_its_folder_and_in_shared_memory_is_removed_with_it(
    folder: Path,
) -> None:
    running = agent_in(folder)
    scratch = running._engines.children.scratch(T)
    spec_that_litters = SpawnSpec(
        FAKE_ENGINE.entry, {"served_name": "m", "engine_args": {"litter": True}}
    )
    async with asyncio.timeout(START_S):
        await running.spawn(T, spec_that_litters)
        await eventually(lambda: scratch.exists() and [p.name for p in scratch.iterdir()])
        assert scratch.stat().st_mode & 0o077 == 0
        [block] = await eventually(lambda: [*Path("/dev/shm").glob(f"{scratch.stem}-*")])
        await running.kill(T)
        await eventually(lambda: not scratch.exists() and not block.exists())
        await running.close()


@pytest.mark.spec("E1", "G4")
async def test_engine_is_told_of_its_slab_and_of_the_file_of_an_earlier_one(
    no_arbiter: None, folder: Path
) -> None:
    slabs = folder / "slabs"
    running = agent_in(folder, BROKEN_ZYGOTE, pool_bytes=Bytes(256 * MIB), slabs_folder=str(slabs))
    request = SlabRequest(Content.KV, "chat/m", "k", (("acme", 0.25),))
    spec = SpawnSpec(
        "a:b", {"model": "m"}, slabs=(request, replace(request, content=Content.ADAPTER))
    )
    told = (await running._engines._with_slabs(T, spec)).config
    lent = {"socket": str(folder / "n" / "slabs.sock"), "ticket": T, "caps": {"acme": 0.25}}
    assert told == {"model": "m", "slabs": {"kv": lent, "adapter": lent}}
    assert running._pool.lent(T, "kv") != running._pool.lent(T, "adapter")
    files = running._pool.files
    assert files is not None
    files._path(request).touch()
    told = (await running._engines._with_slabs(T, spec)).config
    assert told["slabs"]["kv"].keys() == {"socket", "ticket", "file", "caps"}
    assert Path(told["slabs"]["kv"]["file"]).parent == slabs
    [fd] = running._pool.lent(T, "kv")
    with contextlib.closing(Slab(fd, Content.KV, b"n" * 32, Bytes(MIB))):
        await running.drop_tenant("acme")
    erasing = [slab.must_erase for slab in running._pool.readings()]
    assert sorted(erasing) == [False] * 3 + [True], "only one was ever written"
    await running.drop_slabs("chat/m")
    await running.close()
    assert list(slabs.iterdir()) == []


@pytest.mark.spec("G4")
async def test_end_of_an_agent_leaves_files_of_what_its_engines_kept(
    no_arbiter: None, folder: Path
) -> None:
    slabs = folder / "slabs"
    running = agent_in(folder, BROKEN_ZYGOTE, pool_bytes=Bytes(256 * MIB), slabs_folder=str(slabs))
    request = SlabRequest(Content.KV, "chat/m", "k")
    fd = running._pool.lend(T, request)
    assert fd is not None
    with contextlib.closing(Slab(fd, Content.KV, b"n" * 32, Bytes(MIB))) as slab:
        rows = Rows(slab, 100.0, time.time)
        rows.reserve([b"key"])
        rows.mark_ready(b"key")
    running._pool.take_back(T)
    await running.close()
    again = agent_in(folder, BROKEN_ZYGOTE, pool_bytes=Bytes(256 * MIB), slabs_folder=str(slabs))
    found = again._pool.file_for(request)
    assert found is not None
    saved = SavedRows(Path(found), Content.KV, b"n" * 32, Bytes(MIB), time.time())
    assert set(saved.keys) == {b"key"}
    saved.close()
    await again.close()


async def test_engine_that_asks_for_no_slab_is_told_of_none(no_arbiter: None, folder: Path) -> None:
    running = agent_in(folder, BROKEN_ZYGOTE)
    spec = SpawnSpec("a:b", {"model": "m"})
    assert await running._engines._with_slabs(T, spec) == spec
    await running.close()


@pytest.mark.spec("E1", "G4")
async def test_engine_in_the_place_of_a_killed_one_finds_its_slab(folder: Path) -> None:
    running = agent_in(folder)
    spec = replace(FAKE_ENGINE, slabs=(SlabRequest(Content.KV, "chat/m", "key"),))
    try:
        async with asyncio.timeout(START_S):
            for name in ("first", "second", "third"):
                await running.spawn(TicketId(name), spec)
                [pid, *_] = (await running.engines())[name]
                assert [s.ticket for s in running._pool.readings()] == [name]
                os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: is_gone(pid), START_S)  # the agent had no turn to see it
    finally:
        await running.close()


@pytest.mark.spec("A10", "B1")
async def test_memory_of_a_dropped_slab_is_foreign_until_it_is_given_back(
    no_arbiter: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_foreign: list[int] = []
    is_over = threading.Event()

    def read(trees: list[Tree], shared_bytes: int) -> Readings:
        not_foreign.append(shared_bytes)
        return Readings((), ())

    running = agent_in(folder, BROKEN_ZYGOTE, pool_bytes=Bytes(256 * MIB))
    monkeypatch.setattr(running._probe, "read", read)
    running._pool._thread.submit(is_over.wait, START_S)
    fd = running._pool.lend(T, SlabRequest(Content.KV, "chat/m", "key"))
    assert fd is not None
    with contextlib.closing(Slab(fd, Content.KV, b"n" * 32, Bytes(MIB))) as slab:
        assert slab.grow()
    running._pool.take_back(T)
    running._pool.drop_owner("chat/m")
    await running._read()
    assert running._pool.leaving_bytes
    assert set(not_foreign) == {0}
    is_over.set()
    await running.close()


@pytest.mark.spec("E1", "L4")
async def test_engine_is_handed_its_slabs_by_descriptor_and_no_other_is(folder: Path) -> None:
    running = agent_in(folder)
    wanted = tuple(SlabRequest(c, "chat/m", "key") for c in (Content.KV, Content.ADAPTER))
    slabs = str(folder / "n" / "slabs.sock")
    try:
        async with asyncio.timeout(START_S):
            await running.spawn(T, replace(FAKE_ENGINE, slabs=wanted))
            [pid, *_] = (await running.engines())[T]
            lent = {os.fstat(*running._pool.lent(T, each.content)).st_ino for each in wanted}
            assert len(lent) == 2
            await eventually(lambda: slabs_open_in(pid) == lent)
            for ticket, key in (("other", "kv"), (T, "picture")):
                with pytest.raises(FileNotFoundError):
                    await asyncio.to_thread(receive, slabs, ticket, key)
            await running.kill(T)
            await eventually(lambda: not running._pool.lent(T, "kv"))
            with pytest.raises(FileNotFoundError):
                await asyncio.to_thread(receive, slabs, T, "kv")
    finally:
        await running.close()


@pytest.mark.spec("A10", "E1")
async def test_engine_of_which_an_earlier_agent_left_no_note_keeps_its_slab_and_ends_if_killed(
    folder: Path,
) -> None:
    """The earlier agent died between the fork and its note."""
    running, ended = agent_in(folder), TicketId("ended")
    engines, kv = running._engines, SlabRequest(Content.KV, "chat/m", "key")
    pids = dict[TicketId, int]()
    try:
        async with asyncio.timeout(START_S):
            await running.spawn(TicketId("other"), FAKE_ENGINE)  # the zygote is up
            for ticket in (T, ended):
                spec = await engines._with_slabs(ticket, replace(FAKE_ENGINE, slabs=(kv,)))
                path = engines.children.socket(ticket)
                pids[ticket] = await engines.supervisor.zygote.spawn(ticket, spec, path)
            await eventually(lambda: all(map(slabs_open_in, pids.values())))
            running._pool._slabs.clear()
            await running.kill(ended)  # there is no process of it that the agent knows of
            await engines._adopt()
            await eventually(
                lambda: is_gone(pids[ended]) and ended not in engines.children.by_ticket
            )
            assert {s.ticket for s in running._pool.readings()} == {T, None}
            assert not is_gone(pids[T])
    finally:
        await running.close()


@pytest.mark.spec("E1")
@pytest.mark.usefixtures("granted")
async def test_engine_whose_spawn_is_repeated_before_its_agents_successor_knows_it_keeps_its_slab(
    folder: Path,
) -> None:
    """The replica asks the next agent for the engine that the zygote forked for the earlier one."""
    running = agent_in(folder)
    engines, kv = running._engines, SlabRequest(Content.KV, "chat/m", "key")
    wanted = replace(FAKE_ENGINE, slabs=(kv,))
    try:
        async with asyncio.timeout(START_S):
            await running.spawn(TicketId("other"), FAKE_ENGINE)  # the zygote is up
            zygote, path = engines.supervisor.zygote, engines.children.socket(T)
            pid = await zygote.spawn(T, await engines._with_slabs(T, wanted), path)
            await eventually(lambda: bool(slabs_open_in(pid)))
            running._pool._slabs.clear()
            engines.supervisor.is_up = False
            spawning = asyncio.ensure_future(running.spawn(T, wanted))
            await eventually(lambda: bool(running._pool.lent(T, "kv")))
            await engines._adopt()
            engines.supervisor.is_up = True
            engines.supervisor.announce()
            await spawning
        assert (await running.engines())[T][0] == pid
        lent = {os.fstat(fd).st_ino for fd in running._pool.lent(T, "kv")}
        assert lent == slabs_open_in(pid)
        assert sorted(str(s.ticket) for s in running._pool.readings()) == ["None", T]
    finally:
        await running.close()


@pytest.mark.spec("E4")
async def test_idle_copy_of_weights_leaves_behind_adapters_and_before_kv_where_ram_is_short(
    no_arbiter: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[ev.SlabDropped] = []

    async def hear(events: tuple[ev.Event, ...]) -> bool:
        dropped.extend(d for e in events if isinstance(e, ev.Measured) for d in e.dropped)
        return True

    monkeypatch.setattr(reports.Reports, "send", staticmethod(hear))
    monkeypatch.setattr(reports.Reports, "call", staticmethod(Grants().call))
    running = agent_in(folder, BROKEN_ZYGOTE, pool_bytes=Bytes(256 * MIB), disk_bytes=Bytes(0))
    try:
        for content in (Content.KV, Content.ADAPTER):
            fd = running._pool.lend(T, SlabRequest(content, "chat/m", "key"))
            assert fd is not None
            with contextlib.closing(Slab(fd, content, b"n" * 32, Bytes(MIB))) as slab:
                assert slab.grow()
        (folder / "model.safetensors").write_bytes(bytes(12 * MIB))
        wanted = CopyRequest(ModelName("chat", "w"), str(folder), ("*.safetensors",))
        assert await running._copies.lend(T, wanted)
        running._engines._take_back(T)
        taken = running._pool.allocated_bytes
        all_bytes = taken + running._copies.held_bytes
        running._pool._kept_free_bytes = taken // 2  # so that 0.6 of it must go

        def ram() -> tuple[Bytes, Bytes]:
            held = running._pool.allocated_bytes + running._copies.held_bytes
            return Bytes(10**12), Bytes(all_bytes - held)

        monkeypatch.setattr(procfs, "ram", ram)
        await running.probe()
        await eventually(lambda: len(dropped) == 2)
        assert [(d.content, d.owner, d.reason) for d in dropped] == [
            ("adapter", "chat/m", "pressure"),
            ("weights", "chat/w", "pressure"),
        ]
        assert 12 * MIB <= dropped[1].size_bytes <= 13 * MIB and not running._copies.readings()
        assert [s.content for s in running._pool.readings()] == ["kv"]
    finally:
        await running.close()


@pytest.mark.spec("B1", "D4")
async def test_server_of_a_copys_files_that_hangs_stops_no_reading(
    no_arbiter: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, answers = threading.Event(), threading.Event()
    readings: list[ev.Event] = []

    async def hear(events: tuple[ev.Event, ...]) -> bool:
        readings.extend(e for e in events if isinstance(e, ev.Measured))
        return True

    def hangs(*_: object) -> bool:
        looked.set()
        answers.wait(START_S)
        return False

    monkeypatch.setattr(reports.Reports, "send", staticmethod(hear))
    monkeypatch.setattr(reports.Reports, "call", staticmethod(Grants().call))
    monkeypatch.setattr(host_copies, "SWEEP_S", 0.01)
    monkeypatch.setattr(host_copies, "_has_changed", hangs)
    running = agent_in(folder, BROKEN_ZYGOTE)
    try:
        (folder / "model.safetensors").write_bytes(b"weights")
        wanted = CopyRequest(ModelName("chat", "w"), str(folder), ("*.safetensors",))
        assert await running._copies.lend(T, wanted)
        await eventually(looked.is_set)
        known_count = len(readings)
        for count in (1, 2):
            await running.probe()
            await eventually(lambda count=count: len(readings) >= known_count + count, START_S / 3)
    finally:
        answers.set()
        await running.close()


def slabs_open_in(pid: int) -> set[int]:
    """Their inodes."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith("/memfd:host-pool-"):
                found.add(path.stat().st_ino)
    return found


@pytest.mark.spec("M1")
async def test_node_is_ready_when_its_zygote_has_its_imports_done(
    no_arbiter: None, folder: Path
) -> None:
    running = agent_in(folder)
    assert await running.readiness() == {"state": "starting"}

    async def is_ready() -> bool:
        return (await running.readiness())["state"] == "ready"

    await eventually(is_ready, START_S)
    assert (await running.pids())["zygote"]
    await running.close()


@pytest.mark.spec("M1")
async def test_node_whose_zygote_does_not_stay_up_says_why(no_arbiter: None, folder: Path) -> None:
    running = agent_in(folder, BROKEN_ZYGOTE)

    async def has_failed() -> bool:
        return (await running.readiness())["state"] == "failed"

    await eventually(has_failed, START_S)
    assert "does not start" in (await running.readiness())["cause"]
    await running.close()


@pytest.mark.spec("E6")
async def test_agent_begins_where_the_server_of_tenants_copies_is_away(
    no_arbiter: None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    away, glob = folder / "away", Path.glob

    def looked(path: Path, pattern: str) -> Iterator[Path]:
        if path == away:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", looked)
    running = agent_in(folder, BROKEN_ZYGOTE, tenant_folders=(str(away),))
    await running.close()
    assert str(away) in caplog.text


@pytest.mark.spec("E6")
async def test_copies_of_a_removed_tenants_adapters_leave_its_node(
    no_arbiter: None, folder: Path
) -> None:
    copies = folder / "copies"
    running = agent_in(folder, BROKEN_ZYGOTE, tenant_folders=(str(copies),))
    for place in ("@acme/one", "@other/one", "one"):
        (copies / place).mkdir(parents=True)
        (copies / place / "adapter_config.json").touch()
    await running.drop_tenant("acme", seconds(3_600))
    assert (copies / "@acme" / "one").is_dir(), "it was made since"
    await running.drop_tenant("acme")
    assert sorted(str(p.relative_to(copies)) for p in copies.rglob("one")) == ["@other/one", "one"]
    await running.close()


@pytest.mark.spec("E6")
async def test_copies_of_a_removed_tenant_leave_every_folder_whose_server_answers(
    no_arbiter: None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    away, copies = folder / "away", folder / "copies"
    (copies / "@acme" / "one").mkdir(parents=True)
    running = agent_in(folder, BROKEN_ZYGOTE, tenant_folders=(str(away), str(copies)))
    listed = Path.iterdir

    def looked(path: Path) -> Iterator[Path]:
        if path.is_relative_to(away):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", looked)
    await running.drop_tenant("acme")
    assert not (copies / "@acme").exists()
    assert str(away / "@acme") in caplog.text
    await running.close()


@pytest.mark.spec("E6")
async def test_copies_that_a_killed_agent_was_removing_leave_with_the_next_start_or_removal(
    no_arbiter: None, folder: Path
) -> None:
    copies = folder / "copies"
    left = copies / ".removing-x1" / "law"
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").touch()
    (copies / "one").mkdir()
    running = agent_in(folder, BROKEN_ZYGOTE, tenant_folders=(str(copies), str(copies / "none")))
    assert [p.name for p in copies.iterdir()] == ["one"]
    left.mkdir(parents=True)
    await running.drop_tenant("acme")
    assert [p.name for p in copies.iterdir()] == ["one"]
    await running.close()


async def test_freed_heap_of_an_agent_is_given_back_while_it_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begun_trims(monkeypatch)
    running = agent_in(folder)
    async with asyncio.timeout(START_S):
        await begun.wait()
    await running.close()
