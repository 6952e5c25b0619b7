"""Rows in the process that writes them: room, order of eviction, pins, terms and the limit."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from arbiter.errors import RowMisused
from arbiter.pool import Rows, SlabView, Term, layout
from arbiter.pool.layout import TERMS_S
from tests.support.slabs import (
    EXTENT,
    ROW,
    TERM_S,
    Clock,
    content_of,
    has_its_bytes,
    keys,
    rows_of,
    run_and_kill,
    set_limit,
    store,
)

FULL = 4 * EXTENT // ROW  # rows within the limit


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rows(fd: int, clock: Clock) -> Iterator[Rows]:
    with rows_of(fd, clock) as made:
        yield made


def ready(rows: Rows, among: list[bytes]) -> list[bytes]:
    return [key for key in among if has_its_bytes(rows, key)]


def test_least_recently_used_row_leaves_first(rows: Rows) -> None:
    store(rows, *keys(FULL))
    rows.touch([b"k0"])
    assert rows.reserve([b"new"]).evicted == [b"k1"]
    assert has_its_bytes(rows, b"k0")


@pytest.mark.spec("E4")
def test_tail_of_a_prefix_leaves_before_its_head_also_under_the_next_writer(
    fd: int, clock: Clock, rows: Rows
) -> None:
    prefix = keys(FULL)
    store(rows, *prefix)
    rows.touch(reversed(prefix))
    assert rows.reserve([b"a", b"b"]).evicted == [prefix[-1], prefix[-2]]
    rows.forget_in_flight()
    rows.free_forgotten()
    with rows_of(fd, clock) as later:
        assert later.reserve(keys(3, "n")).evicted == [prefix[-3]]


@pytest.mark.spec("G4")
def test_terms_are_five_minutes_an_hour_unless_told_and_a_day() -> None:
    assert (TERMS_S[Term.SHORT], TERMS_S[Term(0)], TERMS_S[Term.EXTENDED]) == (300, 3_600, 86_400)


@pytest.mark.spec("G4")
def test_row_expires_with_the_latest_of_its_uses_also_under_the_next_writer(
    fd: int, clock: Clock, rows: Rows
) -> None:
    store(rows, b"a", b"b")
    rows.touch([b"a"], Term.EXTENDED)
    rows.touch([b"a", b"b"], Term.SHORT)
    day, short = TERMS_S[Term.EXTENDED], TERMS_S[Term.SHORT]
    assert TERM_S < short < day
    clock.now_s += short
    assert ready(rows, [b"a", b"b"]) == [b"a"]
    rows.touch([b"a"])
    with rows_of(fd, clock) as later:
        [(_, mark)] = later.slab.marks()
        assert (mark.kind, mark.expires_s) == (Term.EXTENDED, clock() - short + day)
        clock.now_s += day - short
        assert later.expire() == [b"a"]


def test_prefix_of_the_asker_is_no_victim_of_its_own_tail(rows: Rows) -> None:
    prefix = keys(FULL)
    store(rows, *prefix)
    found = rows.reserve([b"tail"], keep=prefix)
    assert (found.rows, found.evicted) == ({}, [])


@pytest.mark.spec("E6")
def test_what_finds_no_room_is_left_out_from_the_end_and_counted(fd: int, rows: Rows) -> None:
    pinned = keys(FULL - 2)
    store(rows, *pinned)
    rows.pin(pinned)
    assert list(rows.reserve(keys(5, "n")).rows) == keys(2, "n")
    with contextlib.closing(SlabView(fd)) as view:
        assert view.counts.refused_count == 3


def test_key_that_is_there_or_on_its_way_gets_no_second_row(rows: Rows) -> None:
    store(rows, b"a")
    rows.reserve([b"b"])
    assert list(rows.reserve([b"a", b"b", b"c", b"c"]).rows) == [b"c"]
    assert rows.is_reserved(b"b") and not rows.is_reserved(b"a")


@pytest.mark.spec("E3")
def test_pinned_row_is_neither_evicted_nor_expired_nor_moved(
    fd: int, clock: Clock, rows: Rows
) -> None:
    store(rows, *keys(FULL))
    (place,) = rows.pin([keys(FULL)[-1]])
    clock.now_s += 2 * TERM_S
    set_limit(fd, 0)
    rows.shrink_to_limit()
    assert (len(rows), place) == (1, FULL - 1)
    assert rows.slab.usable_count == FULL
    rows.unpin([keys(FULL)[-1]])
    rows.shrink_to_limit()
    assert (len(rows), rows.slab.usable_count) == (0, 0)


@pytest.mark.spec("E3")
def test_pins_are_counted(rows: Rows) -> None:
    store(rows, b"a")
    rows.pin([b"a"])
    rows.pin([b"a"])
    rows.unpin([b"a"])
    with pytest.raises(RowMisused, match="1 pins"):
        rows.drop(b"a")
    rows.unpin([b"a"])
    rows.drop(b"a")
    assert rows.lookup(b"a") is None


@pytest.mark.spec("E3")
def test_pins_end_with_their_process(fd: int, clock: Clock) -> None:
    def work(pipe: int) -> None:
        with rows_of(fd, clock) as rows:
            store(rows, b"a")
            rows.pin([b"a"])
            rows.reserve([b"b"])
            os.write(pipe, b".")
            while True:
                rows.pin([b"a"])

    run_and_kill(work, 0, 1_000_000)
    with rows_of(fd, clock) as later:
        assert has_its_bytes(later, b"a")
        later.drop(b"a")
        assert not later.is_reserved(b"b")


@pytest.mark.spec("E3")
def test_use_out_of_turn_is_a_typed_error_that_changes_nothing(rows: Rows) -> None:
    store(rows, b"a")
    with pytest.raises(RowMisused, match="no pin"):
        rows.unpin([b"a"])
    with pytest.raises(RowMisused, match="not READY"):
        rows.pin([b"a", b"absent"])
    with pytest.raises(RowMisused, match="not reserved"):
        rows.mark_ready(b"a")
    with pytest.raises(RowMisused, match="not reserved"):
        rows.abandon(b"a")
    rows.drop(b"a")  # also: the failed pin has left no count
    with pytest.raises(RowMisused, match="freed, and it is not READY"):
        rows.drop(b"a")
    with pytest.raises(RowMisused, match="not READY"):
        rows.pin([b"a"])


@pytest.mark.spec("G4")
def test_row_expires_its_term_after_its_last_use(fd: int, clock: Clock, rows: Rows) -> None:
    store(rows, b"old", b"used")
    clock.now_s += TERM_S - 1
    rows.touch([b"used"])
    clock.now_s += 2
    assert rows.lookup(b"old") is None
    assert has_its_bytes(rows, b"used")
    with rows_of(fd, clock) as later:
        assert ready(later, [b"old", b"used"]) == [b"used"]
    clock.now_s += TERM_S
    with rows_of(fd, clock) as later:
        assert len(later) == 0


def test_expired_rows_make_room_before_the_slab_grows(rows: Rows, clock: Clock) -> None:
    store(rows, *keys(4))
    assert rows.slab.allocated_bytes == EXTENT
    clock.now_s += 2 * TERM_S
    assert rows.reserve(keys(4, "n")).evicted == keys(4)
    assert rows.slab.allocated_bytes == EXTENT


def test_expired_row_of_a_prefix_that_is_stored_again_stays(rows: Rows, clock: Clock) -> None:
    """Else the prefix would have a hole: it is READY when it is asked for, and swept for room."""
    store(rows, *keys(4))
    clock.now_s += 2 * TERM_S
    assert store(rows, *keys(8)) == keys(8)[4:]
    assert ready(rows, keys(8)) == keys(8)


@pytest.mark.spec("E1", "E4")
def test_lower_limit_evicts_expired_then_least_recent_rows_and_keeps_the_bytes_of_the_rest(
    fd: int, clock: Clock, rows: Rows
) -> None:
    store(rows, *keys(FULL - 4))
    clock.now_s += TERM_S / 2
    store(rows, *keys(4, "n"))
    clock.now_s += TERM_S / 2 + 1
    rows.touch(keys(2))
    set_limit(fd, 1)
    gone = rows.shrink_to_limit()
    assert set(gone) == {*keys(FULL - 4)[2:], b"n0", b"n1"}
    kept = [b"k0", b"k1", b"n2", b"n3"]
    assert ready(rows, kept) == kept
    assert os.fstat(fd).st_blocks * 512 == rows.slab.geometry.table_end + EXTENT
    with rows_of(fd, clock) as later:
        assert ready(later, kept) == kept


@pytest.mark.spec("G3")
def test_latest_use_that_was_lost_is_that_of_rows_that_left_as_the_oldest(
    fd: int, clock: Clock, rows: Rows
) -> None:
    store(rows, *keys(FULL - 1))
    clock.now_s += 10
    rows.touch([b"k0"])
    store(rows, b"young")
    assert rows.lost_used_s == 0.0
    rows.reserve([b"new"])
    assert clock() - 10 <= rows.lost_used_s < clock() - 9, "k1 left"
    set_limit(fd, 1)
    before_s, gone = rows.lost_used_s, rows.shrink_to_limit()
    assert rows.lost_used_s > before_s and b"young" not in gone
    clock.now_s += 2 * TERM_S
    assert set(rows.expire()) >= {b"k0", b"young"}
    assert rows.lost_used_s < clock() - 2 * TERM_S, "other rows as old may have longer terms"


@pytest.mark.spec("E1")
def test_lower_limit_waits_for_rows_that_are_being_written(fd: int, rows: Rows) -> None:
    store(rows, *keys(FULL - 1))
    (last,) = rows.reserve([b"last"]).rows.values()
    set_limit(fd, 1)
    rows.shrink_to_limit()
    assert rows.slab.usable_count > last
    rows.slab.row(last)[:] = bytes(ROW)
    rows.mark_ready(b"last")
    rows.shrink_to_limit()
    assert rows.slab.allocated_bytes == EXTENT
    assert rows.lookup(b"last") in range(4)


def test_limit_that_permits_all_changes_nothing(rows: Rows) -> None:
    store(rows, *keys(FULL))
    assert rows.shrink_to_limit() == []
    assert ready(rows, keys(FULL)) == keys(FULL)


def test_slab_that_shrank_grows_again(fd: int, rows: Rows) -> None:
    store(rows, *keys(FULL))
    set_limit(fd, 1)
    rows.shrink_to_limit()
    set_limit(fd, 4)
    assert store(rows, *keys(FULL - 4, "n")) == keys(FULL - 4, "n")
    assert len(rows) == FULL


@pytest.mark.spec("E5")
def test_row_that_a_dead_writer_moved_half_way_is_found_once(
    fd: int, clock: Clock, rows: Rows
) -> None:
    store(rows, *keys(3))
    mark = next(mark for _, mark in rows.slab.marks() if mark.key == b"k0")
    rows.slab.row(3)[:] = content_of(b"k0")
    layout.write_mark(rows.slab.file.buffer, 3, mark)  # and then it was killed
    with rows_of(fd, clock) as later:
        assert len(later) == 3 and has_its_bytes(later, b"k0")
        assert len(store(later, *keys(FULL - 3, "n"))) == FULL - 3


def test_reset_frees_what_is_in_flight_and_keeps_what_is_ready(rows: Rows) -> None:
    store(rows, *keys(3))
    rows.pin(keys(3))
    rows.reserve(keys(FULL - 3, "n"))
    rows.forget_in_flight()
    assert ready(rows, keys(3)) == keys(3)
    rows.drop(b"k0")
    assert len(store(rows, b"m0", b"m1")) == 2, "one in the place of another that is READY"
    rows.free_forgotten()
    assert len(store(rows, *keys(FULL - 2, "n"))) == FULL - 2
