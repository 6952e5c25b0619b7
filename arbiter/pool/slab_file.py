"""What a slab held, in one file on disk: written when its rows must leave RAM, read row by row.

    0      header: magic, version, content, namespace, bytes of a row, count, when the last expires
    128    the table: an entry per row with its mark, its place, and a digest of mark and bytes
    ...    the rows, each from a border of 4 KiB on

The file appears whole under its name, or not at all. Nothing in it is believed: a row counts once
its bytes have been read and agree with its digest (G4).
"""

import contextlib
import hashlib
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from arbiter.pool import layout
from arbiter.pool.layout import Mark, Removal
from arbiter.pool.slab import SlabView
from arbiter.units import KIB, MIB, Bytes, Content

SUFFIX, TEMPORARY = ".slab", ".tmp"
_MAGIC = b"ARBROWS\n"
_VERSION = 2  # raise it when anything of the above changes
_HEADER = struct.Struct("<8sII32sQQd")
_TABLE_AT = 128
_MARK = struct.Struct("<Idd16sB60sd")
_PLACE = struct.Struct("<Q32s")  # offset of the bytes, digest
_ENTRY_BYTES = _MARK.size + _PLACE.size
_ALIGNED_BYTES = 4 * KIB
_PIECE_BYTES = MIB  # copied at once; a larger row takes several
_ENTRIES_AT_ONCE = 1_024  # that are read of a table; a file of 1 GiB has about 500
# Written back so often, so that a save takes little of the RAM that it is to free.
_SYNC_BYTES = 64 * MIB
_DIGEST_BYTES = 32
assert _HEADER.size <= _TABLE_AT


class _Row(NamedTuple):
    mark: Mark
    offset: int
    digest: bytes


class _Source(NamedTuple):
    """Describes a row to be saved: where its bytes are, and what they must be if that is known."""

    mark: Mark
    fd: int
    offset: int
    digest: bytes | None


class _Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Head:
    content: Content
    namespace: bytes
    row_bytes: int
    rows_count: int
    expires_s: float


class SavedRows:
    """Holds the rows of a file that were saved under this content, namespace and size and have not
    expired. A file that is missing, foreign or damaged has none, and is no error. One thread may
    `read` while another looks at `keys` and `mark`."""

    def __init__(
        self, path: Path, content: Content, namespace: bytes, row_bytes: Bytes, now_s: float
    ) -> None:
        self._namespace, self._row_bytes = namespace, row_bytes
        self._rows: dict[bytes, _Row] = {}
        self._fd = _open(path)
        if self._fd is None:
            return
        head = _read_head(self._fd)
        form = (content, namespace, row_bytes)
        if head is not None and (head.content, head.namespace, head.row_bytes) == form:
            table = _read_table(self._fd, head)
            self._rows = {r.mark.key: r for r in table if layout.is_live(r.mark.expires_s, now_s)}

    @property
    def keys(self) -> KeysView[bytes]:
        return self._rows.keys()

    def mark(self, key: bytes) -> Mark | None:
        """Returns what was known of a row when it was saved."""
        row = self._rows.get(key)
        return None if row is None else row.mark

    def read(self, key: bytes, target: memoryview) -> bool:
        """Copies a row. False: its bytes are not those that were saved, `target` has any bytes, and
        the row is forgotten."""
        row = self._rows.get(key)
        if row is None or self._fd is None:
            return False
        try:
            size = os.preadv(self._fd, [target], row.offset)
        except OSError:  # of the disk
            size = 0
        digest = _digest(self._namespace, row.mark)
        digest.update(target)
        if size == self._row_bytes and digest.digest() == row.digest:
            return True
        self._rows.pop(key, None)
        return False

    def forget_tenant(self, removal: Removal) -> None:
        """Has the rows that leave with a tenant be found no more."""
        rows = list(self._rows.items())  # at once, because a `read` may take one out meanwhile
        for key in [k for k, row in rows if removal.covers(row.mark.tenant, row.mark.asked_s)]:
            self._rows.pop(key, None)

    def sources(self) -> Iterator[_Source]:
        """Returns the rows, to be saved once more."""
        for row in self._rows.values():
            assert self._fd is not None
            yield _Source(row.mark, self._fd, row.offset, row.digest)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self._rows = {}


def save(
    view: SlabView,
    path: Path,
    *,
    now_s: float,
    most_bytes: Bytes,
    is_wanted: Callable[[], bool],
    has_time: Callable[[], bool] | None = None,
) -> int:
    """Writes the READY rows of a slab that no writer has to a file, the most recently used ones
    first, until it has `most_bytes` or no time; rows that an earlier file of that name has beside
    them stay. Returns how many rows the file has; 0: it was not made, because there are none, or
    `is_wanted` said no. Raises OSError where the disk is full or fails, and leaves nothing then."""
    shape, content = view.geometry, view.content
    if shape is None or content is None:
        return 0
    older = SavedRows(path, content, view.namespace, shape.row_bytes, now_s)
    try:
        own = {
            mark.key: _Source(mark, view.fileno(), offset, None)
            for offset, mark in view.places()
            if layout.is_live(mark.expires_s, now_s)
        }
        rest = (row for row in older.sources() if row.mark.key not in own)
        rows = sorted([*own.values(), *rest], key=lambda row: -row.mark.used_s)
        rows = rows[: _fitting(most_bytes, shape.row_bytes)]
        head = _Head(content, view.namespace, shape.row_bytes, len(rows), 0.0)
        return _save(rows, head, path, is_wanted, has_time or _always) if rows else 0
    finally:
        older.close()


def erase_tenant(path: Path, removal: Removal) -> bool:
    """Replaces a file by one without the rows of a removed tenant, or removes it where no other row
    is left. Returns whether it had any. Raises OSError, and then the file is as it was."""
    fd = _open(path)
    if fd is None:
        return False
    try:
        head = _read_head(fd)
        rows = [] if head is None else list(_read_table(fd, head))
        kept = [
            _Source(r.mark, fd, r.offset, r.digest)
            for r in rows
            if not removal.covers(r.mark.tenant, r.mark.asked_s)
        ]
        if head is None or len(kept) == len(rows):
            return False
        if not kept or not _save(kept, head, path, _always, _always):
            path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def last_expiry(path: Path) -> float:
    """Returns the wall-clock second at which the last row of a file expires; 0 where the file is
    none of ours."""
    fd = _open(path)
    if fd is None:
        return 0.0
    try:
        head = _read_head(fd)
    finally:
        os.close(fd)
    return head.expires_s if head is not None and math.isfinite(head.expires_s) else 0.0


def _fitting(most_bytes: Bytes, row_bytes: Bytes) -> int:
    """Returns how many rows a file of that size has."""
    room = most_bytes - _TABLE_AT - _ALIGNED_BYTES
    return max(0, room // (_up(row_bytes) + _ENTRY_BYTES))


def _always() -> bool:
    return True


def _save(
    rows: list[_Source],
    head: _Head,
    path: Path,
    is_wanted: Callable[[], bool],
    has_time: Callable[[], bool],
) -> int:
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    temporary.unlink(missing_ok=True)  # of an earlier process of this number
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    target = os.open(temporary, flags, 0o600)
    try:
        saved = _write(target, rows, head, is_wanted, has_time)
        # All bytes have been read by now. Had a writer got the slab before, it would not be wanted:
        # so every row of the file was read while no writer could change it.
        if not saved or not is_wanted():
            return 0
        os.fsync(target)
        temporary.rename(path)
        return saved
    finally:
        os.close(target)
        temporary.unlink(missing_ok=True)


def _write(
    target: int,
    rows: list[_Source],
    head: _Head,
    is_wanted: Callable[[], bool],
    has_time: Callable[[], bool],
) -> int:
    """Writes rows, table and header, in this order. Returns how many rows there are."""
    at = _up(_TABLE_AT + len(rows) * _ENTRY_BYTES)
    table: list[bytes] = []
    unsynced, expires_s = 0, 0.0
    for row in rows:
        if not is_wanted():
            return 0
        if not has_time():
            break
        digest = _digest(head.namespace, row.mark)
        _copy(row, head.row_bytes, target, at, digest)
        if row.digest in (None, digest.digest()):
            table.append(_packed(row.mark) + _PLACE.pack(at, digest.digest()))
            at += _up(head.row_bytes)
            expires_s = max(expires_s, row.mark.expires_s)
        unsynced += head.row_bytes
        if unsynced >= _SYNC_BYTES:
            os.fdatasync(target)
            os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
            unsynced = 0
    os.ftruncate(target, at)
    facts = (
        layout.content_code(head.content),
        head.namespace,
        head.row_bytes,
        len(table),
        expires_s,
    )
    _write_all(target, _HEADER.pack(_MAGIC, _VERSION, *facts), 0)
    _write_all(target, b"".join(table), _TABLE_AT)
    return len(table)


def _copy(row: _Source, size: int, target: int, at: int, digest: _Digest) -> None:
    """Copies a row by reads, because a read of a page that a slab has given back allocates none."""
    for offset in range(0, size, _PIECE_BYTES):
        piece = os.pread(row.fd, min(_PIECE_BYTES, size - offset), row.offset + offset)
        digest.update(piece)
        _write_all(target, piece, at + offset)


def _write_all(target: int, piece: bytes, at: int) -> None:
    rest = memoryview(piece)
    while rest:
        written = os.pwrite(target, rest, at)
        rest, at = rest[written:], at + written


def _digest(namespace: bytes, mark: Mark) -> _Digest:
    """Begins the digest of a row with its mark: a changed key or time is damage too."""
    return hashlib.blake2b(_packed(mark), key=namespace, digest_size=_DIGEST_BYTES)


def _packed(mark: Mark) -> bytes:
    times = (mark.expires_s, mark.used_s)
    return _MARK.pack(mark.kind, *times, mark.tenant, len(mark.key), mark.key, mark.asked_s)


def _open(path: Path) -> int | None:
    """Opens a file. Returns None unless it is a regular file of this user, and no link."""
    try:
        # Without O_NONBLOCK a pipe of that name would never open.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags)
    except OSError:
        return None
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
        return fd
    os.close(fd)
    return None


def _read_head(fd: int) -> _Head | None:
    """Returns the header; None where there is none of this version."""
    with contextlib.suppress(OSError, struct.error, ValueError):
        magic, version, content, *facts = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        if (magic, version) == (_MAGIC, _VERSION) and content in layout.CONTENTS:
            return _Head(layout.CONTENTS[content], *facts)
    return None


def _read_table(fd: int, head: _Head) -> Iterator[_Row]:
    """Returns the entries of the table that can be: others are damage, and so is a count of more
    rows than the file has room for."""
    size = os.fstat(fd).st_size
    most = max(0, size - _TABLE_AT) // (_ENTRY_BYTES + _up(max(1, head.row_bytes)))
    count = min(head.rows_count, most)
    for first in range(0, count, _ENTRIES_AT_ONCE):
        length = min(_ENTRIES_AT_ONCE, count - first) * _ENTRY_BYTES
        try:
            entries = os.pread(fd, length, _TABLE_AT + first * _ENTRY_BYTES)
        except OSError:  # of the disk
            return
        yield from _sound_rows(entries, head.row_bytes, size)


def _sound_rows(entries: bytes, row_bytes: int, file_bytes: int) -> Iterator[_Row]:
    for at in range(0, len(entries) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
        kind, expires, used, tenant, length, key, stored = _MARK.unpack_from(entries, at)
        offset, digest = _PLACE.unpack_from(entries, at + _MARK.size)
        mark = Mark(key[:length], expires, used, tenant, kind, stored)
        has_bytes = 0 < length <= layout.KEY_BYTES and offset + row_bytes <= file_bytes
        if has_bytes and mark.is_sound:
            yield _Row(mark, offset, digest)


def _up(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
