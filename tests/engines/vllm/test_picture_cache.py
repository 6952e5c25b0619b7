"""Projected pictures in a slab: who stays, for how long, what a promise holds, and the copies."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arbiter.pool import Removal, SlabView, layout
from arbiter.units import Bytes, Content
from deployments.engines.vllm.pictures.picture_cache import (
    ENTRIES,
    ROW_EMBEDDINGS,
    TERM_S,
    Copies,
    RequestedPicture,
)
from tests.support.picture_slabs import (
    CAPACITY,
    DTYPE,
    EMBEDDINGS,
    ROW,
    WIDTH,
    SeeingEngine,
    embeddings,
    opened,
    picture_slab_file,
    set_limit,
)
from tests.support.slabs import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fd() -> Iterator[int]:
    with picture_slab_file() as made:
        yield made


@pytest.fixture
def engine(fd: int, clock: Clock) -> Iterator[SeeingEngine]:
    with opened(fd, clock) as made:
        yield made


@pytest.mark.spec("H8")
def test_thirty_third_picture_drops_the_one_unused_for_longest(engine: SeeingEngine) -> None:
    names = [f"p{number}" for number in range(ENTRIES)]
    for name in names:
        assert engine.look(name) == [False]
    assert engine.look("p0") == [True]
    assert engine.look("new") == [False]
    assert engine.cache.facts()["entries"] == ENTRIES == 32
    assert engine.counts == (1, ENTRIES + 1)
    assert [engine.look(name) for name in ("p0", "p2", "new")] == [[True]] * 3
    assert engine.look("p1") == [False]


@pytest.mark.spec("H8")
def test_picture_leaves_when_unused_for_the_term(engine: SeeingEngine, clock: Clock) -> None:
    engine.look("old")
    clock.now_s += TERM_S - 1
    engine.look("new")
    assert engine.look("old") == [True]  # its term begins anew
    clock.now_s += TERM_S - 1
    engine.cache.expire()
    assert engine.cache.facts()["entries"] == 2
    clock.now_s += 1
    assert engine.look("old") == [False]
    clock.now_s += TERM_S
    engine.cache.expire()
    facts = engine.cache.facts()
    assert (facts["entries"], facts["ready"]) == (0, 0)
    assert engine.cache.rows.slab.allocated_bytes == 0
    assert engine.look("new") == [False]


@pytest.mark.spec("H8", "E1")
def test_next_engine_finds_what_a_killed_one_left_whole(fd: int, clock: Clock) -> None:
    with opened(fd, clock) as engine:
        engine.look("a")
        engine.look("b", count=3 * ROW_EMBEDDINGS + 1)
        engine.schedule("in flight")  # its rows are reserved, and never written
    with opened(fd, clock) as engine:
        assert engine.look("a") == [True]
        assert engine.look("b", count=3 * ROW_EMBEDDINGS + 1) == [True]
        assert engine.look("in flight") == [False]
        assert (engine.counts, engine.cache.encoder_runs) == ((2, 4), 1)


@pytest.mark.spec("H8")
def test_other_count_of_embeddings_is_another_picture(engine: SeeingEngine) -> None:
    engine.look("a")
    assert engine.look("a", count=EMBEDDINGS + 1) == [False]


@pytest.mark.spec("H8", "E3")
def test_promise_is_held_until_the_worker_has_loaded(fd: int, clock: Clock) -> None:
    """However long that takes, and whatever asks for room, memory or time meanwhile."""
    with opened(fd, clock, entries=2) as engine:
        engine.look("a")
        copies, promised = engine.schedule("a")
        assert promised == [True]
        for name in ("b", "c", "d"):
            engine.look(name)
        clock.now_s += 2 * TERM_S
        engine.cache.expire()
        engine.cache.purge()
        set_limit(fd, Bytes(0))
        engine.cache.shrink()
        assert torch.equal(engine.work(copies)["a"], embeddings("a", EMBEDDINGS))
        engine.cache.shrink()
        assert engine.cache.facts()["ready"] == 0


@pytest.mark.spec("H8")
def test_promise_that_no_request_took_ends_with_its_step(engine: SeeingEngine) -> None:
    engine.look("a")
    engine.cache.expect([RequestedPicture("a", EMBEDDINGS)])
    assert engine.cache.promise("a") and engine.cache.promise("a")
    assert engine.cache.end_step() == Copies()
    engine.cache.purge()
    assert engine.look("a") == [False]
    assert engine.counts == (0, 2), "it was not read"


@pytest.mark.spec("H8", "E5")
def test_picture_is_there_once_it_is_written_and_not_before(engine: SeeingEngine) -> None:
    first, _ = engine.schedule("a")
    second, promised = engine.schedule("a")  # a step that begins before the first one ends
    assert (promised, second.saves) == ([False], [])
    engine.work(first)
    engine.work(second)
    assert engine.look("a") == [True]


@pytest.mark.spec("H8")
def test_embeddings_of_another_shape_or_type_are_not_kept(engine: SeeingEngine) -> None:
    for wrong in (torch.zeros(EMBEDDINGS, WIDTH + 1, dtype=DTYPE), torch.zeros(EMBEDDINGS, WIDTH)):
        copies, _ = engine.schedule("a")
        [save] = copies.saves
        assert not engine.copier.save(save, wrong)
        engine.cache.finish(copies, [])
        assert engine.cache.facts()["ready"] == 0
    assert engine.look("a") == [False]


@pytest.mark.spec("H8", "E6")
def test_what_finds_no_room_is_encoded_each_time_and_harms_no_other(fd: int, clock: Clock) -> None:
    set_limit(fd, Bytes(layout.geometry(CAPACITY, ROW).table_end + 2 * ROW))
    with opened(fd, clock) as engine:
        engine.look("a")
        for _ in range(2):
            assert engine.look("large", count=2 * ROW_EMBEDDINGS + 1) == [False]
        assert engine.cache.facts()["entries"] <= 1
        assert engine.look("b") == [False]
        assert engine.look("b") == [True]


@pytest.mark.spec("H8")
def test_picture_that_lost_a_row_is_encoded_and_whole_again(engine: SeeingEngine) -> None:
    count = 3 * ROW_EMBEDDINGS
    engine.look("a", count=count)
    engine.cache.rows.evict([RequestedPicture("a", count).keys[1]])
    assert engine.cache.facts()["entries"] == 0
    assert engine.look("a", count=count) == [False]
    assert engine.look("a", count=count) == [True]


def spoil_header(memory: mmap.mmap) -> None:
    memory[0:64] = bytes(range(64))


def spoil_marks(memory: mmap.mmap) -> None:
    memory[4096 : 4096 + 2 * 128] = b"\xa5" * (2 * 128)


@pytest.mark.spec("H8", "E5")
@pytest.mark.parametrize("damage", [spoil_header, spoil_marks])
def test_damaged_slab_is_as_if_the_pictures_were_unknown(
    fd: int, clock: Clock, damage: Any
) -> None:
    with opened(fd, clock) as engine:
        engine.look("a", "b")
    with contextlib.closing(mmap.mmap(fd, os.fstat(fd).st_size)) as memory:
        damage(memory)
    with opened(fd, clock) as engine:
        assert engine.look("a", "b") == [False, False]
        assert engine.look("a", "b") == [True, True]


@pytest.mark.spec("H8", "E6")
def test_rows_name_their_tenant(fd: int, engine: SeeingEngine) -> None:
    engine.look("a")
    with contextlib.closing(SlabView(fd)) as view:
        assert view.content is Content.PICTURE
        assert [mark.tenant for _, mark in view.marks()] == [layout.tenant_digest("acme")]


@pytest.mark.spec("E6", "H8")
def test_pictures_of_a_removed_tenant_are_erased(fd: int, engine: SeeingEngine) -> None:
    engine.look("p")
    with contextlib.closing(SlabView(fd)) as owner:
        assert owner.order_erasure(Removal(layout.tenant_digest("acme")))
        engine.cache.shrink()
        assert not owner.must_erase and owner.ready_count == 0
    assert engine.look("p") == [False]
