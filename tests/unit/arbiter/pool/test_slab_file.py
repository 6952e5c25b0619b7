"""The file of a slab: what comes back from it, and what every kind of damage costs."""

import contextlib
import os
import resource
import shutil
import signal
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arbiter.pool import Mark, SavedRows, SlabView, Term, slab_file
from arbiter.pool.layout import LONGEST_TERM_S, TERMS_S, Removal
from arbiter.units import MIB, Bytes, Content
from tests.support import slabs
from tests.support.slabs import (
    NAMESPACE,
    OTHER,
    ROW,
    TERM_S,
    Clock,
    content_of,
    has_its_bytes,
    keys,
    rows_of,
    store,
)

MOST = Bytes(64 * MIB)
CLOCK = Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.slab"


def save(
    fd: int,
    path: Path,
    clock: Clock = CLOCK,
    most_bytes: Bytes = MOST,
    is_wanted: Callable[[], bool] = lambda: True,
) -> int:
    with contextlib.closing(SlabView(fd)) as view:
        return slab_file.save(view, path, now_s=clock(), most_bytes=most_bytes, is_wanted=is_wanted)


def saved(fd: int, path: Path, count: int = 5) -> None:
    with rows_of(fd, CLOCK) as rows:
        store(rows, *keys(count))
    assert save(fd, path) == count


@contextlib.contextmanager
def reader(
    path: Path, namespace: bytes = NAMESPACE, row_bytes: Bytes = ROW, clock: Clock = CLOCK
) -> Iterator[SavedRows]:
    rows = SavedRows(path, Content.KV, namespace, row_bytes, clock())
    with contextlib.closing(rows):
        yield rows


def readable(path: Path) -> list[bytes]:
    """The keys whose rows are found and check."""
    target = memoryview(bytearray(ROW))
    with reader(path) as rows:
        found = [key for key in list(rows.keys) if rows.read(key, target)]
        assert set(found) == set(rows.keys), "a row that does not check is forgotten"
    return sorted(found)


@pytest.mark.spec("G4")
def test_rows_come_back_with_their_bytes_tenant_class_and_expiry(fd: int, path: Path) -> None:
    with rows_of(fd, CLOCK) as rows:
        store(rows, *keys(5))
        for key in rows.reserve([b"special"]).rows:
            rows.slab.row(rows._reserved[key])[:] = content_of(key)
            rows.mark_ready(key, tenant=b"t" * 16, term=Term.EXTENDED)
        rows.reserve([b"half"])
    assert save(fd, path) == 6
    with reader(path) as found:
        assert set(found.keys) == {*keys(5), b"special"}
        mark = found.mark(b"special")
        assert mark is not None and (mark.tenant, mark.kind) == (b"t" * 16, Term.EXTENDED)
        assert mark.expires_s == CLOCK() + TERMS_S[Term.EXTENDED]
        for key in found.keys:
            target = bytearray(ROW)
            assert found.read(key, memoryview(target))
            assert target == content_of(key)
        assert not found.read(b"half", memoryview(bytearray(ROW)))


@pytest.mark.spec("G4")
def test_file_is_its_owners_alone_and_rows_begin_on_pages(fd: int, path: Path) -> None:
    saved(fd, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["a.slab"]
    with reader(path) as rows:
        assert all(row.offset % 4096 == 0 for row in rows.sources())
    assert slab_file.last_expiry(path) == CLOCK() + TERM_S


@pytest.mark.spec("G4", "E2")
def test_another_namespace_or_size_of_rows_sees_nothing(fd: int, path: Path) -> None:
    saved(fd, path)
    with reader(path, namespace=OTHER) as rows:
        assert not rows.keys
    with reader(path, row_bytes=Bytes(ROW // 2)) as rows:
        assert not rows.keys
    picture = SavedRows(path, Content.PICTURE, NAMESPACE, ROW, CLOCK())
    assert not picture.keys
    picture.close()


@pytest.mark.spec("G4")
def test_expired_rows_are_neither_saved_nor_found(fd: int, path: Path) -> None:
    clock = Clock()
    with rows_of(fd, clock) as rows:
        store(rows, b"old")
        clock.now_s += TERM_S / 2
        store(rows, b"new")
        clock.now_s += TERM_S / 2
    assert save(fd, path, clock) == 1
    with reader(path, clock=clock) as found:
        assert list(found.keys) == [b"new"]
    clock.now_s += TERM_S / 2
    with reader(path, clock=clock) as found:
        assert not found.keys
    assert save(fd, path.with_name("b.slab"), clock) == 0
    assert not path.with_name("b.slab").exists()


def flip(path: Path, *places: int) -> None:
    with path.open("r+b") as stream:
        for place in places:
            stream.seek(place)
            [byte] = stream.read(1)
            stream.seek(place)
            stream.write(bytes([byte ^ 0x40]))


@pytest.mark.spec("G4")
def test_row_with_a_flipped_byte_is_lost_and_the_others_are_not(fd: int, path: Path) -> None:
    saved(fd, path)
    with reader(path) as rows:
        offsets = {row.mark.key: row.offset for row in rows.sources()}
    flip(path, offsets[b"k1"], offsets[b"k3"] + ROW - 1)
    assert readable(path) == [b"k0", b"k2", b"k4"]


@pytest.mark.spec("G4")
def test_no_flipped_byte_of_header_and_table_gives_a_row_other_bytes(fd: int, path: Path) -> None:
    saved(fd, path, 2)
    whole = path.read_bytes()
    losses = 0
    for place in range(128 + 2 * slab_file._ENTRY_BYTES):
        flip(path, place)
        found = readable_as_stored(path)
        losses += len(found) < 2
        path.write_bytes(whole)
    assert losses > slab_file._ENTRY_BYTES, "all but padding matters"


def readable_as_stored(path: Path) -> list[bytes]:
    """As `readable`, of rows whose bytes follow from their keys."""
    found = []
    with reader(path) as rows:
        for key in list(rows.keys):
            target = bytearray(ROW)
            if rows.read(key, memoryview(target)):
                assert target == content_of(key)
                found.append(key)
    return found


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def leave_100_bytes(path: Path) -> None:
    os.truncate(path, 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def count_impossibly_many(path: Path) -> None:
    with path.open("r+b") as stream:
        head = list(slab_file._HEADER.unpack(stream.read(slab_file._HEADER.size)))
        head[5] = 1 << 60
        stream.seek(0)
        stream.write(slab_file._HEADER.pack(*head))


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [
    (cut_in_half, 2),
    (leave_100_bytes, 0),
    (empty, 0),
    (fill_with_garbage, 0),
    (count_impossibly_many, 5),
    (put_a_folder, 0),
    (put_a_link, 0),
    (put_a_pipe, 0),
    (Path.unlink, 0),
]


@pytest.mark.spec("G4")
@pytest.mark.parametrize(("damage", "left"), DAMAGES)
def test_damaged_file_has_only_the_rows_that_check_and_is_no_error(
    fd: int, path: Path, damage: Callable[[Path], None], left: int
) -> None:
    saved(fd, path)
    damage(path)
    assert len(readable(path)) == left


@pytest.mark.spec("G4")
@pytest.mark.parametrize("is_erased", [False, True])
def test_file_that_counts_more_rows_than_it_has_room_for_is_read_in_little_memory(
    fd: int, path: Path, is_erased: bool
) -> None:
    saved(fd, path)
    count_impossibly_many(path)
    os.truncate(path, 256 * MIB)  # without a block on the disk
    tracemalloc.start()
    try:
        if is_erased:
            slab_file.erase_tenant(path, Removal(bytes(16), CLOCK()))
        else:
            assert len(readable(path)) == 5
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damage", [empty, fill_with_garbage, put_a_folder, put_a_link, put_a_pipe])
def test_file_without_a_header_is_due_to_be_swept(
    fd: int, path: Path, damage: Callable[[Path], None]
) -> None:
    saved(fd, path)
    damage(path)
    assert slab_file.last_expiry(path) == 0.0


@pytest.mark.spec("G4")
@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_file_of_another_user_has_no_rows(fd: int, path: Path) -> None:
    saved(fd, path)
    os.chown(path, 12_345, -1)
    assert readable(path) == []


@pytest.mark.parametrize("expires_s", [float("nan"), float("inf"), CLOCK() + LONGEST_TERM_S + 1])
def test_impossible_times_are_damage(
    fd: int, path: Path, expires_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Mark(b"k0", expires_s, CLOCK())
    monkeypatch.setattr(SlabView, "places", lambda view: iter([(2 * MIB, mark)]))
    with rows_of(fd, CLOCK) as rows:
        store(rows, *keys(1))
    assert save(fd, path) == 0


@pytest.fixture
def small_files() -> Iterator[None]:
    """As a disk that is full after 200 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.spec("G4")
def test_full_disk_is_told_and_leaves_no_file(fd: int, path: Path, small_files: None) -> None:
    with rows_of(fd, CLOCK) as rows:
        store(rows, *keys(5))
    with pytest.raises(OSError, match="too large"):
        save(fd, path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.spec("G4")
def test_full_disk_leaves_the_file_of_the_last_time(fd: int, path: Path) -> None:
    saved(fd, path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with rows_of(fd, CLOCK) as rows:
        store(rows, *keys(5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save(fd, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert readable(path) == keys(2)


@pytest.mark.spec("G4")
def test_rows_that_only_the_earlier_file_has_stay_and_damaged_ones_do_not(
    fd: int, path: Path
) -> None:
    saved(fd, path, 4)
    with reader(path) as rows:
        [place] = [row.offset for row in rows.sources() if row.mark.key == b"k2"]
    flip(path, place)
    with slabs.slab_file() as next_one:
        with rows_of(next_one, CLOCK) as rows_of_next:
            store(rows_of_next, b"k0", b"new")
        assert save(next_one, path) == 4
    assert readable(path) == [b"k0", b"k1", b"k3", b"new"]


def test_file_has_the_last_used_rows_that_fit(fd: int, path: Path) -> None:
    with rows_of(fd, CLOCK) as rows:
        store(rows, *keys(8))
    assert save(fd, path, most_bytes=Bytes(4 * ROW)) == 3
    assert path.stat().st_size <= 4 * ROW
    assert readable(path) == [b"k5", b"k6", b"k7"]


@pytest.mark.parametrize("rows_before", [0, 1, 3, 5])
def test_save_that_is_no_longer_wanted_leaves_nothing(
    fd: int, path: Path, rows_before: int
) -> None:
    """Asked before each row and once after the last."""
    with rows_of(fd, CLOCK) as rows:
        store(rows, *keys(5))
    answers = iter([True] * rows_before + [False] * 9)
    assert save(fd, path, is_wanted=lambda: next(answers)) == 0
    assert list(path.parent.iterdir()) == []


def test_slab_that_no_writer_has_used_makes_no_file(fd: int, path: Path) -> None:
    assert save(fd, path) == 0
    assert list(path.parent.iterdir()) == []


@pytest.mark.spec("G4")
def test_restored_row_is_found_by_this_writer_and_the_next_and_expires_as_it_would_have(
    fd: int, path: Path
) -> None:
    saved(fd, path, 2)
    clock = Clock()
    clock.now_s += TERM_S / 2  # so that a use now would end later than what the file says
    with slabs.slab_file() as empty_one:
        with rows_of(empty_one, clock) as rows, reader(path, clock=clock) as file:
            mark = file.mark(b"k0")
            assert mark is not None and b"k0" not in rows
            row = rows.reserve([b"k0"]).rows[b"k0"]
            assert file.read(b"k0", rows.slab.row(row))
            rows.mark_restored(mark)
            assert b"k0" in rows and has_its_bytes(rows, b"k0")
        with contextlib.closing(SlabView(empty_one)) as view:
            assert view.counts.restored_count == 1 and view.counts.stored_count == 0
            # So that the removal of a tenant reaches what was stored before it, also from a file.
            [(_, shown)] = view.marks()
            assert shown.asked_s == mark.asked_s < clock.now_s
            assert shown.expires_s == mark.expires_s


def save_for_ever(fd: int, path: Path, ready: int) -> None:
    os.write(ready, b".")
    while True:
        save(fd, path)


@pytest.mark.spec("G4", "E5")
def test_saver_that_is_killed_leaves_a_whole_file_or_none(fd: int, path: Path) -> None:
    with rows_of(fd, CLOCK) as rows:
        store(rows, *keys(16))
    temporaries = 0
    for _ in range(12):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(fd, path, write)
            finally:
                os._exit(1)
        os.close(write)
        assert os.read(read, 1) == b"."
        os.close(read)
        while not any(path.parent.glob("*.tmp")):
            os.sched_yield()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        temporaries += any(path.parent.glob("*.tmp"))
        assert not path.exists() or len(readable(path)) == 16
        shutil.rmtree(path.parent)
        path.parent.mkdir()
    assert temporaries, "no child was killed while it saved"
