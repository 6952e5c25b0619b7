"""Blocks that come back from a file: asked for, awaited, checked, and never waited for without end.

The manager is driven as vLLM's scheduler does it; files and slabs are real."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from arbiter.pool import Removal, Rows, SavedRows, SlabView, slab_file
from arbiter.pool.layout import NO_TENANT
from arbiter.units import MIB, Bytes, Content
from deployments.engines.vllm.kv.kv_offload import SlabManager
from deployments.engines.vllm.kv.kv_restore import HANGS_S, Restorer
from tests.support import slabs
from tests.support.engine_host import until
from tests.support.slabs import (
    EXTENT,
    NAMESPACE,
    ROW,
    TERM_S,
    Clock,
    content_of,
    has_its_bytes,
    keys,
    rows_of,
    store,
)

FULL = 4 * EXTENT // ROW
NO_STEP = ScheduleEndContext([], [])
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
PENDING = LookupResult.HIT_PENDING
CLOCK = Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with FULL rows."""
    path = tmp_path / "a.slab"
    with slabs.slab_file() as fd:
        with rows_of(fd, CLOCK) as rows:
            store(rows, *keys(FULL))
        with contextlib.closing(SlabView(fd)) as view:
            most, wanted = Bytes(64 * MIB), lambda: True
            slab_file.save(view, path, now_s=CLOCK(), most_bytes=most, is_wanted=wanted)
    return path


@contextlib.contextmanager
def managed(path: Path, clock: Clock = CLOCK) -> Iterator[SlabManager]:
    """With an empty slab."""
    with slabs.slab_file() as fd, rows_of(fd, clock) as rows:
        saved = SavedRows(path, Content.KV, NAMESPACE, ROW, CLOCK())
        manager = SlabManager(rows, Restorer(rows, saved, clock))
        yield manager
        manager.shutdown()


@pytest.fixture
def manager(path: Path) -> Iterator[SlabManager]:
    with managed(path) as made:
        yield made


def request(*prefix: bytes) -> ReqContext:
    context = ReqContext("r")
    for place, key in enumerate(prefix, start=1):
        context.set_offload_key_position(key, place * 128)
    return context


def answer(manager: SlabManager, asked: ReqContext, *prefix: bytes) -> list[LookupResult]:
    """What the scheduler hears in the end, having asked in each step."""
    end_s = time.monotonic() + 60
    while True:
        results = [manager.lookup(key, asked) for key in prefix]
        manager.on_schedule_end(NO_STEP)
        if RETRY not in results:
            return results
        assert time.monotonic() < end_s


def restored(manager: SlabManager) -> int:
    return manager.facts()["restored"]


@pytest.mark.spec("G4")
def test_blocks_of_the_file_are_awaited_and_then_found(manager: SlabManager) -> None:
    asked = request(*keys(4))
    assert [manager.lookup(key, asked) for key in keys(4)] == [RETRY] * 4, "all are sent for"
    assert manager.has_pending_work()
    assert answer(manager, asked, *keys(4)) == [HIT] * 4
    assert not manager.has_pending_work()
    assert all(has_its_bytes(manager.rows, key) for key in keys(4))
    assert (restored(manager), manager.facts()["stored"]) == (4, 0)
    assert manager.lookup(b"never saved", asked) is MISS
    assert answer(manager, request(*keys(4)), *keys(4)) == [HIT] * 4
    assert restored(manager) == 4, "from RAM the second time"


@pytest.mark.spec("G4", "N1")
def test_request_whose_last_block_is_on_its_way_need_not_ask_for_all_of_them_again(
    manager: SlabManager, held: Event
) -> None:
    asked, other = request(*keys(4)), request(*keys(2))
    assert not manager.still_awaits(asked)
    for each, count in ((asked, 4), (other, 2)):
        assert [manager.lookup(key, each) for key in keys(count)] == [RETRY] * count
        assert manager.still_awaits(each)
        manager.on_schedule_end(NO_STEP)
    held.set()
    assert manager.restorer is not None
    manager.restorer._coming[b"k3"].result(60)
    assert not manager.still_awaits(asked), "it asks again, and hears of all"
    assert answer(manager, other, *keys(2)) == [HIT] * 2
    assert not manager.still_awaits(other)


@pytest.mark.spec("G4")
def test_rows_that_are_given_up_are_awaited_no_more(manager: SlabManager, held: Event) -> None:
    asked = request(*keys(4))
    assert [manager.lookup(key, asked) for key in keys(4)] == [RETRY] * 4
    manager.prepare_store([b"k3"], request(*keys(4)))
    assert not manager.still_awaits(asked)


@pytest.mark.spec("G4")
def test_block_that_does_not_check_is_a_miss_and_its_row_is_free_again(
    path: Path,
) -> None:
    with contextlib.closing(SavedRows(path, Content.KV, NAMESPACE, ROW, CLOCK())) as saved:
        [place] = [row.offset for row in saved.sources() if row.mark.key == b"k1"]
    with path.open("r+b") as stream:
        stream.seek(place + ROW // 2)
        stream.write(b"??")
    with managed(path) as manager:
        asked = request(*keys(3))
        assert answer(manager, asked, *keys(3)) == [HIT, MISS, HIT]
        assert answer(manager, request(b"k1"), b"k1") == [MISS], "it is not read again"
        reserved = manager.prepare_store([b"k1"], asked)
        assert reserved.keys_to_store == [b"k1"]
        manager.complete_store({b"k1"}, asked)
        assert manager.lookup(b"k1", asked) is HIT


@pytest.mark.spec("G4")
def test_file_that_is_cut_while_it_is_open_is_a_miss(path: Path) -> None:
    with managed(path) as manager:
        os.truncate(path, 4096)
        assert answer(manager, request(b"k0"), b"k0") == [MISS]


@pytest.mark.spec("G4")
def test_blocks_that_expire_in_an_open_file_are_not_restored(path: Path) -> None:
    clock = Clock()
    with managed(path, clock) as manager:
        clock.now_s += TERM_S
        assert manager.lookup(b"k0", request(b"k0")) is MISS


@pytest.fixture
def held(manager: SlabManager) -> Iterator[Event]:
    """The reader waits until it is set."""
    made = Event()
    assert manager.restorer is not None
    manager.restorer._thread.submit(made.wait, 20)
    yield made
    made.set()


@pytest.mark.spec("G4")
def test_two_requests_await_one_read_and_others_go_on(manager: SlabManager, held: Event) -> None:
    one, two = request(b"k0"), request(b"k0")
    assert manager.lookup(b"k0", one) is manager.lookup(b"k0", two) is RETRY
    other = request(b"o")
    assert manager.prepare_store([b"o"], other).keys_to_store == [b"o"]
    assert manager.lookup(b"o", other) is PENDING
    manager.complete_store({b"o"}, other)
    assert manager.lookup(b"o", other) is HIT
    held.set()
    assert answer(manager, one, b"k0") == answer(manager, two, b"k0") == [HIT]
    assert restored(manager) == 1


class HangingDisk:
    """Hangs in its first read until it goes on. `now_s`: of the restorer's clock."""

    def __init__(self, path: Path) -> None:
        self.now_s, self.begun, self.goes_on = 0.0, Event(), Event()
        self.saved = SavedRows(path, Content.KV, NAMESPACE, ROW, CLOCK())
        self._read = self.saved.read

    def read(self, key: bytes, target: memoryview) -> bool:
        self.begun.set()
        return self.goes_on.wait(60) and self._read(key, target)


@contextlib.contextmanager
def hanging(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HangingDisk, Any]]:
    """A disk, and a manager of which a request has just asked for three rows."""
    disk = HangingDisk(path)
    monkeypatch.setattr(disk.saved, "read", disk.read)
    with slabs.slab_file() as fd, rows_of(fd, CLOCK) as rows:
        restorer = Restorer(rows, disk.saved, CLOCK, monotonic=lambda: disk.now_s)
        manager, asked = SlabManager(rows, restorer), request(*keys(3))
        assert [manager.lookup(key, asked) for key in keys(3)] == [RETRY] * 3
        assert disk.begun.wait(60)
        disk.now_s += HANGS_S + 1
        yield disk, manager
        disk.goes_on.set()
        manager.shutdown()


@pytest.mark.spec("G4")
def test_disk_that_hangs_costs_requests_a_bound_and_then_a_prefill(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hanging(path, monkeypatch) as (disk, manager):
        asked = request(*keys(3))
        assert not manager.still_awaits(asked)
        assert [manager.lookup(key, asked) for key in keys(3)] == [MISS] * 3
        assert not manager.has_pending_work(), "an idle engine takes no step for it"
        assert manager.lookup(b"k5", request(b"k5")) is MISS, "nothing more is asked of that disk"
        computed = manager.prepare_store(keys(3), asked).keys_to_store
        assert computed == keys(3)[1:], "into the row of the first the disk may write yet"
        manager.complete_store(set(computed), asked)
        disk.goes_on.set()
        until(lambda: manager.lookup(b"k0", request(b"k0")) is HIT, 60)
        assert answer(manager, request(*keys(6)), *keys(6)) == [HIT] * 6
        assert all(has_its_bytes(manager.rows, key) for key in (b"k0", *keys(6)[3:]))


@pytest.mark.spec("D1", "E5", "G4")
def test_reset_does_not_wait_for_a_disk_that_hangs_and_its_row_is_no_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a model falls asleep beside it."""
    with hanging(path, monkeypatch) as (disk, manager):
        manager.reset_cache()
        for _ in range(3):
            manager.on_schedule_end(NO_STEP)
        stored = fill(manager.rows)
        assert len(stored) == FULL - 1
        disk.goes_on.set()
        until(lambda: manager.lookup(b"k0", request(b"k0")) is HIT, 60)
        assert all(has_its_bytes(manager.rows, key) for key in (b"k0", *stored))


@pytest.mark.spec("G4")
def test_block_that_is_computed_while_it_is_awaited_is_stored(
    manager: SlabManager, held: Event
) -> None:
    """Because a block before it was damaged, and vLLM asks but once to store it."""
    asked = request(*keys(3))
    assert [manager.lookup(key, asked) for key in keys(3)] == [RETRY] * 3
    assert manager.prepare_store(keys(3), asked).keys_to_store == keys(3)
    held.set()
    manager.on_schedule_end(NO_STEP)
    manager.complete_store(set(keys(3)), asked)
    assert [manager.lookup(key, asked) for key in keys(3)] == [HIT] * 3
    assert restored(manager) == 0


@pytest.mark.spec("G4")
def test_block_whose_request_is_gone_is_kept(manager: SlabManager) -> None:
    assert manager.lookup(b"k0", request(b"k0")) is RETRY
    end_s = time.monotonic() + 60
    while manager.has_pending_work():
        assert time.monotonic() < end_s
        manager.on_schedule_end(NO_STEP)
    assert has_its_bytes(manager.rows, b"k0")


@pytest.mark.spec("G4")
def test_requests_that_evict_each_others_blocks_come_to_an_end(manager: SlabManager) -> None:
    """Together they ask for more than the slab has rows: a block is read once for each at most."""
    one, two = keys(FULL)[: FULL - 2], keys(FULL)[2:]
    asked = [(request(*one), one), (request(*two), two)]
    more = keys(FULL, "new")
    for _ in range(50):
        for each, prefix in asked:
            for key in prefix:
                manager.lookup(key, each)
        newcomer = request(*more)
        manager.complete_store(set(manager.prepare_store(more, newcomer).keys_to_store), newcomer)
        manager.on_schedule_end(NO_STEP)
    assert restored(manager) <= len(one) + len(two)
    for each, prefix in asked:
        assert RETRY not in answer(manager, each, *prefix)


def test_prompt_longer_than_the_slab_restores_what_fits_and_evicts_none_of_it(
    path: Path,
) -> None:
    with managed(path) as manager:
        slabs.set_limit(manager.rows.slab.file.fd, 1)
        prefix = keys(FULL)
        results = answer(manager, request(*prefix), *prefix)
        assert results == [HIT] * (EXTENT // ROW) + [MISS] * (FULL - EXTENT // ROW)


@pytest.mark.spec("E5")
def test_reset_waits_for_the_row_that_is_being_written(manager: SlabManager, held: Event) -> None:
    """So that no later row is overwritten; what was only sent for is not read."""
    asked = request(*keys(3))
    assert [manager.lookup(key, asked) for key in keys(3)] == [RETRY] * 3
    manager.reset_cache()
    held.set()
    assert not manager.has_pending_work() and len(manager.rows) == 0
    stored = fill(manager.rows)
    assert answer(manager, request(b"k0"), b"k0") == [HIT]
    assert all(has_its_bytes(manager.rows, key) for key in stored if key in manager.rows)


def fill(rows: Rows) -> list[bytes]:
    reserved = rows.reserve(keys(FULL, "other")).rows
    for key, row in reserved.items():
        rows.slab.row(row)[:] = content_of(key)
        rows.mark_ready(key)
    return list(reserved)


@pytest.mark.spec("E6", "G4")
def test_rows_of_a_file_leave_with_the_tenant_that_stored_them_however_late_they_came_back(
    path: Path,
) -> None:
    later = Clock()
    later.now_s += 10
    with managed(path, later) as manager:
        assert answer(manager, request(*keys(2)), *keys(2)) == [HIT] * 2
        coming = request(b"k2")
        assert manager.lookup(b"k2", coming) is RETRY
        store(manager.rows, b"new")
        with contextlib.closing(SlabView(manager.rows.slab.file.fd)) as owner:
            owner.order_erasure(Removal(NO_TENANT, CLOCK()))
            assert answer(manager, coming, b"k2") in ([HIT], [MISS])
            manager.shrink()
            assert not owner.must_erase
        assert manager.rows.keys() == [b"new"]
        assert answer(manager, request(*keys(4)), *keys(4)) == [MISS] * 4
