"""A slab: one memory file of equal rows that outlives the process which writes them.

The owner, a node agent, creates the file, keeps it open and says how much of it may be allocated.
One writer at a time, an engine, maps it, grows and shrinks it within that limit, and marks rows
READY once their bytes are there. The next writer of the same namespace finds them; any other finds
an empty slab. Nothing here waits or locks, but for what a writer's `ExtentPreallocator` does.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from arbiter.errors import SlabUnusable
from arbiter.pool import layout
from arbiter.pool.layout import Count, Geometry, Header, Mark, Removal
from arbiter.pool.tenants import Erasure
from arbiter.units import Bytes, Content

NAME = "host-pool"  # the prefix of the file's name, by which the kernel's lists show it
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_BLOCK_BYTES = 512  # the unit of st_blocks (stat(2))
_MOST_COUNTED = 1 << 62  # more is damage, and would soon overflow
_OF_ROWS = Count.ALLOCATED, Count.READY, Count.HOT  # what is there now
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def create(label: str, capacity: Bytes, *, name: str = NAME) -> int:
    """Makes an empty slab that may never be larger than `capacity`, a multiple of 2 MiB. Returns
    its descriptor. With another `name` its bytes are on the account of the process that makes it.
    The file has memory for its header only, and may allocate none: see
    `SlabView.limit_bytes`. Sealed against shrinking, so that no page vanishes under a writer.
    Raises OSError, and ValueError for another capacity."""
    if capacity < 2 * layout.PAGE_BYTES or capacity % layout.PAGE_BYTES:
        raise ValueError(f"a slab of {capacity} bytes: need a multiple of 2 MiB, at least 4 MiB")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    fd = os.memfd_create(f"{name}-{label}", flags)
    try:
        os.ftruncate(fd, capacity)
        os.posix_fallocate(fd, 0, layout.HEADER_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class SlabFile:
    """Opens and maps the file of a slab. `where`: a descriptor, of which it keeps a copy, or a path
    such as /proc/123/fd/45. Raises SlabUnusable for what is no slab's file."""

    def __init__(self, where: int | str | Path) -> None:
        self.fd = _open(where)
        try:
            self.capacity = Bytes(_sealed_size(where, self.fd))
            self._map = mmap.mmap(self.fd, self.capacity)
        except (OSError, SlabUnusable) as error:
            os.close(self.fd)
            raise _unusable(where, error) from error
        self.buffer = memoryview(self._map)
        self._limit = self.buffer[layout.LIMIT_AT : layout.LIMIT_AT + 8].cast("Q")
        counts = layout.COUNTS_AT, layout.COUNTS_AT + 8 * len(Count)
        self.counts = self.buffer[slice(*counts)].cast("Q")
        self.erasure = Erasure(self.buffer)

    @property
    def limit_bytes(self) -> Bytes:
        """Returns how much of the file may be allocated."""
        return Bytes(self._limit[0])

    @limit_bytes.setter
    def limit_bytes(self, limit: Bytes) -> None:
        self._limit[0] = limit  # one store of 8 aligned bytes: a reader sees the old or the new

    @property
    def allocated_bytes(self) -> Bytes:
        """Returns what the kernel holds for the whole file, header and table included."""
        return Bytes(os.fstat(self.fd).st_blocks * _BLOCK_BYTES)

    def punch(self, start: Bytes, end: Bytes) -> None:
        """Gives the pages of a range back; it reads as zeros from then on. Raises OSError."""
        if start < end and _libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, start, end - start):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Unmaps the file. Views of its buffer that others hold keep the mapping alive."""
        with contextlib.suppress(BufferError):  # an array still shows it, and keeps it
            for view in (self.erasure, self._limit, self.counts, self.buffer):
                view.release()
            self._map.close()
        os.close(self.fd)


class ExtentPreallocator(Protocol):
    """Allocates pages of a slab's next extent before its writer counts them as allocated."""

    end: Bytes
    """Where in the file such pages end; 0: there are none."""

    def grown(self, start: Bytes, end: Bytes) -> None:
        """Notes that the slab has grown. The next extent would be this range, which is empty where
        none is permitted. No page of an earlier range is left here."""

    def take(self, start: Bytes, end: Bytes) -> bool:
        """Says whether this has made the pages of the range, which are the caller's from now on."""
        ...

    def cut(self) -> Bytes:
        """Returns `end`, and forgets the pages: the caller gives them back."""
        ...


class Slab:
    """Maps a slab for its one writer, and grows and shrinks it. `row_bytes` and `content` are the
    writer's; what was written in another namespace, content or geometry is wiped before anything
    can be read. Pages exist for the first `usable_count` rows, and for none behind them but those
    of `ahead`, which the writer may set."""

    def __init__(
        self,
        where: int | str | Path,
        content: Content,
        namespace: bytes,
        row_bytes: Bytes,
        *,
        extent_bytes: Bytes = Bytes(layout.EXTENT_BYTES),
    ) -> None:
        if len(namespace) != layout.NAMESPACE_BYTES or row_bytes <= 0:
            raise ValueError(f"a namespace has {layout.NAMESPACE_BYTES} bytes, a row at least one")
        self.file = SlabFile(where)
        self.geometry: Geometry = layout.geometry(self.file.capacity, row_bytes)
        self.extent_bytes = extent_bytes
        self.ahead: ExtentPreallocator | None = None
        header = Header(content, namespace, self.geometry)
        try:
            os.posix_fallocate(self.file.fd, 0, self.geometry.table_end)
            if layout.read_header(self.file.buffer) != header:
                self._wipe(header)
            self._repair()
        except OSError as error:
            self.file.close()
            raise _unusable(where, error) from error

    def _wipe(self, header: Header) -> None:
        buffer, end = self.file.buffer, self.geometry.table_end
        layout.erase_header(buffer)
        self.file.punch(self.geometry.data_offset, self.file.capacity)
        buffer[layout.HEADER_BYTES : end] = bytes(end - layout.HEADER_BYTES)
        for count in _OF_ROWS:  # the others are of all its writers
            self.file.counts[count] = 0
        layout.write_header(buffer, header)

    def _repair(self) -> None:
        """Makes the pages agree with what the header says of them, after a writer that died while
        it grew or shrank the slab, or after damage."""
        for count in Count:
            if self.file.counts[count] > _MOST_COUNTED:
                self.file.counts[count] = 0
        most = self.file.capacity - self.geometry.data_offset
        allocated = self.allocated_bytes
        if allocated > most or (allocated % self.extent_bytes and allocated != most):
            allocated = Bytes(0)
        self.file.counts[Count.ALLOCATED] = allocated
        end = Bytes(self.geometry.data_offset + allocated)
        self.file.punch(end, self.file.capacity)
        if self.file.allocated_bytes < self.geometry.table_end + allocated:
            self.cut(Bytes(0))  # some rows have lost their pages, and with them their bytes

    @property
    def allocated_bytes(self) -> Bytes:
        """Returns the bytes of the rows that have pages, counted from the first row."""
        return Bytes(self.file.counts[Count.ALLOCATED])

    @property
    def usable_count(self) -> int:
        """Returns how many rows have their pages."""
        whole = self.allocated_bytes // self.geometry.row_bytes
        return min(self.geometry.rows_count, whole)

    @property
    def permitted_bytes(self) -> Bytes:
        """Returns the bytes that rows may have by the limit, in whole extents."""
        most = self.file.capacity - self.geometry.data_offset
        free = min(most, max(0, self.file.limit_bytes - self.geometry.table_end))
        return Bytes(free if free == most else free // self.extent_bytes * self.extent_bytes)

    def grow(self) -> bool:
        """Adds one extent; the last one may be shorter. False where the limit, the capacity or the
        machine's memory has no room for it."""
        allocated, offset = self.allocated_bytes, self.geometry.data_offset
        more = self._permitted_extent(allocated)
        if not more:
            return False
        start, end = Bytes(offset + allocated), Bytes(offset + allocated + more)
        if not (self.ahead and self.ahead.take(start, end)):
            try:
                os.posix_fallocate(self.file.fd, start, more)
            except OSError:
                return False
        self.file.counts[Count.ALLOCATED] = allocated + more
        if self.ahead:
            self.ahead.grown(end, Bytes(end + self._permitted_extent(Bytes(allocated + more))))
        return True

    def _permitted_extent(self, allocated: Bytes) -> Bytes:
        """Returns the size of the extent behind so many bytes of rows; 0 where the capacity or the
        limit has no room for it."""
        more = min(self.extent_bytes, self.file.capacity - self.geometry.data_offset - allocated)
        return Bytes(more if more > 0 and allocated + more <= self.permitted_bytes else 0)

    def cut(self, allocated: Bytes) -> None:
        """Gives back the pages behind so many bytes of rows. No row there may be in use."""
        before, offset = self.allocated_bytes, self.geometry.data_offset
        end = max(self.ahead.cut() if self.ahead else 0, offset + before)
        self.file.counts[Count.ALLOCATED] = min(allocated, before)
        self.file.punch(Bytes(offset + min(allocated, before)), Bytes(end))

    def keep_to_limit(self) -> None:
        """Gives back what was allocated ahead where the limit has fallen below it meanwhile."""
        if self.ahead and self.ahead.end > self.geometry.data_offset + self.permitted_bytes:
            self.cut(self.allocated_bytes)

    def row(self, row: int) -> memoryview:
        """Returns the bytes of a row, shape [row_bytes], within the mapping."""
        start = self.geometry.data_offset + row * self.geometry.row_bytes
        return self.file.buffer[start : start + self.geometry.row_bytes]

    def marks(self) -> Iterator[tuple[int, Mark]]:
        """Returns the rows that are READY and have their pages."""
        return layout.read_marks(self.file.buffer, self.usable_count)

    def facts(self) -> dict[str, int]:
        """Counts by name, bytes of the whole file, and its limit."""
        counts = {each.name.lower(): self.file.counts[each] for each in Count}
        del counts["allocated"]
        sizes = {"allocated_bytes": self.file.allocated_bytes, "limit_bytes": self.file.limit_bytes}
        return counts | sizes

    def close(self) -> None:
        self.cut(self.allocated_bytes)
        self.file.close()


@dataclass(frozen=True, slots=True)
class Counts:
    """Holds what the writer counted, since the slab had its first row."""

    ready_count: int
    hits_count: int
    misses_count: int
    stored_count: int
    evicted_count: int
    refused_count: int
    loaded_count: int
    restored_count: int  # rows that came back from a file
    hot_hits_count: int  # requests for which the slab was not asked (layout.Count)
    hot_count: int
    load_ns: int  # in which rows were on their way into an engine
    restore_ns: int  # in which rows were read from a file


class SlabView:
    """Shows a slab to its owner. It believes nothing that a writer could make it crash with."""

    def __init__(self, where: int | str | Path) -> None:
        self._file = SlabFile(where)

    @property
    def capacity(self) -> Bytes:
        return self._file.capacity

    @property
    def allocated_bytes(self) -> Bytes:
        return self._file.allocated_bytes

    @property
    def limit_bytes(self) -> Bytes:
        return self._file.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit: Bytes) -> None:
        self._file.limit_bytes = limit

    @property
    def content(self) -> Content | None:
        """Returns what the rows are; None while no writer has used the slab."""
        header = layout.read_header(self._file.buffer)
        return None if header is None else header.content

    @property
    def namespace(self) -> bytes:
        """Returns 32 bytes; none while no writer has used the slab."""
        header = layout.read_header(self._file.buffer)
        return b"" if header is None else header.namespace

    @property
    def counts(self) -> Counts:
        words = list(self._file.counts)
        return Counts(*words[Count.READY :])

    @property
    def geometry(self) -> Geometry | None:
        """Returns where the rows lie; None while no writer has used the slab, and where its header
        cannot be."""
        header = layout.read_header(self._file.buffer)
        if header is None:
            return None
        row_bytes = Bytes(max(1, header.geometry.row_bytes))
        possible = header.geometry == layout.geometry(self._file.capacity, row_bytes)
        return header.geometry if possible else None

    def marks(self) -> Iterator[tuple[int, Mark]]:
        """Returns the rows that are READY."""
        shape = self.geometry
        if shape is None:
            return iter(())
        return layout.read_marks(self._file.buffer, shape.rows_count)

    def places(self) -> Iterator[tuple[int, Mark]]:
        """Returns where in the file the bytes of each READY row begin, without rows that have no
        pages."""
        shape = self.geometry
        if shape is not None:
            usable = self._file.counts[Count.ALLOCATED] // shape.row_bytes
            for row, mark in self.marks():
                if row < usable:
                    yield shape.data_offset + row * shape.row_bytes, mark

    def fileno(self) -> int:
        """Returns the descriptor of the file, which ends with this view."""
        return self._file.fd

    @property
    def ready_count(self) -> int:
        """Returns how many rows are READY, read from the table."""
        return sum(1 for _ in self.marks())

    def has_live_rows(self, now_s: float) -> bool:
        """Says whether a READY row has not expired. `now_s`: wall-clock seconds."""
        return any(layout.is_live(mark.expires_s, now_s) for _, mark in self.marks())

    def order_erasure(self, removal: Removal) -> bool:
        """Has the writer erase the rows of a tenant. False: an earlier removal is still open."""
        return self._file.erasure.begin(removal)

    @property
    def must_erase(self) -> bool:
        """Says whether the writer has a removal to carry out."""
        return self.ordered_removal is not None

    @property
    def ordered_removal(self) -> Removal | None:
        """Returns which rows the writer is to erase; None where no removal is open."""
        return self._file.erasure.removal

    def erase_tenant(self, removal: Removal) -> int:
        """Overwrites rows of a removed tenant in a slab that no writer has. Returns how many."""
        rows = self.clear_tenant(removal)
        self.overwrite(rows)
        return len(rows)

    def clear_tenant(self, removal: Removal) -> list[int]:
        """Makes the rows of a removed tenant invisible in a slab that no writer has. Returns them:
        their bytes are there until `overwrite`."""
        rows = [row for row, m in self.marks() if removal.covers(m.tenant, m.asked_s)]
        for row in rows:
            layout.clear_mark(self._file.buffer, row)
        if rows:
            self._file.counts[Count.READY] = self.ready_count
        return rows

    def overwrite(self, rows: Sequence[int]) -> None:
        """Overwrites rows in a slab that no writer has. Takes a second for some GiB, in pieces
        between which other threads run."""
        shape = self.geometry
        usable = self._file.counts[Count.ALLOCATED] // shape.row_bytes if shape else 0
        zeros = bytes(layout.PAGE_BYTES)
        for row in rows:
            if shape is None or row >= usable:
                continue  # pages behind are none, and a write would make some
            end = shape.data_offset + (row + 1) * shape.row_bytes
            for start in range(end - shape.row_bytes, end, len(zeros)):
                piece = min(len(zeros), end - start)
                self._file.buffer[start : start + piece] = zeros[:piece]

    def empty(self) -> None:
        """Gives the memory of a slab back that no writer has, whatever still has it open; it reads
        as zeros from then on. Raises OSError."""
        self._file.punch(Bytes(0), self.capacity)

    def finish_erasure(self) -> None:
        """Closes the removal that the last writer left open. Nothing of its tenant is there."""
        self._file.erasure.finish()

    def close(self) -> None:
        self._file.close()


def _open(where: int | str | Path) -> int:
    try:
        if isinstance(where, int):
            return fcntl.fcntl(where, fcntl.F_DUPFD_CLOEXEC, 0)
        return os.open(where, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(where, error) from error


def _sealed_size(where: int | str | Path, fd: int) -> int:
    """Returns the size of a file that can neither grow nor shrink. Raises SlabUnusable, and
    OSError."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SlabUnusable(str(where), "it is no file")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise SlabUnusable(str(where), "it is not sealed against shrinking")
    if status.st_size < 2 * layout.PAGE_BYTES or status.st_size % layout.PAGE_BYTES:
        raise SlabUnusable(str(where), f"its size is {status.st_size} bytes")
    return status.st_size


def _unusable(where: int | str | Path, error: OSError | SlabUnusable) -> SlabUnusable:
    if isinstance(error, SlabUnusable):
        return error
    return SlabUnusable(str(where), error.strerror or str(error))
