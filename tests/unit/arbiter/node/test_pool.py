"""The pool of a node, with real memory files and without engines."""

import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from arbiter.node import pool as pools
from arbiter.node import slab_files
from arbiter.node.pool import IdleCopy, Pool
from arbiter.node.slab_files import SlabFiles
from arbiter.pool import Removal, Rows, SavedRows, Slab, slab_file
from arbiter.pool.layout import tenant_digest
from arbiter.protocol.messages import SlabRequest
from arbiter.units import MIB, Bytes, Content, TicketId
from deployments.config.capability_section import MERGED
from tests.support.slabs import path_of

SPACE = b"n" * 32
SLOT = 2 * MIB
A, B, C = TicketId("a"), TicketId("b"), TicketId("c")
CHAT = SlabRequest(Content.KV, "chat/m", "k1")
OTHER = SlabRequest(Content.KV, "chat/o", "k2")


_OPEN: list[Slab] = []  # by the writers of a test


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(Bytes(256 * MIB))
    yield made
    made.close()
    while _OPEN:
        _OPEN.pop().close()


def write(fd: int | None, *keys: str) -> Rows:
    """As an engine does."""
    rows = opened(fd)
    for key, row in rows.reserve([key.encode() for key in keys]).rows.items():
        rows.slab.row(row)[:] = (key * SLOT)[:SLOT]
        rows.mark_ready(key)
    return rows


def opened(fd: int | None, content: Content = Content.KV) -> Rows:
    assert fd is not None
    _OPEN.append(Slab(fd, content, SPACE, Bytes(SLOT)))
    return Rows(_OPEN[-1], term_s=3600.0, clock=time.time)


@pytest.mark.spec("E1")
def test_slab_is_lent_again_with_what_the_last_engine_left(pool: Pool) -> None:
    write(pool.lend(A, CHAT), "x", "y")
    pool.take_back(A)
    assert [s.ticket for s in pool.readings()] == [None]
    found = write(pool.lend(B, CHAT))
    assert found.lookup(b"x") is not None
    assert found.lookup(b"z") is None
    [reading] = pool.readings()
    assert (reading.ticket, reading.owner, reading.rows_count) == (B, "chat/m", 2)
    assert reading.allocated_bytes >= 2 * SLOT


@pytest.mark.spec("E1")
def test_slab_has_one_writer_at_a_time(pool: Pool) -> None:
    first, second = pool.lend(A, CHAT), pool.lend(B, CHAT)
    assert first != second
    pool.take_back(A)
    assert pool.lend(C, CHAT) == first


@pytest.mark.spec("E1")
def test_engine_of_other_settings_is_lent_another_slab(pool: Pool) -> None:
    write(pool.lend(A, CHAT), "x")
    pool.take_back(A)
    assert write(pool.lend(B, OTHER)).lookup(b"x") is None


@pytest.mark.spec("D9")
def test_slab_of_one_model_is_not_lent_to_another_with_the_same_settings(pool: Pool) -> None:
    write(pool.lend(A, CHAT), "x")
    pool.take_back(A)
    other = replace(CHAT, owner="assistant/m")
    assert write(pool.lend(B, other)).lookup(b"x") is None
    assert sorted(s.owner for s in pool.readings()) == ["assistant/m", "chat/m"]
    pool.drop_owner("chat/m")
    assert [s.owner for s in pool.readings()] == ["assistant/m"]


def test_no_slab_is_lent_where_there_is_no_pool() -> None:
    assert Pool(Bytes(0)).lend(A, CHAT) is None


def test_engine_gets_no_slab_where_the_machine_has_no_memory_for_one(
    pool: Pool,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))  # what the next open file would have
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert pool.lend(A, CHAT) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pool.lend(A, CHAT) is not None


def test_pool_is_a_share_of_the_ram_where_no_size_is_given() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0.09 * total < Pool(None).budget_bytes < 0.11 * total


def fill(rows: Rows) -> None:
    """As far as it may."""
    for key in rows.reserve([str(n).encode() for n in range(200)]).rows:
        rows.mark_ready(key)


def idle_copies(size_bytes: Bytes, left: list[str]) -> list[IdleCopy]:
    """Two copies, which note in `left` that they left."""
    return [
        IdleCopy(key, "chat/w", size_bytes, since_s, partial(left.append, key))
        for key, since_s in (("newer", 2.0), ("older", 1.0))
    ]


@pytest.mark.spec("E4")
@pytest.mark.parametrize(
    ("short_fraction", "gone"),
    [
        (0.2, ["adapter"]),
        (0.5, ["adapter", "weights"]),
        (0.7, ["adapter", "weights", "weights"]),
        (0.9, ["adapter", "weights", "weights", "kv"]),
    ],
)
def test_idle_copies_of_weights_leave_behind_adapters_and_before_kv(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, short_fraction: float, gone: list[str]
) -> None:
    for ticket, content in ((A, Content.KV), (B, Content.ADAPTER)):
        opened(pool.lend(ticket, SlabRequest(content, "chat/m", content)), content).reserve([b"a"])
        pool.take_back(ticket)
    left = list[str]()
    copies = idle_copies(Bytes(pool.allocated_bytes // 6), left)
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(0)))
    pool._kept_free_bytes = int(short_fraction * pool.allocated_bytes)
    pool.enforce_budget(copies)
    assert [each.content for each in pool.dropped()] == gone
    assert {each.reason for each in pool.dropped()} == {"pressure"}
    assert left == ["older", "newer"][: gone.count("weights")]


@pytest.mark.spec("E4")
def test_no_more_copies_leave_than_bring_the_slabs_to_their_budget(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a copy gives back beyond that is of no use to them, so KV leaves for the rest."""
    write(pool.lend(A, CHAT), "x")
    pool.take_back(A)
    left = list[str]()
    copies = idle_copies(Bytes(64 * MIB), left)
    pool.budget_bytes = pool.allocated_bytes
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(0)))
    pool._kept_free_bytes = MIB
    pool.enforce_budget(copies)
    assert left == ["older"]
    assert [(e.content, e.reason) for e in pool.dropped()] == [
        ("weights", "pressure"),
        ("kv", "full"),
    ]


@pytest.mark.spec("E4")
def test_full_pool_drops_no_copy_of_weights_because_they_are_not_in_its_budget(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(pool.lend(A, CHAT), "x")
    pool.take_back(A)
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(10**12)))
    pool.budget_bytes = Bytes(pool.allocated_bytes - 1)
    pool.enforce_budget([IdleCopy("k", "chat/w", Bytes(MIB), 0.0, lambda: pytest.fail("it left"))])
    assert [(each.content, each.reason) for each in pool.dropped()] == [("kv", "full")]


@pytest.mark.spec("E4")
def test_writers_together_stay_within_the_budget(pool: Pool) -> None:
    first, second = opened(pool.lend(A, CHAT)), opened(pool.lend(B, OTHER))
    for _ in range(5):
        fill(first)
        fill(second)
        pool.enforce_budget()
        first.shrink_to_limit()
        second.shrink_to_limit()
        assert sum(s.limit_bytes for s in pool.readings()) <= 0.9 * pool.budget_bytes
    assert pool.allocated_bytes <= 0.9 * pool.budget_bytes


@pytest.mark.spec("E4")
def test_writer_that_filled_the_pool_makes_room_for_the_next(pool: Pool) -> None:
    first = opened(pool.lend(A, CHAT))
    fill(first)
    assert len(first) > 80
    second = opened(pool.lend(B, OTHER))
    pool.enforce_budget()
    heavy, light = pool.readings()
    assert heavy.allocated_bytes > heavy.limit_bytes
    assert light.limit_bytes >= 64 * MIB
    first.shrink_to_limit()
    fill(second)
    assert pool.allocated_bytes <= 0.9 * pool.budget_bytes
    assert min(len(first), len(second)) >= 30


@pytest.mark.spec("E4")
def test_idle_slabs_leave_longest_unused_first_and_no_more_than_must(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ticket, key in ((A, "k1"), (B, "k2"), (C, "k3")):
        write(pool.lend(ticket, SlabRequest(Content.KV, f"chat/{key}", key)), *"abcdefgh")
        pool.take_back(ticket)
    has = pool.allocated_bytes
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(0)))
    pool._kept_free_bytes = int(0.05 * has)  # of so much the pool is short
    pool.enforce_budget()
    [gone] = pool.dropped()
    assert (gone.owner, gone.reason) == ("chat/k1", "pressure")
    assert gone.size_bytes == has - pool.allocated_bytes
    pool.forget_dropped((gone,))
    assert pool.dropped() == ()


@pytest.mark.spec("E4")
def test_contents_leave_in_their_order_however_recently_used(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What leaves last was used first."""
    for content in ("kv", "weights", "adapter", "picture", "temporary"):
        fd = pool.lend(A, SlabRequest(Content(content), "chat/m", content))
        opened(fd, Content(content)).reserve([b"a"])
        pool.take_back(A)
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(0)))
    pool._kept_free_bytes = pool.allocated_bytes
    pool.enforce_budget()
    left = [gone.content for gone in pool.dropped()]
    assert left == ["temporary", "picture", "adapter", "weights", "kv"]


@pytest.mark.spec("E4")
def test_writer_is_asked_to_shrink_where_nothing_is_idle(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(pool.lend(A, CHAT), *map(str, range(40)))
    has = pool.allocated_bytes
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(0)))
    pool._kept_free_bytes = has // 2
    pool.enforce_budget()
    rows.shrink_to_limit()
    assert pool.allocated_bytes < has
    assert pool.readings()[0].rows_count < 40
    assert pool.dropped() == ()


@pytest.mark.spec("D9", "E6")
def test_slabs_of_a_removed_model_are_erased(pool: Pool) -> None:
    for ticket, request in ((A, CHAT), (B, OTHER)):
        write(pool.lend(ticket, request), "x")
        pool.take_back(ticket)
    pool.drop_owner("chat/m")
    assert [s.owner for s in pool.readings()] == ["chat/o"]
    assert [gone.reason for gone in pool.dropped()] == ["removed"]


@pytest.fixture
def engine() -> Iterator[Callable[[str], int]]:
    """Starts processes that have a file open, as an engine has its slab. Gives their pids."""
    started: list[subprocess.Popen[bytes]] = []

    def start(path: str) -> int:
        code = "import sys; held = open(sys.argv[1], 'r+b'); print(flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", code, path]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        process.communicate()


@pytest.mark.spec("E1")
def test_next_agent_finds_the_slabs_that_engines_have_open(
    pool: Pool, engine: Callable[[str], int]
) -> None:
    fd = pool.lend(A, CHAT)
    assert fd is not None
    write(fd, "x")
    pids = [engine(path_of(fd)), engine(path_of(fd))]  # the parts of one engine
    pool.close()
    after = Pool(Bytes(256 * MIB))
    after.recover(A, pids)
    [reading] = after.readings()
    assert (reading.ticket, reading.owner, reading.rows_count) == (A, "chat/m", 1)
    after.take_back(A)
    assert write(after.lend(B, CHAT)).lookup(b"x") is not None
    after.close()


@pytest.mark.spec("E1", "D9")
def test_next_agent_finds_the_slab_of_a_model_with_a_long_name(
    pool: Pool, engine: Callable[[str], int]
) -> None:
    owner = f"{'c' * 64}/{'m' * 128}{MERGED}"  # the longest names of the table
    request = SlabRequest(Content.TEMPORARY, owner, "k" * 16)
    fd = pool.lend(A, request)
    write(fd, "x")
    pid = engine(path_of(fd or 0))
    pool.close()
    after = Pool(Bytes(256 * MIB))
    after.recover(A, [pid])
    after.take_back(A)
    assert write(after.lend(B, request)).lookup(b"x") is not None
    after.close()


def test_what_is_not_a_slab_is_left_alone(tmp_path: Path, engine: Callable[[str], int]) -> None:
    (tmp_path / "file").touch()
    unsealed = os.memfd_create("host-pool-kv.k1.chat/m")
    after = Pool(Bytes(256 * MIB))
    paths = str(tmp_path / "file"), f"/proc/{os.getpid()}/fd/{unsealed}"
    after.recover(A, [engine(path) for path in paths])
    os.close(unsealed)
    assert after.readings() == ()


# -- files of what had to leave -------------------------------------------------------------------


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Pool]:
    """A pool with a folder for files."""
    files = SlabFiles(tmp_path / "slabs", Bytes(64 * MIB))
    made = Pool(Bytes(256 * MIB), files)
    yield made
    while _OPEN:
        _OPEN.pop().close()
    made.close()


@pytest.fixture
def held() -> Iterator[Event]:
    """What a thread of the pool is to do waits until it is set."""
    made = Event()
    yield made
    made.set()


def idle(pool: Pool, *requests: SlabRequest, rows: str = "abcd") -> None:
    """Slabs with those rows, which no engine has."""
    for request in requests:
        ticket = TicketId(request.key)
        write(pool.lend(ticket, request), *rows)
        pool.take_back(ticket)


def squeeze(pool: Pool, monkeypatch: pytest.MonkeyPatch, kept_free: int = 10**9) -> None:
    """RAM is so short that every idle slab has to go. `kept_free`: with little, it is critical."""
    pool._kept_free_bytes = kept_free
    available = Bytes(kept_free - int(pool.allocated_bytes))
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), available))


def until(pool: Pool, holds: Callable[[], bool]) -> None:
    """Turns of the agent, until something holds; at most for 20 s."""
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        pool.enforce_budget()
        os.sched_yield()


def files_in(pool: Pool) -> list[Path]:
    assert pool.files is not None
    pool.files._thread.submit(lambda: None).result()  # after all that the thread was told before
    return sorted(pool.files.folder.iterdir())


def settled(pool: Pool) -> None:
    files_in(pool)
    pool.enforce_budget()


def saved_keys(path: str | Path | None) -> set[bytes]:
    assert path is not None
    rows = SavedRows(Path(path), Content.KV, SPACE, Bytes(SLOT), time.time())
    with contextlib.closing(rows):
        return set(rows.keys)


@pytest.mark.spec("G4", "E4")
def test_kv_that_must_leave_is_saved_and_then_dropped(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(saving, CHAT)
    assert saving.file_for(CHAT) is None
    squeeze(saving, monkeypatch)
    until(saving, lambda: bool(saving.dropped()))
    [gone] = saving.dropped()
    assert (gone.owner, gone.reason, gone.was_saved) == ("chat/m", "pressure", True)
    assert saving.allocated_bytes == 0
    assert saved_keys(saving.file_for(CHAT)) == {b"a", b"b", b"c", b"d"}
    assert saving.file_for(OTHER) is None
    [file] = files_in(saving)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def hold_saves(pool: Pool, held: Event) -> None:
    assert pool.files is not None
    pool.files._thread.submit(held.wait, 20)


@pytest.mark.spec("G4", "E4")
def test_turns_do_not_wait_for_a_save_and_one_goes_on_at_a_time(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, held: Event
) -> None:
    idle(saving, CHAT, OTHER)
    hold_saves(saving, held)
    squeeze(saving, monkeypatch)
    for _ in range(3):
        saving.enforce_budget()
    assert [slab.save is not None for slab in saving._slabs] == [True, False]
    assert saving.dropped() == () and saving.allocated_bytes > 0
    held.set()
    until(saving, lambda: len(saving.dropped()) == 2)
    assert [(gone.owner, gone.was_saved) for gone in saving.dropped()] == [
        ("chat/m", True),
        ("chat/o", True),
    ]


@pytest.mark.spec("G4")
def test_slab_that_is_lent_while_it_is_saved_stays_and_its_file_is_not_made(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, held: Event
) -> None:
    idle(saving, CHAT)
    hold_saves(saving, held)
    squeeze(saving, monkeypatch)
    saving.enforce_budget()
    found = write(saving.lend(B, CHAT), "new")
    held.set()
    settled(saving)
    assert saving.dropped() == () and files_in(saving) == []
    assert found.lookup(b"a") is not None
    saving.take_back(B)
    until(saving, lambda: bool(saving.dropped()))
    assert b"new" in saved_keys(saving.file_for(CHAT)), "the next save is of its own"


@pytest.mark.spec("G4")
def test_slab_that_is_lent_just_after_its_save_stays_and_so_does_its_file(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(saving, CHAT)
    squeeze(saving, monkeypatch)
    saving.enforce_budget()
    assert len(files_in(saving)) == 1
    found = write(saving.lend(B, CHAT))
    saving.enforce_budget()
    assert saving.dropped() == () and found.lookup(b"a") is not None
    assert saved_keys(saving.file_for(CHAT)) == {b"a", b"b", b"c", b"d"}


@pytest.mark.spec("E4")
def test_critical_need_does_not_wait_for_a_save(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, held: Event
) -> None:
    idle(saving, CHAT, OTHER)
    hold_saves(saving, held)
    squeeze(saving, monkeypatch)
    saving.enforce_budget()
    squeeze(saving, monkeypatch, kept_free=int(saving.allocated_bytes))
    saving.enforce_budget()
    assert [gone.was_saved for gone in saving.dropped()] == [False, False]
    held.set()
    settled(saving)
    assert files_in(saving) == []


@pytest.mark.spec("G4")
def test_slab_that_cannot_be_saved_is_dropped_all_the_same(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.files is not None
    saving.files._path(CHAT).mkdir()
    idle(saving, CHAT)
    squeeze(saving, monkeypatch)
    until(saving, lambda: bool(saving.dropped()))
    assert [gone.was_saved for gone in saving.dropped()] == [False]
    assert saving.file_for(CHAT) is None
    assert [path.is_dir() for path in files_in(saving)] == [True]


@pytest.mark.spec("E4")
def test_contents_that_are_soon_made_anew_are_not_saved(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = saving.lend(A, SlabRequest(Content.TEMPORARY, "chat/m", "k"))
    opened(slab, Content.TEMPORARY).reserve([b"a"])
    saving.take_back(A)
    squeeze(saving, monkeypatch)
    saving.enforce_budget()
    assert [gone.was_saved for gone in saving.dropped()] == [False]
    assert files_in(saving) == []


@pytest.mark.spec("G4")
def test_files_together_stay_within_the_budget_and_the_oldest_leave(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.files is not None
    requests = [SlabRequest(Content.KV, f"chat/{number}", f"k{number}") for number in range(4)]
    for number, request in enumerate(requests):
        idle(saving, request, rows="abcdefghijkl")  # 24 MiB, of 64
        with monkeypatch.context() as short:
            squeeze(saving, short)
            until(saving, lambda number=number: len(saving.dropped()) > number)  # type: ignore[misc]
        os.utime(saving.file_for(request) or "", (number, number))
        assert saving.files.size_bytes <= saving.files.budget_bytes
    assert [saving.file_for(request) is not None for request in requests] == [False] * 2 + [
        True
    ] * 2


@pytest.mark.spec("G4")
def test_file_is_never_larger_than_the_budget(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.files is not None
    saving.files.budget_bytes = Bytes(9 * MIB)
    idle(saving, CHAT, rows="abcdefgh")
    squeeze(saving, monkeypatch)
    until(saving, lambda: bool(saving.dropped()))
    assert len(saved_keys(saving.file_for(CHAT))) == 4
    assert saving.files.size_bytes <= 9 * MIB


@pytest.mark.spec("G4")
def test_expired_and_abandoned_files_are_swept(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.files is not None
    idle(saving, CHAT)
    squeeze(saving, monkeypatch)
    until(saving, lambda: bool(saving.dropped()))
    [kept] = files_in(saving)
    folder = saving.files.folder
    (folder / "garbage.slab").write_bytes(b"x" * 5000)
    for name in ("dead.slab.1.tmp", "written.slab.2.tmp"):
        (folder / name).touch()
    os.utime(folder / "dead.slab.1.tmp", (0, 0))
    saving.files.sweep()
    assert files_in(saving) == sorted([kept, folder / "written.slab.2.tmp"])
    monkeypatch.setattr(slab_files.time, "time", lambda now=time.time: now() + 3601)
    saving._swept_s -= 301
    saving.enforce_budget()
    assert kept not in files_in(saving)


@pytest.mark.spec("D9", "E6", "G4")
def test_files_of_a_removed_model_are_erased(saving: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = SlabRequest(Content.KV, "chat/m", "k3")  # the same model with other settings
    idle(saving, CHAT, OTHER, changed)
    squeeze(saving, monkeypatch)
    until(saving, lambda: len(saving.dropped()) == 3)
    assert len(files_in(saving)) == 3
    saving.drop_owner("chat/m")
    assert files_in(saving) == [Path(saving.file_for(OTHER) or "")]


@pytest.mark.spec("D9", "E6", "G4")
def test_file_of_a_model_that_is_removed_while_it_is_saved_is_not_made(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, held: Event
) -> None:
    idle(saving, CHAT)
    hold_saves(saving, held)
    squeeze(saving, monkeypatch)
    saving.enforce_budget()
    saving.drop_owner("chat/m")
    held.set()
    assert files_in(saving) == []
    assert [gone.reason for gone in saving.dropped()] == ["removed"]


def test_folder_is_given_a_share_of_the_disk_at_most_or_is_none(tmp_path: Path) -> None:
    made = SlabFiles.in_folder(str(tmp_path / "slabs"), None)
    assert made is not None
    free = shutil.disk_usage(tmp_path).free
    assert 0 < made.budget_bytes <= min(slab_files.MOST_BYTES, 0.11 * free)
    made.close()
    assert SlabFiles.in_folder(str(tmp_path / "none"), Bytes(0)) is None
    assert SlabFiles.in_folder(None, None) is None
    (tmp_path / "file").touch()
    assert SlabFiles.in_folder(str(tmp_path / "file"), Bytes(MIB)) is None
    assert not (tmp_path / "none").exists()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """The disk hangs in the midst of a save. Two events: that it has begun to, and that it goes on
    from."""
    begun, goes_on = Event(), Event()
    write_all = slab_file._write_all

    def hanging(*args: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        write_all(*args)

    monkeypatch.setattr(slab_file, "_write_all", hanging)
    yield begun, goes_on
    goes_on.set()


@pytest.mark.spec("E4", "B1")
def test_slab_that_leaves_while_a_disk_that_hangs_takes_its_rows_gives_its_memory_back(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, stuck: tuple[Event, Event]
) -> None:
    begun, goes_on = stuck
    idle(saving, CHAT)
    held_open = os.dup(saving._slabs[0].fd)  # as the save has it
    squeeze(saving, monkeypatch)
    saving.enforce_budget()
    assert begun.wait(60)
    squeeze(saving, monkeypatch, kept_free=int(saving.allocated_bytes))
    saving.enforce_budget()
    assert [gone.was_saved for gone in saving.dropped()] == [False]
    saving._thread.submit(lambda: None).result(60)
    assert (os.fstat(held_open).st_blocks, saving.leaving_bytes) == (0, 0)
    os.close(held_open)
    goes_on.set()
    assert files_in(saving) == [], "what was read after that were zeros"


@pytest.mark.spec("E4", "G4")
def test_save_for_which_the_agent_has_no_descriptor_left_fails_and_the_turn_goes_on(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(saving, CHAT)
    squeeze(saving, monkeypatch)

    def no_more(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(slab_files.os, "dup", no_more)
        saving.enforce_budget()
    saving.enforce_budget()
    assert [gone.was_saved for gone in saving.dropped()] == [False]


@pytest.mark.spec("E4")
def test_engine_that_loads_while_ram_is_short_may_take_no_more_than_is_left(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool._kept_free_bytes = 0
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(100 * MIB)))
    pool.enforce_budget()
    pool.lend(A, CHAT)
    [reading] = pool.readings()
    assert reading.limit_bytes <= 100 * MIB


@pytest.mark.spec("G4")
def test_slab_with_nothing_to_save_costs_no_other_its_file(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, held: Event
) -> None:
    assert saving.files is not None
    idle(saving, OTHER)
    squeeze(saving, monkeypatch)
    until(saving, lambda: bool(saving.dropped()))
    saving.files.budget_bytes = saving.files.size_bytes
    opened(saving.lend(A, CHAT)).reserve([b"never written"])
    saving.take_back(A)
    until(saving, lambda: len(saving.dropped()) == 2)
    assert [gone.was_saved for gone in saving.dropped()] == [True, False]
    idle(saving, CHAT)
    hold_saves(saving, held)
    saving.enforce_budget()
    write(saving.lend(B, CHAT))  # so that the save is unwanted before it begins
    held.set()
    assert files_in(saving) == [Path(saving.file_for(OTHER) or "")]


@pytest.mark.spec("G4")
def test_rows_that_a_wrong_clock_has_expire_in_years_are_swept_from_ram_and_disk(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine takes them, so that a file of them alone would stay for ever."""
    idle(saving, CHAT)
    squeeze(saving, monkeypatch)
    until(saving, lambda: bool(saving.dropped()))
    monkeypatch.undo()
    idle(saving, OTHER)
    assert len(files_in(saving)) == 1
    monkeypatch.setattr(pools.time, "time", lambda now=time.time: now() - 40 * 86_400)
    saving._swept_s -= 301
    saving.enforce_budget()
    assert [(gone.owner, gone.reason) for gone in saving.dropped()[1:]] == [("chat/o", "stale")]
    assert files_in(saving) == []


# -- the end of an agent ---------------------------------------------------------------------------


@pytest.mark.spec("G4")
def test_end_of_an_agent_saves_idle_kv_and_nothing_else(saving: Pool) -> None:
    idle(saving, CHAT)
    slab = saving.lend(A, SlabRequest(Content.TEMPORARY, "chat/m", "k"))
    opened(slab, Content.TEMPORARY).reserve([b"a"])
    saving.take_back(A)
    write(saving.lend(B, OTHER), "x")  # an engine has it
    saving.save_idle()
    assert saved_keys(saving.file_for(CHAT)) == {b"a", b"b", b"c", b"d"}
    assert len(files_in(saving)) == 1


@pytest.mark.spec("G4")
def test_end_of_an_agent_saves_what_was_used_last_as_far_as_the_time_goes(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle(saving, OTHER, CHAT)
    now_s, save = time.monotonic(), slab_file.save
    clock = iter([True, True, False])

    def save_two(*args: Any, **kwargs: Any) -> int:
        return save(*args, **kwargs | {"has_time": lambda: next(clock, False)})

    monkeypatch.setattr(slab_files.slab_file, "save", save_two)
    saving._slabs[0].idle_since_s = now_s - 1
    saving.save_idle()
    assert saved_keys(saving.file_for(CHAT)) == {b"c", b"d"}
    assert len(files_in(saving)) == 1, "the slab that was idle for longer had no time left"


@pytest.mark.spec("G4")
def test_end_of_an_agent_does_not_wait_for_a_slow_disk(saving: Pool, held: Event) -> None:
    idle(saving, CHAT)
    hold_saves(saving, held)
    saving.save_idle(within_s=0.01)
    assert saving.file_for(CHAT) is None
    for slab in saving._slabs:
        slab.end_save()
    held.set()
    assert files_in(saving) == []


@pytest.mark.spec("G4")
def test_save_under_way_as_an_agent_ends_is_cut_short_too_and_keeps_what_it_has_written(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, stuck: tuple[Event, Event]
) -> None:
    begun, goes_on = stuck
    idle(saving, CHAT)
    squeeze(saving, monkeypatch)
    saving.enforce_budget()
    assert begun.wait(60)
    saving.save_idle(within_s=0.0)
    goes_on.set()
    files_in(saving)
    assert saved_keys(saving.file_for(CHAT)) == {b"d"}


@pytest.mark.spec("G4")
def test_sweep_is_as_often_as_it_is_set(tmp_path: Path) -> None:
    made = Pool(Bytes(256 * MIB), SlabFiles(tmp_path / "slabs", Bytes(MIB)), sweep_s=60.0)
    files_in(made)
    (tmp_path / "slabs" / "expired.slab").touch()
    made._swept_s -= 59
    made.enforce_budget()
    assert len(files_in(made)) == 1
    made._swept_s -= 2
    made.enforce_budget()
    assert files_in(made) == []
    made.close()


# -- tenants --------------------------------------------------------------------------------------

ACME = tenant_digest("acme")


def write_of(fd: int | None, *keys: str) -> Rows:
    """Rows of a tenant's requests."""
    rows = opened(fd)
    for key in rows.reserve([key.encode() for key in keys], tenant=ACME).rows:
        rows.mark_ready(key, ACME)
    return rows


def keys_in(pool: Pool, owner: str) -> list[bytes]:
    [slab] = [slab for slab in pool._slabs if slab.request.owner == owner]
    return [mark.key for _, mark in slab.view.marks()]


@pytest.mark.spec("E6", "G4")
def test_removed_tenant_leaves_idle_slabs_and_files_and_others_stay(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request, others in ((CHAT, ["x"]), (OTHER, [])):
        slab = saving.lend(A, request)
        write_of(slab, "a", "b")
        write(slab, *others)
        saving.take_back(A)
    squeeze(saving, monkeypatch)
    until(saving, lambda: len(saving.dropped()) == 2)
    assert [len(saved_keys(saving.file_for(r))) for r in (CHAT, OTHER)] == [3, 2]
    monkeypatch.undo()
    slab = saving.lend(B, CHAT)
    write_of(slab, "c")
    write(slab, "y")
    saving.take_back(B)
    saving.drop_tenant(Removal(ACME))
    assert keys_in(saving, "chat/m") == [b"y"]
    assert len(files_in(saving)) == 1, "a file without any other row is removed"
    rows = SavedRows(Path(saving.file_for(CHAT) or ""), Content.KV, SPACE, Bytes(SLOT), time.time())
    with contextlib.closing(rows):
        assert set(rows.keys) == {b"x"}
        found = bytearray(SLOT)
        assert rows.read(b"x", memoryview(found)) and bytes(found) == b"x" * SLOT


@pytest.mark.spec("E6")
def test_file_keeps_what_a_tenant_stored_after_its_removal(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = saving.lend(A, CHAT)
    write_of(slab, "old")
    removal = Removal(ACME, time.time())
    write_of(slab, "new")
    saving.take_back(A)
    squeeze(saving, monkeypatch)
    until(saving, lambda: len(saving.dropped()) == 1)
    saving.drop_tenant(removal)
    until(saving, lambda: saved_keys(saving.file_for(CHAT)) == {b"new"})


@pytest.mark.spec("E6")
def test_save_that_may_have_read_a_removed_tenants_rows_makes_no_file(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, held: Event
) -> None:
    write_of(saving.lend(A, CHAT), "a")
    saving.take_back(A)
    hold_saves(saving, held)
    squeeze(saving, monkeypatch)
    saving.enforce_budget()
    saving.drop_tenant(Removal(ACME))
    held.set()
    assert files_in(saving) == []


@pytest.mark.spec("E6")
def test_writers_erase_one_removed_tenant_after_the_other(pool: Pool) -> None:
    rows = write_of(pool.lend(A, CHAT), "a")
    write(pool.lend(B, OTHER), "x")
    for tenant in (ACME, tenant_digest("other"), tenant_digest("third")):
        pool.drop_tenant(Removal(tenant))
    assert [s.must_erase for s in pool.readings()] == [True, True]
    for _ in range(3):
        rows.shrink_to_limit()
        pool.enforce_budget()
    assert [s.must_erase for s in pool.readings()] == [False, True], "the other has no turn"
    assert keys_in(pool, "chat/m") == []


@pytest.mark.spec("E6")
def test_slab_of_an_engine_that_ended_before_it_erased_is_erased_as_it_comes_back(
    pool: Pool,
) -> None:
    rows = write_of(pool.lend(A, CHAT), "a")
    pool.drop_tenant(Removal(tenant_digest("other")))
    pool.drop_tenant(Removal(ACME))
    pool.take_back(A)
    assert keys_in(pool, "chat/m") == []
    assert [s.must_erase for s in pool.readings()] == [False]
    assert rows is not None


@pytest.mark.spec("E6")
def test_engine_that_loads_while_a_tenant_is_removed_brings_none_of_its_rows_back(
    saving: Pool, monkeypatch: pytest.MonkeyPatch, held: Event
) -> None:
    write_of(saving.lend(A, CHAT), "a")
    saving.take_back(A)
    squeeze(saving, monkeypatch)
    until(saving, lambda: len(saving.dropped()) == 1)
    monkeypatch.undo()
    file = Path(saving.file_for(CHAT) or "")
    slab = saving.lend(B, CHAT)
    saved = SavedRows(file, Content.KV, SPACE, Bytes(SLOT), time.time())
    with contextlib.closing(saved):
        saving.drop_tenant(Removal(ACME, time.time()))
        assert [s.must_erase for s in saving.readings()] == [False], "it may never open the slab"
        mark = saved.mark(b"a")
        assert mark is not None
        rows = opened(slab)
        rows.before_erasure = saved.forget_tenant
        rows.reserve([b"a"], tenant=ACME)
        rows.mark_restored(mark)
        saving.enforce_budget()
        assert [s.must_erase for s in saving.readings()] == [True]
        rows.shrink_to_limit()
        assert rows.keys() == [] and saved.mark(b"a") is None
    assert [s.must_erase for s in saving.readings()] == [False]


@pytest.mark.spec("D9", "E6")
def test_slab_that_an_engine_still_has_as_its_model_is_removed_goes_with_the_engine(
    saving: Pool,
) -> None:
    write(saving.lend(A, CHAT), "x")
    unwritten = saving.lend(B, CHAT)
    write(saving.lend(C, OTHER), "y")
    saving.drop_owner("chat/m")
    assert len(saving.readings()) == 3, "no slab is taken from an engine"
    write(unwritten, "z")
    for ticket in (A, B, C):
        saving.take_back(ticket)
    assert [s.owner for s in saving.readings()] == ["chat/o"]
    assert {d.reason for d in saving.dropped()} == {"removed"}


def hold_overwriting(pool: Pool, held: Event) -> None:
    pool._thread.submit(held.wait, 20)


@pytest.mark.spec("E6", "A19", "B1")
async def test_agent_waits_for_no_row_to_be_overwritten_and_lends_no_such_slab(
    pool: Pool, held: Event
) -> None:
    slab = pool.lend(A, CHAT)
    row = write_of(slab, "a").slab.row(0)
    row[:] = b"a" * SLOT
    write(slab, "x")
    pool.take_back(A)
    hold_overwriting(pool, held)
    pool.drop_tenant(Removal(ACME))
    assert keys_in(pool, "chat/m") == [b"x"] and row[:1] == b"a"
    await pool.overwritten(CHAT, 0.0)
    assert pool.lend(B, CHAT) != slab
    held.set()
    await pool.overwritten(CHAT, 60.0)
    assert not any(row)
    assert pool.lend(C, CHAT) == slab


@pytest.mark.spec("E6", "A19")
def test_agent_waits_for_no_row_that_a_writer_left_to_be_overwritten(
    pool: Pool, held: Event
) -> None:
    slab = pool.lend(A, CHAT)
    row = write_of(slab, "a").slab.row(0)
    row[:] = b"a" * SLOT
    pool.drop_tenant(Removal(ACME))
    hold_overwriting(pool, held)
    pool.take_back(A)
    assert keys_in(pool, "chat/m") == [] and row[:1] == b"a"
    assert pool.lend(B, CHAT) != slab
    held.set()
    pool._thread.submit(lambda: None).result(60)
    assert not any(row)


@pytest.mark.spec("B1")
def test_memory_of_a_dropped_slab_counts_until_it_is_given_back(pool: Pool, held: Event) -> None:
    write(pool.lend(A, CHAT), "x")
    pool.take_back(A)
    has = pool.allocated_bytes
    hold_overwriting(pool, held)
    pool.drop_owner("chat/m")
    assert (pool.readings(), pool.allocated_bytes, pool.leaving_bytes) == ((), 0, has)
    held.set()
    pool._thread.submit(lambda: None).result(60)
    assert pool.leaving_bytes == 0


@pytest.mark.spec("E7")
def test_counts_of_a_content_outlive_its_slabs(
    saving: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(saving.lend(A, CHAT), "a", "b")
    assert rows.lookup(b"a") is not None and rows.lookup(b"z") is None
    saving.take_back(A)
    [before] = saving.contents()
    assert (before.content, before.rows_count, before.hit_fraction) == (Content.KV, 2, 0.5)
    assert before.allocated_bytes == saving.allocated_bytes > 0
    squeeze(saving, monkeypatch)
    until(saving, lambda: bool(saving.dropped()))
    [after] = saving.contents()
    assert (after.rows_count, after.allocated_bytes, after.saves_count) == (0, 0, 1)
    assert (after.hits_count, after.misses_count, after.stored_count) == (1, 1, 2)
    monkeypatch.undo()
    write(saving.lend(B, CHAT), "c")
    [again] = saving.contents()
    assert (again.rows_count, again.stored_count) == (1, 3)
