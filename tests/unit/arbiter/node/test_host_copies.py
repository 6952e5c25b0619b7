"""Copies of models' files as a node agent makes, lends, finds and drops them."""

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from arbiter.core.types import DeviceBytes, ModelName
from arbiter.errors import ArbiterUnavailable, HostRamShort, UnknownHostCopy
from arbiter.node import copy_files, copy_lease, group_socket, host_copies, lending_socket, procfs
from arbiter.node.host_copies import HostCopies
from arbiter.protocol.messages import CopyRequest, LeaseCall, LeaseState
from arbiter.units import Bytes, Content, NodeId, TicketId
from deployments.engines.lent import receive
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("D4")
ONE, TWO = ModelName("embedding", "one"), ModelName("embedding", "two")
NODE = NodeId("n")


class Arbiter:
    """Grants every lease, unless a test says otherwise, and answers at once."""

    def __init__(self) -> None:
        self.held: dict[str, LeaseCall] = {}
        self.asked = self.renewed = 0
        self.refuses: Exception | None = None
        self.wants: set[str] = set()  # leases that are to leave

    async def call(self, name: str, *args: Any) -> object:
        if name == "end_lease":
            self.held.pop(args[0], None)
            return None
        [call] = args
        await asyncio.sleep(0)
        if call.lease not in self.held:
            self.asked += 1
            if self.refuses:
                raise self.refuses
        self.held[call.lease] = call
        self.renewed += 1
        is_leaving = call.lease in self.wants and not call.users_count
        return LeaseState(call.ticket, "leaving" if is_leaving else "held", call.devices)


class Node:
    """The copies of a node, and the tasks of its agent."""

    def __init__(self, folder: Path, arbiter: Arbiter) -> None:
        self.folder, self.arbiter, self.tasks = folder, arbiter, list[asyncio.Future[None]]()
        self.copies = HostCopies(NODE, folder, arbiter, self._start)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def lend(self, ticket: str, request: CopyRequest) -> dict[str, Any] | None:
        return await self.copies.lend(TicketId(ticket), request)

    def back(self, ticket: str) -> None:
        self.copies.take_back(TicketId(ticket))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.copies.close()


@pytest_asyncio.fixture
async def node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(group_socket, "FOLDERS", folder)
    made = Node(folder, Arbiter())
    yield made
    await made.close()
    while OPENED:
        os.close(OPENED.pop())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path / "model", b"weights")


def written(folder: Path, content: bytes) -> Path:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.safetensors").write_bytes(content * 1_000)
    (folder / "b.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def request(model: Path, owner: ModelName = ONE, **more: Any) -> CopyRequest:
    return CopyRequest(owner, str(model), ("**/*.safetensors",), **more)


OPENED: list[int] = []


async def handed(lent: dict[str, Any]) -> list[int]:
    """As an engine is; open until the test ends."""
    fds = await asyncio.to_thread(receive, lent["socket"], lent["ticket"], lent["key"])
    OPENED.extend(fds)
    return fds


@pytest.mark.spec("L4")
async def test_files_that_an_engine_is_handed_cannot_be_changed(node: Node, model: Path) -> None:
    lent = await node.lend("t", request(model))
    assert lent
    index, *fds = await handed(lent)
    names = copy_files.read_index(index).names
    assert names == ("b.safetensors", "deep/a.safetensors")
    for fd, name in zip(fds, names, strict=True):
        assert os.pread(fd, 1 << 20, 0) == (model / name).read_bytes()
        assert copy_files.is_sealed(fd)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 0, prot=mmap.PROT_WRITE)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # as its owner may
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        with pytest.raises(PermissionError):
            os.truncate(again, 0)


@pytest.mark.spec("L4")
async def test_only_the_engine_that_was_lent_a_copy_is_handed_it(node: Node, model: Path) -> None:
    lent = await node.lend("t", request(model))
    assert lent
    for other in ({"ticket": "another"}, {"key": "0" * 32}):
        with pytest.raises(FileNotFoundError):
            await handed(lent | other)
    node.back("t")
    with pytest.raises(FileNotFoundError):
        await handed(lent)


@pytest.mark.spec("L4")
async def test_another_users_process_is_handed_nothing(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = await node.lend("t", request(model))
    assert lent and stat.S_IMODE(Path(lent["socket"]).stat().st_mode) == 0o600
    monkeypatch.setattr(lending_socket, "peer_uid", lambda _: os.getuid() + 1)
    with pytest.raises((ConnectionError, FileNotFoundError)):
        await handed(lent)


@pytest.mark.spec("L4")
async def test_words_that_are_no_question_end_the_connection_and_nothing_else(
    node: Node, model: Path
) -> None:
    lent = await node.lend("t", request(model))
    assert lent

    def say(words: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(10)
            peer.connect(lent["socket"])
            peer.sendall(words)
            peer.shutdown(socket.SHUT_WR)
            return peer.recv(10)

    for words in (b"", b"\n", b"[]\n", b"{}\n", b'{"ticket": 1, "key": []}\n', b"\xff" * 500):
        assert await asyncio.to_thread(say, words) == b""
    assert await handed(lent)


async def test_many_loads_at_once_read_the_files_once(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count(monkeypatch, "make")
    lent = await asyncio.gather(*(node.lend(f"t{n}", request(model)) for n in range(5)))
    assert len({row["key"] for row in lent if row}) == 1 and None not in lent
    assert made == [1] and node.arbiter.asked == 1
    [reading] = node.copies.readings()
    assert reading.users == ("t0", "t1", "t2", "t3", "t4") and reading.models == (ONE,)


def count(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """How often it was called, in the one number of the list."""
    real, counted = getattr(copy_files, name), [0]

    def call(*args: Any) -> Any:
        counted[0] += 1
        return real(*args)

    monkeypatch.setattr(copy_files, name, call)
    return counted


async def test_models_of_equal_bytes_share_a_copy_and_others_do_not(
    node: Node, model: Path, tmp_path: Path
) -> None:
    first = await node.lend("t1", request(model))
    equal = await node.lend("t2", request(written(tmp_path / "equal", b"weights"), TWO))
    other = await node.lend("t3", request(written(tmp_path / "other", b"WEIGHTS"), TWO))
    assert first and equal and other
    assert first["key"] == equal["key"] != other["key"]
    renamed = tmp_path / "equal" / "c.safetensors"
    (tmp_path / "equal" / "b.safetensors").rename(renamed)
    layout = await node.lend("t4", request(tmp_path / "equal", TWO))
    assert layout and layout["key"] not in (first["key"], other["key"])


async def test_every_byte_is_on_the_books_from_before_it_is_written(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = copy_files.make, list[int]()

    def make(*args: Any) -> Any:
        [call] = node.arbiter.held.values()
        assert call.terms.on_host and call.users_count == 1
        seen.append(call.size_bytes)
        assert node.copies.held_bytes == call.size_bytes
        return real(*args)

    monkeypatch.setattr(copy_files, "make", make)
    await node.lend("t", request(model))
    [reading] = node.copies.engine_readings()
    [call] = node.arbiter.held.values()
    assert reading.ticket == call.ticket
    assert reading.measured == (DeviceBytes(call.devices[0].device, node.copies.held_bytes),)
    assert 0 < node.copies.held_bytes <= seen[0]


@pytest.mark.parametrize(
    "error", [HostRamShort("m", Bytes(2), Bytes(1)), ArbiterUnavailable(1.0), TimeoutError()]
)
async def test_refused_or_without_an_arbiter_there_is_no_copy(
    node: Node, model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count(monkeypatch, "make")
    node.arbiter.refuses = error
    assert await node.lend("t", request(model)) is None
    assert made == [0] and node.copies.held_bytes == 0


async def test_model_without_such_files_or_with_unreadable_ones_has_no_copy(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await node.lend("t", CopyRequest(ONE, str(model), ("*.gguf",))) is None
    assert await node.lend("t", request(Path("/nonexistent"))) is None

    def make(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(copy_files, "make", make)
    assert await node.lend("t", request(model)) is None
    await eventually(lambda: not node.arbiter.held)


def test_copy_for_which_there_is_no_descriptor_left_keeps_none_open(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sealed = copy_files._sealed, list[int]()

    def short(fd: int) -> int:
        if len(sealed) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        sealed.append(real(fd))
        return sealed[-1]

    monkeypatch.setattr(copy_files, "_sealed", short)
    source = copy_files.look(request(model))
    assert source
    with pytest.raises(OSError, match="Too many open files"):
        copy_files.make(source, "lease", request(model))
    assert len(sealed) == 2
    for fd in sealed:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


async def test_copy_whose_files_cannot_be_looked_at_once_it_is_made_takes_no_memory(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The RAM of a copy is given back with its last descriptor."""
    look, made = copy_files.look, list[copy_files.CopyFiles]()
    make = copy_files.make

    def noted(*given: Any) -> copy_files.CopyFiles:
        made.append(make(*given))
        return made[0]

    def away(asked: CopyRequest) -> copy_files.SourceFiles | None:
        if made:
            raise OSError("its server is away")
        return look(asked)

    monkeypatch.setattr(copy_files, "make", noted)
    monkeypatch.setattr(copy_files, "look", away)
    assert await node.lend("t", request(model)) is None
    assert node.copies.held_bytes == 0 and made
    for fd in made[0].fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    await eventually(lambda: not node.arbiter.held)


@pytest.mark.spec("D5")
async def test_replaced_files_are_another_copy_and_the_old_one_leaves_with_its_last_user(
    node: Node, model: Path
) -> None:
    old = await node.lend("t1", request(model))
    (model / "b.safetensors").write_bytes(b"WEIGHTS")  # as long as before
    new = await node.lend("t2", request(model))
    assert old and new and old["key"] != new["key"]
    assert [r.is_leaving for r in node.copies.readings()] == [True, False]
    assert os.pread((await handed(old))[1], 7, 0) == b"weights"
    assert os.pread((await handed(new))[1], 7, 0) == b"WEIGHTS"
    node.back("t1")
    [left] = node.copies.readings()
    assert left.key == new["key"]
    await eventually(lambda: len(node.arbiter.held) == 1)


@pytest.mark.spec("D5")
async def test_file_that_was_written_lately_is_hashed_again_and_a_settled_one_is_not(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = count(monkeypatch, "key_of")
    await node.lend("t1", request(model))
    await node.lend("t2", request(model))
    assert hashed == [1], "within one tick of the kernel's clock a change leaves no trace"
    monkeypatch.setattr(host_copies, "SETTLED_S", -1.0)
    await node.lend("t3", request(model))
    await node.lend("t4", request(model))
    assert hashed == [2] and len(node.copies.readings()[0].users) == 4


@pytest.mark.spec("D5")
async def test_files_that_change_while_they_are_read_give_no_copy(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copy_files.make

    def make(*args: Any) -> Any:
        made = real(*args)
        (model / "b.safetensors").write_bytes(b"others")
        return made

    monkeypatch.setattr(copy_files, "make", make)
    assert await node.lend("t", request(model)) is None
    assert node.copies.held_bytes == 0
    await eventually(lambda: not node.arbiter.held)


@pytest.mark.spec("D5")
async def test_sweep_lets_a_copy_of_replaced_files_go(node: Node, model: Path) -> None:
    await node.lend("t", request(model))
    node.back("t")
    await node.copies.sweep()
    assert node.copies.readings()
    (model / "b.safetensors").write_bytes(b"WEIGHTS")
    await node.copies.sweep()
    assert not node.copies.readings()
    await eventually(lambda: not node.arbiter.held)


@pytest.mark.spec("D5")
async def test_look_that_hangs_delays_no_sweep_of_other_copies_and_is_not_asked_again(
    node: Node, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (near := tmp_path / "near").mkdir()
    (near / "a.safetensors").write_bytes(b"other weights")
    for ticket, folder in (("far", model), ("near", near)):
        assert await node.lend(ticket, request(folder, TWO if folder is near else ONE))
        node.back(ticket)
    look, is_back, asked = copy_files.look, threading.Event(), list[str]()

    def slow(wanted: CopyRequest) -> Any:
        asked.append(wanted.folder)
        assert wanted.folder == str(near) or is_back.wait(60)
        return look(wanted)

    monkeypatch.setattr(copy_files, "look", slow)
    monkeypatch.setattr(host_copies, "LOOK_S", 0.05)
    (near / "a.safetensors").write_bytes(b"others, and longer")
    (model / "b.safetensors").write_bytes(b"WEIGHTS")

    async def near_has_left() -> bool:
        await node.copies.sweep()
        return [r.models for r in node.copies.readings()] == [(ONE,)]

    try:
        await eventually(near_has_left)
        await node.copies.sweep()
        assert asked.count(str(model)) == 1
    finally:
        is_back.set()
    await eventually(lambda: not node.copies.readings())


async def test_loads_from_a_file_server_that_hangs_take_no_thread_of_the_agent(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the pool of `asyncio.to_thread` has threads, in which the agent takes readings."""
    is_back, looks = threading.Event(), list[str]()

    def hung(wanted: CopyRequest) -> None:
        looks.append(wanted.folder)
        assert is_back.wait(60)

    monkeypatch.setattr(copy_files, "look", hung)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    folders = [tmp_path / str(number) for number in range(2)]
    loads = [asyncio.ensure_future(node.lend(f.name, request(f))) for f in folders]
    try:
        await eventually(lambda: len(looks) == len(folders))
        async with asyncio.timeout(30):
            await asyncio.to_thread(os.getpid)
    finally:
        is_back.set()
    assert await asyncio.gather(*loads) == [None, None]


async def test_copy_outlives_its_engines_until_host_ram_is_needed(node: Node, model: Path) -> None:
    await node.lend("t", request(model))
    [name] = node.arbiter.held
    node.arbiter.wants.add(name)  # while it is in use it does not leave
    await eventually(lambda: node.arbiter.held[name].users_count == 1)
    node.arbiter.wants.clear()
    node.back("t")
    await eventually(lambda: node.arbiter.held[name].users_count == 0)
    assert node.copies.readings()
    node.arbiter.wants.add(name)
    await eventually(lambda: not node.copies.readings() and not node.arbiter.held)


@pytest.mark.spec("E1", "E4")
async def test_idle_copy_is_offered_to_leave_and_counts_the_loads_that_found_it(
    node: Node, model: Path
) -> None:
    await node.lend("t1", request(model))
    await node.lend("t2", request(model))
    node.back("t1")
    assert node.copies.idle() == ()
    node.back("t2")
    [reading] = node.copies.readings()
    assert (reading.files_count, reading.hits_count) == (2, 1)
    [idle] = node.copies.idle()
    assert (idle.key, idle.owner, idle.size_bytes) == (reading.key, ONE.path, reading.size_bytes)
    assert idle.idle_since_s > 0
    idle.drop()
    assert not node.copies.readings() and not node.copies.idle()
    await eventually(lambda: not node.arbiter.held)


@pytest.mark.spec("E7")
async def test_loads_are_counted_by_whether_they_found_a_copy_also_after_that_has_left(
    node: Node, model: Path
) -> None:
    assert node.copies.contents() == ()
    for ticket in ("t1", "t2", "t3"):
        await node.lend(ticket, request(model))
    [weights] = node.copies.contents()
    assert (weights.content, weights.rows_count, weights.stored_count) == (Content.WEIGHTS, 2, 2)
    assert (weights.hits_count, weights.misses_count) == (2, 1)
    assert weights.allocated_bytes == node.copies.held_bytes > 0
    for ticket in ("t1", "t2", "t3"):
        node.back(ticket)
    [idle] = node.copies.idle()
    idle.drop()
    node.arbiter.refuses = HostRamShort("m", Bytes(2), Bytes(1))
    assert await node.lend("t4", request(model)) is None
    [weights] = node.copies.contents()
    assert (weights.rows_count, weights.allocated_bytes, weights.evicted_count) == (0, 0, 2)
    assert (weights.hits_count, weights.misses_count, weights.refused_count) == (2, 2, 1)


@pytest.fixture
def may_fill(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No copy is filled before it is set."""
    real, may = copy_files.make, threading.Event()

    def make(*args: Any) -> Any:
        assert may.wait(20)
        return real(*args)

    monkeypatch.setattr(copy_files, "make", make)
    return may


async def test_load_that_ended_while_the_copy_was_filled_leaves_it_for_the_next(
    node: Node, model: Path, may_fill: threading.Event
) -> None:
    first = asyncio.ensure_future(node.lend("t1", request(model)))
    second = asyncio.ensure_future(node.lend("t2", request(model)))
    await eventually(lambda: node.arbiter.held)
    node.back("t1")  # its replica was killed
    try:
        node.arbiter.wants.update(node.arbiter.held)  # host RAM is short: what is filled is in use
        renewed = node.arbiter.renewed
        await eventually(lambda: node.arbiter.renewed > renewed + 2, within_s=10)
    finally:
        node.arbiter.wants.clear()
        may_fill.set()
    assert (await first) and (await second)
    node.back("t1")  # the agent says so when it did not fork
    [reading] = node.copies.readings()
    assert reading.users == ("t2",) and node.arbiter.asked == 1


@pytest.mark.spec("D8")
async def test_dropped_by_hand_it_leaves_at_once_or_with_its_last_user(
    node: Node, model: Path
) -> None:
    lent = await node.lend("t", request(model))
    assert lent
    assert node.copies.drop(lent["key"]) is False
    again = await node.lend("t2", request(model))
    assert again and len(node.copies.readings()) == 2, "a new load has a copy that stays"
    node.back("t")
    assert len(node.copies.readings()) == 1
    node.back("t2")
    assert node.copies.drop(again["key"]) is True
    assert not node.copies.readings()
    with pytest.raises(UnknownHostCopy, match=again["key"]):
        node.copies.drop(again["key"])


@pytest.mark.spec("D9")
async def test_copy_leaves_with_the_last_model_of_its_bytes(
    node: Node, model: Path, tmp_path: Path
) -> None:
    await node.lend("t1", request(model))
    await node.lend("t2", request(written(tmp_path / "equal", b"weights"), TWO))
    for ticket in ("t1", "t2"):
        node.back(ticket)
    node.copies.drop_owner(ONE.path)
    assert [r.models for r in node.copies.readings()] == [(TWO,)]
    node.copies.drop_owner(TWO.path)
    assert not node.copies.readings()


@pytest.mark.spec("D9")
async def test_copy_of_a_model_that_was_removed_while_it_was_made_leaves_with_its_engine(
    node: Node, model: Path, may_fill: threading.Event
) -> None:
    loads = [asyncio.ensure_future(node.lend(t, request(model))) for t in ("t1", "t2")]
    await eventually(lambda: node.arbiter.held)
    node.copies.drop_owner(ONE.path)
    may_fill.set()
    assert all(await asyncio.gather(*loads))
    for ticket in ("t1", "t2"):
        node.back(ticket)
    assert not node.copies.readings()
    assert await node.lend("t3", request(model))  # the table has it again
    node.back("t3")
    assert node.copies.readings()


@pytest.mark.parametrize(("for_group", "mode"), [(False, 0o600), (True, 0o660)])
async def test_group_may_open_a_copy_where_its_model_says_so(
    node: Node, model: Path, for_group: bool, mode: int
) -> None:
    lent = await node.lend("t", request(model, for_group=for_group))
    assert lent
    assert {stat.S_IMODE(os.fstat(fd).st_mode) for fd in await handed(lent)} == {mode}
    other = await node.lend("t2", request(model, for_group=not for_group))
    assert other and len(node.copies.readings()) == 2, "no copy has the mode of another"


async def test_next_agent_finds_copies_that_engines_have_open(
    node: Node, model: Path, folder: Path
) -> None:
    lent = await node.lend("t", request(model))
    assert lent
    await handed(lent)
    [name] = node.arbiter.held
    for task in node.tasks:
        task.cancel()
    node.copies.close()  # it was killed; this process plays the engine too
    again = Node(folder, node.arbiter)
    again.copies.recover(TicketId("t"), [os.getpid()])
    [reading] = again.copies.readings()
    assert (reading.key, reading.users, reading.models) == (lent["key"], ("t",), (ONE,))
    assert list(node.arbiter.held) == [name], "under the same lease"
    same = await again.lend("t2", request(model))
    assert same and same["key"] == lent["key"] and len(again.copies.readings()) == 1
    await again.close()


async def test_copy_whose_lease_lapsed_asks_for_another_while_it_is_used(
    node: Node, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "AGAIN_S", 0.01)
    await node.lend("t", request(model))
    [name] = node.arbiter.held
    real, ended = node.arbiter.call, {name}

    async def call(method: str, *args: Any) -> object:
        if method == "lease" and args[0].lease in ended:
            node.arbiter.held.pop(name, None)
            await asyncio.sleep(0)
            return LeaseState(args[0].ticket, "ended", reason="lost")
        return await real(method, *args)

    monkeypatch.setattr(node.arbiter, "call", call)
    await eventually(lambda: set(node.arbiter.held) - ended)
    [reading] = node.copies.readings()
    assert node.copies.end(copy_lease.lease_ticket(copy_lease.TENANT, name)) is False
    assert reading.users == ("t",) and node.copies.end(reading.ticket) is True


def test_copies_are_on_the_account_of_no_process(tmp_path: Path) -> None:
    model = written(tmp_path / "model", b"weights" * 8_000)
    wanted = request(model)
    found = copy_files.look(wanted)
    assert found
    before = procfs.memory([os.getpid()])
    copy = copy_files.make(found, "copy-1", wanted)
    mapping = mmap.mmap(copy.fds[2], 0, prot=mmap.PROT_READ)
    assert any(mapping[:: mmap.PAGESIZE])  # every page was touched
    after = procfs.memory([os.getpid()])
    assert after.host_bytes == before.host_bytes
    assert after.device_bytes - before.device_bytes < copy.allocated_bytes / 2
    mapping.close()
    copy.close()
