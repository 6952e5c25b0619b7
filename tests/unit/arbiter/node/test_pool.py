"""The pool of a node, with real memory files and without engines."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arbiter.node import pool as pools
from arbiter.node.pool import Pool
from arbiter.pool import Content, Rows, Slab
from arbiter.protocol.messages import SlabRequest
from arbiter.units import MIB, Bytes, TicketId

SPACE = b"n" * 32
SLOT = 2 * MIB
A, B, C = TicketId("a"), TicketId("b"), TicketId("c")
CHAT = SlabRequest("kv", "chat/m", "k1")
OTHER = SlabRequest("kv", "chat/o", "k2")


_OPEN: list[Slab] = []  # by the writers of a test


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(Bytes(256 * MIB))
    yield made
    made.close()
    while _OPEN:
        _OPEN.pop().close()


def write(path: str | None, *keys: str) -> Rows:
    """As an engine does."""
    rows = opened(path)
    for key, row in rows.reserve([key.encode() for key in keys]).rows.items():
        rows.slab.row(row)[:] = (key * SLOT)[:SLOT]
        rows.mark_ready(key)
    return rows


def opened(path: str | None, content: Content = Content.KV) -> Rows:
    assert path is not None
    _OPEN.append(Slab(path, content, SPACE, Bytes(SLOT)))
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


def test_no_slab_is_lent_where_there_is_no_pool() -> None:
    assert Pool(Bytes(0)).lend(A, CHAT) is None


def test_pool_is_a_share_of_the_ram_where_no_size_is_given() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0.09 * total < Pool(None).budget_bytes < 0.11 * total


def fill(rows: Rows) -> None:
    """As far as it may."""
    for key in rows.reserve([str(n).encode() for n in range(200)]).rows:
        rows.mark_ready(key)


@pytest.mark.spec("E4")
def test_writers_together_stay_within_the_budget(pool: Pool) -> None:
    first, second = opened(pool.lend(A, CHAT)), opened(pool.lend(B, OTHER))
    for _ in range(5):
        fill(first)
        fill(second)
        pool.turn()
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
    pool.turn()
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
        write(pool.lend(ticket, SlabRequest("kv", f"chat/{key}", key)), *"abcdefgh")
        pool.take_back(ticket)
    has = pool.allocated_bytes
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(0)))
    pool._kept_free_bytes = int(0.05 * has)  # of so much the pool is short
    pool.turn()
    [gone] = pool.dropped()
    assert (gone.owner, gone.reason) == ("chat/k1", "pressure")
    assert gone.size_bytes == has - pool.allocated_bytes
    pool.forget_dropped((gone,))
    assert pool.dropped() == ()


@pytest.mark.spec("E4")
def test_contents_leave_in_their_order_however_recently_used(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ticket, content in ((A, "kv"), (B, "temporary")):
        path = pool.lend(ticket, SlabRequest(content, "chat/m", content))
        opened(path, Content[content.upper()]).reserve([b"a"])
        pool.take_back(ticket)
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(0)))
    pool._kept_free_bytes = int(0.2 * pool.allocated_bytes)
    pool.turn()
    assert [gone.content for gone in pool.dropped()] == ["temporary"]


@pytest.mark.spec("E4")
def test_writer_is_asked_to_shrink_where_nothing_is_idle(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write(pool.lend(A, CHAT), *map(str, range(40)))
    has = pool.allocated_bytes
    monkeypatch.setattr(pools.procfs, "ram", lambda: (Bytes(10**12), Bytes(0)))
    pool._kept_free_bytes = has // 2
    pool.turn()
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
    path = pool.lend(A, CHAT)
    assert path is not None
    write(path, "x")
    pids = [engine(path), engine(path)]  # the parts of one engine
    pool.close()
    after = Pool(Bytes(256 * MIB))
    after.recover(A, pids)
    [reading] = after.readings()
    assert (reading.ticket, reading.owner, reading.rows_count) == (A, "chat/m", 1)
    after.take_back(A)
    assert write(after.lend(B, CHAT)).lookup(b"x") is not None
    after.close()


def test_what_is_not_a_slab_is_left_alone(tmp_path: Path, engine: Callable[[str], int]) -> None:
    (tmp_path / "file").touch()
    after = Pool(Bytes(256 * MIB))
    after.recover(A, [engine(str(tmp_path / "file"))])
    assert after.readings() == ()
