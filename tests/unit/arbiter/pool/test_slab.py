"""The file of a slab: what a writer grows and gives back, what the next one finds, and damage."""

import contextlib
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from arbiter.errors import SlabUnusable
from arbiter.pool import Mark, Slab, SlabView, create, layout
from arbiter.units import GIB, KIB, MIB, Bytes, Content
from tests.support.slabs import (
    EXTENT,
    NAMESPACE,
    OTHER,
    ROW,
    Clock,
    has_its_bytes,
    keys,
    rows_of,
    set_limit,
    slab_file,
    store,
    writer,
)


def blocks(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.spec("E1", "E3")
def test_new_slab_is_named_for_the_pool_sealed_and_holds_no_more_than_its_header() -> None:
    fd = create("model-a", Bytes(GIB))
    assert "memfd:host-pool-model-a" in os.readlink(f"/proc/self/fd/{fd}")
    assert (os.fstat(fd).st_size, blocks(fd)) == (GIB, 4 * KIB)
    for size in (GIB // 2, 2 * GIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize("capacity", [0, 2 * MIB, 5 * MIB])
def test_slab_of_an_odd_size_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="2 MiB"):
        create("a", Bytes(capacity))


@pytest.mark.spec("E1")
def test_slab_grows_by_extents_within_its_limit_and_gives_them_back(fd: int) -> None:
    with contextlib.closing(writer(fd)) as slab:
        table = slab.geometry.table_end
        assert [slab.grow() for _ in range(6)] == [True] * 4 + [False] * 2
        assert blocks(fd) == slab.file.allocated_bytes == table + 4 * EXTENT
        assert slab.usable_count == 4 * EXTENT // ROW
        slab.cut(EXTENT)
        assert blocks(fd) == table + EXTENT
        assert slab.usable_count == EXTENT // ROW


class PagesAhead:
    """An extent that is there ahead."""

    def __init__(self, end: int) -> None:
        self.end = Bytes(end)

    def grown(self, start: Bytes, end: Bytes) -> None: ...

    def take(self, start: Bytes, end: Bytes) -> bool:
        return False

    def cut(self) -> Bytes:
        end, self.end = self.end, Bytes(0)
        return end


@pytest.mark.spec("E1", "E3")
def test_pages_ahead_are_given_back_once_the_limit_is_below_them(fd: int) -> None:
    with rows_of(fd, Clock()) as rows:
        store(rows, *keys(3))
        slab, before = rows.slab, blocks(fd)
        start = slab.geometry.data_offset + slab.allocated_bytes
        os.posix_fallocate(fd, start, EXTENT)
        slab.ahead = PagesAhead(start + EXTENT)
        rows.shrink_to_limit()
        assert blocks(fd) == before + EXTENT, "they are within it"
        set_limit(fd, 1)
        rows.shrink_to_limit()
        assert blocks(fd) == before and len(rows) == 3


@pytest.mark.spec("E1")
def test_last_extent_ends_with_the_file() -> None:
    with slab_file(rows=64) as fd:
        with contextlib.closing(SlabView(fd)) as view:
            view.limit_bytes = view.capacity
        with contextlib.closing(Slab(fd, Content.KV, NAMESPACE, ROW)) as slab:
            assert slab.extent_bytes > slab.file.capacity
            assert slab.grow() and not slab.grow()
            assert slab.usable_count == slab.geometry.rows_count == 64
            slab.row(63)[:] = bytes(ROW)
            assert blocks(fd) == slab.geometry.table_end + 64 * ROW


def test_slab_without_a_limit_holds_no_row() -> None:
    fd = create("a", Bytes(64 * MIB))
    with rows_of(fd, Clock()) as rows:
        assert store(rows, *keys(3)) == []
    with contextlib.closing(SlabView(fd)) as view:
        assert (view.counts.refused_count, view.ready_count) == (3, 0)
    os.close(fd)


@pytest.mark.parametrize(
    ("capacity", "row_bytes"),
    [(4 * MIB, 1), (4 * MIB, 3 * MIB), (64 * GIB, 2 * MIB), (4 * GIB, 257), (4 * MIB, 2 * MIB)],
)
def test_rows_and_table_never_overlap_and_end_within_the_file(
    capacity: int, row_bytes: int
) -> None:
    shape = layout.geometry(Bytes(capacity), Bytes(row_bytes))
    assert shape.table_end <= shape.data_offset
    assert shape.rows_count == 0 or shape.data_offset + shape.rows_count * row_bytes <= capacity
    waste = capacity - shape.rows_count * (row_bytes + layout.MARK_BYTES)
    assert 0 <= waste <= 2 * row_bytes + 4 * MIB


@pytest.mark.spec("E1", "E5")
def test_next_writer_finds_every_ready_row_and_nothing_else(fd: int) -> None:
    clock = Clock()
    with rows_of(fd, clock) as rows:
        assert store(rows, *keys(5)) == keys(5)
        half_written = rows.reserve([b"half"]).rows[b"half"]
        rows.slab.row(half_written)[:100] = b"x" * 100
    with rows_of(fd, clock) as rows:
        assert len(rows) == 5
        assert all(has_its_bytes(rows, key) for key in keys(5))
        assert rows.lookup(b"half") is None


@pytest.mark.spec("E2")
@pytest.mark.parametrize(
    ("content", "namespace", "row_bytes"),
    [
        (Content.KV, OTHER, ROW),
        (Content.ADAPTER, NAMESPACE, ROW),
        (Content.KV, NAMESPACE, ROW // 2),
    ],
)
def test_other_namespace_content_or_geometry_finds_no_row_and_no_byte(
    fd: int, content: Content, namespace: bytes, row_bytes: int
) -> None:
    with rows_of(fd, Clock()) as rows:
        store(rows, *keys(5))
    slab = Slab(fd, content, namespace, Bytes(row_bytes), extent_bytes=EXTENT)
    assert list(slab.marks()) == []
    assert blocks(fd) == slab.geometry.table_end
    while slab.grow():
        pass
    assert not any(bytes(slab.row(row)).strip(b"\0") for row in range(slab.usable_count))
    slab.close()
    with rows_of(fd, Clock()) as rows:
        assert len(rows) == 0, "what was wiped does not come back"


@pytest.mark.spec("E7")
def test_totals_of_a_slab_go_on_where_another_namespace_wipes_it(fd: int) -> None:
    with rows_of(fd, Clock()) as rows:
        store(rows, *keys(5))
        assert rows.lookup(b"missing") is None
    Slab(fd, Content.KV, OTHER, ROW, extent_bytes=EXTENT).close()
    with contextlib.closing(SlabView(fd)) as view:
        counts = view.counts
    assert (counts.ready_count, counts.stored_count, counts.misses_count) == (0, 5, 1)


@pytest.mark.spec("E2")
def test_owner_sees_what_a_slab_holds_and_for_whom(fd: int) -> None:
    clock = Clock()
    with contextlib.closing(SlabView(fd)) as view:
        assert (view.content, view.namespace, view.ready_count) == (None, b"", 0)
        with rows_of(fd, clock) as rows:
            store(rows, *keys(5))
            rows.lookup(b"k0")
            rows.lookup(b"absent")
            rows.pin([b"k1"])
        assert (view.content, view.namespace) == (Content.KV, NAMESPACE)
        assert view.allocated_bytes == blocks(fd)
        counts = view.counts
        assert (counts.ready_count, counts.stored_count, counts.loaded_count) == (5, 5, 1)
        assert (counts.hits_count, counts.misses_count) == (1, 1)
        assert view.ready_count == 5
        assert [view.has_live_rows(clock() + s) for s in (0.0, 99.0, 101.0)] == [True, True, False]
        assert not view.has_live_rows(clock() - layout.LONGEST_TERM_S), (
            "damage, or of a wrong clock"
        )


@pytest.mark.spec("E5")
def test_pages_of_a_writer_killed_while_it_grew_or_shrank_are_given_back(fd: int) -> None:
    with rows_of(fd, Clock()) as rows:
        store(rows, *keys(3))
        before = blocks(fd)
        end = rows.slab.geometry.data_offset + rows.slab.allocated_bytes
    os.posix_fallocate(fd, end, EXTENT)  # and then it was killed, before it wrote that down
    with rows_of(fd, Clock()) as rows:
        assert blocks(fd) == before
        assert all(has_its_bytes(rows, key) for key in keys(3))


def mark_of(row: int, field: int, value: bytes) -> Callable[[mmap.mmap], None]:
    at = layout.HEADER_BYTES + row * layout.MARK_BYTES + field

    def damage(memory: mmap.mmap) -> None:
        memory[at : at + len(value)] = value

    return damage


def header_of(at: int, value: bytes) -> Callable[[mmap.mmap], None]:
    def damage(memory: mmap.mmap) -> None:
        memory[at : at + len(value)] = value

    return damage


NAN, FAR = struct.pack("<d", float("nan")), struct.pack("<d", 1e300)
ALL_ROWS = {
    "magic": header_of(0, b"X"),
    "version": header_of(8, b"\xff"),
    "content": header_of(12, b"\xff"),
    "row bytes": header_of(48, b"\0" * 8),
    "row count": header_of(56, b"\xff" * 8),
    "data offset": header_of(64, b"\x01"),
    "allocated": header_of(layout.COUNTS_AT, b"\xff" * 8),
    "allocated, odd": header_of(layout.COUNTS_AT, b"\x01"),
    "whole header": header_of(0, b"\xa5" * layout.LIMIT_AT),
}
ONE_ROW = {
    "state": mark_of(0, 0, b"\xa5\xa5\xa5\xa5"),
    "state, half written": mark_of(0, 0, b"RE\0\0"),
    "expiry": mark_of(0, 8, NAN),
    "far expiry": mark_of(0, 8, FAR),
    "use": mark_of(0, 16, NAN),
    "no key": mark_of(0, 40, b"\0"),
    "long key": mark_of(0, 40, b"\xff"),
    "whole mark": mark_of(0, 0, b"\xff" * layout.MARK_BYTES),
}


@pytest.mark.spec("E5", "G4")
@pytest.mark.parametrize(
    ("damage", "left"),
    [(damage, 0) for damage in ALL_ROWS.values()] + [(damage, 4) for damage in ONE_ROW.values()],
    ids=[*ALL_ROWS, *ONE_ROW],
)
def test_damage_is_as_if_the_row_or_the_slab_were_empty(
    fd: int, damage: Callable[[mmap.mmap], None], left: int
) -> None:
    clock = Clock()
    with rows_of(fd, clock) as rows:
        store(rows, *keys(5))
    with contextlib.closing(mmap.mmap(fd, os.fstat(fd).st_size)) as memory:
        damage(memory)
    with rows_of(fd, clock) as rows:
        found = [key for key in keys(5) if has_its_bytes(rows, key)]
        assert len(found) == len(rows) == left
        assert store(rows, *keys(3, "new")) == keys(3, "new")
    with contextlib.closing(SlabView(fd)) as view:
        assert view.ready_count == left + 3


def test_counts_that_cannot_be_are_counted_anew(fd: int) -> None:
    with rows_of(fd, Clock()) as rows:
        store(rows, b"a")
    words = memoryview(mmap.mmap(fd, os.fstat(fd).st_size)).cast("Q")
    words[layout.COUNTS_AT // 8 + layout.Count.HITS] = 2**64 - 1
    with rows_of(fd, Clock()) as rows:
        assert has_its_bytes(rows, b"a")
    with contextlib.closing(SlabView(fd)) as view:
        assert view.counts.hits_count == 1


def test_rows_whose_pages_are_gone_are_not_there(fd: int) -> None:
    with rows_of(fd, Clock()) as rows:
        store(rows, *keys(5))
        rows.slab.file.punch(rows.slab.geometry.data_offset, Bytes(3 * MIB))
    with rows_of(fd, Clock()) as rows:
        assert len(rows) == 0
        assert store(rows, b"a") == [b"a"]


@pytest.mark.parametrize("kind", ["missing", "folder", "unsealed", "pipe", "disk"])
def test_what_is_no_slab_is_a_typed_error_that_names_it(tmp_path: Path, kind: str) -> None:
    unsealed, (pipe, _) = os.memfd_create("unsealed"), os.pipe()
    (disk := tmp_path / "disk").write_bytes(bytes(4 * MIB))
    where = {
        "missing": tmp_path / "missing",
        "folder": tmp_path,
        "unsealed": unsealed,
        "pipe": pipe,
        "disk": disk,
    }[kind]
    with pytest.raises(SlabUnusable, match=str(where)):
        SlabView(where)


def test_limit_is_one_word_that_the_writer_sees_at_once(fd: int) -> None:
    with contextlib.closing(writer(fd)) as slab:
        assert slab.permitted_bytes == 4 * EXTENT
        set_limit(fd, 1)
        assert slab.permitted_bytes == EXTENT


def test_mark_is_read_as_it_was_written() -> None:
    buffer = memoryview(bytearray(layout.HEADER_BYTES + 2 * layout.MARK_BYTES))
    mark = Mark(b"k" * layout.KEY_BYTES, 7.5, 3.25, b"t" * layout.TENANT_BYTES, 3)
    layout.write_mark(buffer, 1, mark)
    assert list(layout.read_marks(buffer, 2)) == [(1, mark)]
    assert layout.marked_rows(buffer, 2) == [1]
    layout.clear_mark(buffer, 1)
    assert (list(layout.read_marks(buffer, 2)), layout.marked_rows(buffer, 2)) == ([], [])


@pytest.mark.spec("E5")
def test_row_is_not_visible_before_all_of_its_mark_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = memoryview(bytearray(layout.HEADER_BYTES + layout.MARK_BYTES))
    fields, seen = layout._MARK, list[bool]()

    def pack_into(*values: object) -> None:
        fields.pack_into(*values)  # type: ignore[arg-type]
        seen.append(bool([*layout.read_marks(buffer, 1)]))  # where a kill would leave it

    monkeypatch.setattr(
        layout, "_MARK", SimpleNamespace(pack_into=pack_into, unpack_from=fields.unpack_from)
    )
    layout.write_mark(buffer, 0, layout.Mark(b"key", 2.0, 1.0))
    assert seen == [False] and [*layout.read_marks(buffer, 1)]
