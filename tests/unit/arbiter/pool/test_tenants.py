"""What each tenant may have of a slab's rows, and how those of a removed tenant are erased."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from arbiter.pool import Removal, Rows, SlabView, layout, rows
from arbiter.units import DEFAULT_TENANT
from tests.support.slabs import (
    EXTENT,
    ROW,
    TERM_S,
    Clock,
    content_of,
    has_its_bytes,
    keys,
    rows_of,
    set_limit,
    writer,
)

FULL = 4 * EXTENT // ROW  # rows within the limit
ACME, OTHER = layout.tenant_digest("acme"), layout.tenant_digest("other")


@pytest.fixture
def capped(fd: int, clock: Clock) -> Iterator[Rows]:
    """Of a slab in which one tenant may have a quarter of the rows."""
    with contextlib.closing(writer(fd)) as slab:
        yield Rows(slab, TERM_S, clock, caps={ACME: 0.25})


def store(into: Rows, tenant: bytes, *named: bytes) -> list[bytes]:
    """Those that found room."""
    found = into.reserve(named, tenant=tenant).rows
    for key, row in found.items():
        into.slab.row(row)[:] = content_of(key)
        into.mark_ready(key, tenant)
    return list(found)


def by_tenant(fd: int) -> Counter[bytes]:
    with contextlib.closing(SlabView(fd)) as view:
        return Counter(mark.tenant for _, mark in view.marks())


@pytest.mark.spec("E6")
def test_tenant_at_its_cap_loses_rows_of_its_own(fd: int, capped: Rows) -> None:
    store(capped, OTHER, *keys(4, "o"))
    store(capped, ACME, *keys(FULL // 4, "a"))
    capped.touch([b"a0"])
    found = capped.reserve([b"new"], tenant=ACME)
    assert (list(found.rows), found.evicted) == ([b"new"], [b"a1"])
    capped.mark_ready(b"new", ACME)
    assert by_tenant(fd) == {ACME: FULL // 4, OTHER: 4}
    assert all(has_its_bytes(capped, key) for key in keys(4, "o"))


@pytest.mark.spec("E6")
def test_what_is_beyond_the_cap_is_not_stored_and_counted(fd: int, capped: Rows) -> None:
    assert store(capped, ACME, *keys(FULL)) == keys(FULL // 4)
    with contextlib.closing(SlabView(fd)) as view:
        assert view.counts.refused_count == FULL - FULL // 4
    capped.pin(keys(FULL // 4))
    assert store(capped, ACME, b"x", b"y") == []
    assert len(store(capped, OTHER, *keys(FULL, "o"))) == FULL - FULL // 4, "no one's cap but its"


@pytest.mark.spec("E6")
def test_cap_follows_the_limit_of_the_slab(fd: int, capped: Rows) -> None:
    set_limit(fd, 2)
    assert len(store(capped, ACME, *keys(FULL))) == 2 * EXTENT // ROW // 4


@pytest.mark.spec("E6")
def test_rows_under_way_count_and_abandoned_ones_do_not(capped: Rows) -> None:
    reserved = list(capped.reserve(keys(FULL // 4), tenant=ACME).rows)
    assert capped.reserve([b"more"], tenant=ACME).rows == {}
    capped.abandon(reserved[0])
    assert list(capped.reserve([b"more"], tenant=ACME).rows) == [b"more"]


@pytest.mark.spec("E6")
def test_changed_cap_holds_for_rows_that_are_there_and_pinned_ones_leave_later(
    fd: int, capped: Rows
) -> None:
    store(capped, OTHER, *keys(4, "o"))
    store(capped, ACME, *keys(FULL // 4, "a"))
    assert capped.shrink_to_limit() == []
    capped.set_caps({ACME: 1 / FULL, OTHER: 0.5})
    capped.pin([b"a0", b"a1"])
    assert capped.shrink_to_limit() == keys(FULL // 4, "a")[2:]
    assert by_tenant(fd) == {ACME: 2, OTHER: 4}
    capped.unpin([b"a0", b"a1"])
    assert capped.shrink_to_limit() == [b"a0"]
    capped.set_caps({})
    assert store(capped, ACME, *keys(FULL // 4, "b")) == keys(FULL // 4, "b")


@pytest.mark.spec("E6", "G3")
def test_what_leaves_for_a_cap_is_told_of_its_tenant_alone_by_its_latest_use(
    capped: Rows, clock: Clock
) -> None:
    store(capped, OTHER, *keys(4, "o"))
    store(capped, ACME, *keys(FULL // 4))
    assert capped.capped_used_s == {}
    began_s = clock()
    clock.now_s += 10
    capped.touch([b"k0"])
    store(capped, ACME, b"new", b"newer")
    assert capped.capped_used_s.keys() == {ACME}
    assert began_s <= capped.capped_used_s[ACME] < clock(), "k1 and k2 left"
    assert capped.lost_used_s == 0.0
    clock.now_s += 10
    capped.set_caps({ACME: 0.0})
    assert b"k0" in capped.shrink_to_limit()
    assert clock() - 10 <= capped.capped_used_s[ACME] < clock()


@pytest.mark.spec("E6")
def test_next_writer_knows_how_many_rows_a_tenant_has(fd: int, capped: Rows) -> None:
    store(capped, ACME, *keys(FULL // 4))
    with contextlib.closing(writer(fd)) as slab:
        later = Rows(slab, TERM_S, Clock(), caps={ACME: 0.25})
        assert later.reserve([b"new"], tenant=ACME).evicted == [b"k0"]


def bytes_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


@pytest.mark.spec("E6")
def test_writer_erases_what_the_owner_orders_and_nothing_else(fd: int) -> None:
    with rows_of(fd, Clock()) as own, contextlib.closing(SlabView(fd)) as owner:
        store(own, ACME, b"secret")
        store(own, OTHER, b"theirs")
        assert owner.order_erasure(Removal(ACME))
        assert owner.must_erase and not owner.order_erasure(Removal(OTHER)), "one removal at a time"
        assert own.shrink_to_limit() == [b"secret"]
        assert not owner.must_erase
        assert content_of(b"secret") not in bytes_of(fd)
        assert has_its_bytes(own, b"theirs")
        assert owner.order_erasure(Removal(OTHER))


@pytest.mark.spec("E3", "E6")
def test_pinned_and_reserved_rows_are_erased_once_they_are_let_go(fd: int) -> None:
    with rows_of(fd, Clock()) as own, contextlib.closing(SlabView(fd)) as owner:
        store(own, ACME, b"read")
        own.pin([b"read"])
        own.reserve([b"written"], tenant=ACME)
        owner.order_erasure(Removal(ACME))
        assert own.shrink_to_limit() == []
        own.unpin([b"read"])
        assert own.shrink_to_limit() == [b"read"] and owner.must_erase
        own.mark_ready(b"written", ACME)
        assert own.shrink_to_limit() == [b"written"] and not owner.must_erase


@pytest.mark.spec("E6")
def test_step_waits_for_the_erasure_of_some_rows_only(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ERASED_AT_ONCE", 3)
    with rows_of(fd, Clock()) as own, contextlib.closing(SlabView(fd)) as owner:
        store(own, ACME, *keys(7))
        owner.order_erasure(Removal(ACME))
        assert [len(own.shrink_to_limit()) for _ in range(4)] == [3, 3, 1, 0]
        assert not owner.must_erase


@pytest.mark.spec("E6")
def test_order_that_a_killed_writer_left_open_is_the_next_writers(fd: int) -> None:
    with rows_of(fd, Clock()) as own, contextlib.closing(SlabView(fd)) as owner:
        store(own, ACME, b"secret")
        owner.order_erasure(Removal(ACME))
    with rows_of(fd, Clock()) as later:
        assert later.shrink_to_limit() == [b"secret"]


@pytest.mark.spec("E6")
def test_owner_erases_in_a_slab_that_no_writer_has(fd: int) -> None:
    with rows_of(fd, Clock()) as own:
        store(own, ACME, b"secret")
        store(own, OTHER, b"theirs")
    with contextlib.closing(SlabView(fd)) as owner:
        before = owner.allocated_bytes
        assert owner.erase_tenant(Removal(ACME)) == 1 and owner.erase_tenant(Removal(ACME)) == 0
        assert owner.allocated_bytes == before
    assert content_of(b"secret") not in bytes_of(fd)
    with rows_of(fd, Clock()) as later:
        assert later.lookup(b"secret") is None and has_its_bytes(later, b"theirs")


def test_default_tenant_is_that_of_rows_without_a_name(fd: int) -> None:
    assert layout.tenant_digest(DEFAULT_TENANT) == layout.tenant_digest("") == layout.NO_TENANT
    with rows_of(fd, Clock()) as own:
        own.reserve([b"a"])
        own.mark_ready(b"a")
    assert by_tenant(fd) == {layout.NO_TENANT: 1}


@pytest.mark.spec("E6")
def test_tenant_that_has_come_again_keeps_what_it_stored_after_its_removal(
    fd: int, clock: Clock
) -> None:
    """Also where its writer is told later, and what it uses again was stored before."""
    with rows_of(fd, clock) as own, contextlib.closing(SlabView(fd)) as owner:
        store(own, ACME, b"old")
        own.reserve([b"under way"], tenant=ACME)
        removal = Removal(ACME, clock())
        clock.now_s += 1
        own.touch([b"old"])
        store(own, ACME, b"new")
        own.mark_ready(b"under way", ACME)
        assert owner.order_erasure(removal)
        assert set(own.shrink_to_limit()) == {b"old", b"under way"}
        assert not owner.must_erase and has_its_bytes(own, b"new")


@pytest.mark.spec("E6")
def test_order_waits_for_what_was_under_way_at_the_removal_and_for_nothing_later(
    fd: int, clock: Clock
) -> None:
    with rows_of(fd, clock) as own, contextlib.closing(SlabView(fd)) as owner:
        own.reserve([b"before"], tenant=ACME)
        owner.order_erasure(Removal(ACME, clock()))
        clock.now_s += 1
        own.reserve([b"after"], tenant=ACME)
        assert own.shrink_to_limit() == [] and owner.must_erase
        own.mark_ready(b"before", ACME)
        assert own.shrink_to_limit() == [b"before"] and not owner.must_erase


@pytest.mark.spec("E6")
def test_request_that_came_before_the_removal_stores_nothing_after_it(
    fd: int, clock: Clock
) -> None:
    with rows_of(fd, clock) as own, contextlib.closing(SlabView(fd)) as owner:
        asked_s = clock()
        owner.order_erasure(Removal(ACME, clock()))
        clock.now_s += 1
        assert own.reserve([b"a"], tenant=ACME, asked_s=asked_s).rows, "its order is not read yet"
        own.mark_ready(b"a", ACME)
        assert own.shrink_to_limit() == [b"a"] and not owner.must_erase
        assert own.reserve([b"b"], tenant=ACME, asked_s=asked_s).rows == {}
        assert own.reserve([b"b"], tenant=OTHER, asked_s=asked_s).rows
        assert own.reserve([b"c"], tenant=ACME).rows, "it has come again"


@pytest.mark.spec("E6")
def test_idle_slab_keeps_what_a_tenant_stored_after_its_removal_also_under_the_next_writer(
    fd: int, clock: Clock
) -> None:
    with rows_of(fd, clock) as own:
        store(own, ACME, b"old")
        removed_s = clock.now_s
        clock.now_s += 1
        store(own, ACME, b"new")
    with contextlib.closing(SlabView(fd)) as owner:
        assert owner.counts.ready_count == 2
        assert owner.erase_tenant(Removal(ACME, removed_s)) == 1
        assert owner.counts.ready_count == 1, "as its reading says"
    with rows_of(fd, clock) as later, contextlib.closing(SlabView(fd)) as owner:
        owner.order_erasure(Removal(ACME, removed_s))
        assert later.shrink_to_limit() == [] and has_its_bytes(later, b"new")
