"""What lies where in a slab: a header, a table with one mark per row, and the rows themselves.

    0      header: magic, version, content, namespace, geometry
    128    the limit: how many bytes of the file may be allocated; only the owner writes it
    192    what the writer counts, one u64 each
    448    whose rows the owner has the writer erase
    4096   the table: a mark of 128 bytes per row
    ...    the rows, from a border of 2 MiB on

A row is visible once the state word of its mark says READY; that word is written last.
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from arbiter.units import DEFAULT_TENANT, KIB, MIB, Bytes, Content

PAGE_BYTES = 2 * MIB  # the unit of a slab's size, so that a kernel with huge pages can use them
EXTENT_BYTES = 16 * PAGE_BYTES  # what a slab grows by: fallocate of it took 12 ms (E1)
MAGIC = b"ARBSLAB\n"
VERSION = 3  # raise it when anything on this page moves
HEADER_BYTES = 4 * KIB
MARK_BYTES = 128
NAMESPACE_BYTES = 32
KEY_BYTES = 60  # the longest key; vLLM's are 36
TENANT_BYTES = 16
# Each on a cache line of its own: two processes write them.
LIMIT_AT, COUNTS_AT, ERASE_AT = 128, 192, 448
ERASE_BYTES = 3 * 8 + TENANT_BYTES
NO_TENANT = bytes(TENANT_BYTES)  # in the marks of rows that the default tenant's requests left
SHARED = b"\xff" * TENANT_BYTES  # in those of rows that belong to no tenant
FREE = 0
# Four bytes no two of which are equal to those of FREE: a word that is half written is not READY.
READY = int.from_bytes(b"REDY", "little")
LONGEST_TERM_S = 30 * 86_400.0  # terms end at 24 h

_HEADER = struct.Struct("<8sII32sQQQ")
_MARK = struct.Struct("<IIdd16sB60sd")
_STATE = struct.Struct("<I")
_USE = struct.Struct("<Idd")
_USE_AT = 4
assert _HEADER.size <= LIMIT_AT and _MARK.size <= MARK_BYTES
assert ERASE_AT + ERASE_BYTES <= HEADER_BYTES

Buffer = memoryview
CONTENTS = dict(enumerate(Content, 1))  # by the number in a header; 0 is no content


class Term(IntEnum):
    """Names how long a row stays after a use (G4): the `kind` of its mark. A row whose writer says
    nothing has the first."""

    LONG = 0
    SHORT = 1
    EXTENDED = 2


TERMS_S = {Term.SHORT: 300.0, Term.LONG: 3_600.0, Term.EXTENDED: 86_400.0}


class Count(IntEnum):
    """Places of what the writer counts."""

    ALLOCATED = 0  # bytes of rows that have pages, from the first row on
    READY = 1
    HITS = 2
    MISSES = 3
    STORED = 4
    EVICTED = 5
    REFUSED = 6  # rows that found no room
    LOADED = 7
    RESTORED = 8  # rows that came back from a file
    HOT_HITS = 9  # what its engine had at hand, so that the slab was not asked (adapters)
    HOT = 10  # how many of the rows' keys it has at hand now
    LOAD_NS = 11  # in which rows were on their way from the slab into an engine
    RESTORE_NS = 12  # in which rows were read from a file


assert COUNTS_AT + 8 * len(Count) <= ERASE_AT


@dataclass(frozen=True, slots=True)
class Geometry:
    """Says where the rows of a slab lie."""

    row_bytes: Bytes
    rows_count: int
    data_offset: Bytes

    @property
    def table_end(self) -> Bytes:
        """Returns the end of header and table, in whole kernel pages: these have memory from the
        start."""
        return _up(HEADER_BYTES + self.rows_count * MARK_BYTES, 4 * KIB)


@dataclass(frozen=True, slots=True)
class Header:
    """Says whose rows a slab has, and what gives their bytes a meaning."""

    content: Content
    namespace: bytes
    geometry: Geometry


class Mark(NamedTuple):
    """Describes what the table says of a row. Times are wall-clock seconds, because in a file they
    outlive a boot's monotonic clock. `kind`: of a row of KV the Term of the use that expires last.
    `asked_s`: when the request came for which it was written."""

    key: bytes
    expires_s: float
    used_s: float
    tenant: bytes = NO_TENANT
    kind: int = 0
    asked_s: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Says whether its times are numbers; others are damage."""
        return math.isfinite(self.expires_s + self.used_s + self.asked_s)


class Removal(NamedTuple):
    """Names the rows that leave with a removed tenant: those of requests that came until then
    (wall-clock seconds). Later rows are those of a tenant that has come again under its name."""

    tenant: bytes
    until_s: float = math.inf

    def covers(self, tenant: bytes, asked_s: float) -> bool:
        return tenant == self.tenant and asked_s <= self.until_s


def is_live(expires_s: float, now_s: float) -> bool:
    """Says whether a row that expires then is there now. An expiry further away than any term is
    damage, or of a wrong clock."""
    return now_s < expires_s <= now_s + LONGEST_TERM_S


def content_code(content: Content) -> int:
    """Returns the number by which a header names a content."""
    return content.rank + 1


def tenant_digest(tenant: str) -> bytes:
    """Returns the digest by which a mark names a tenant. That of the default tenant, whose requests
    carry no salt, is zeros."""
    if tenant in ("", DEFAULT_TENANT):
        return NO_TENANT
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_BYTES).digest()


def geometry(capacity: Bytes, row_bytes: Bytes) -> Geometry:
    """Returns the rows that fit into a file of that size behind their table; perhaps none."""
    most = max(0, capacity - HEADER_BYTES) // (row_bytes + MARK_BYTES)
    data = _up(HEADER_BYTES + most * MARK_BYTES, PAGE_BYTES)
    return Geometry(row_bytes, min(most, max(0, capacity - data) // row_bytes), data)


def read_header(buffer: Buffer) -> Header | None:
    """Returns the header; None where there is no whole header of this version."""
    magic, version, content, namespace, row, count, data = _HEADER.unpack_from(buffer, 0)
    if (magic, version) != (MAGIC, VERSION) or content not in CONTENTS:
        return None
    return Header(CONTENTS[content], namespace, Geometry(Bytes(row), count, Bytes(data)))


def write_header(buffer: Buffer, header: Header) -> None:
    """Writes the magic last: a header that is half written is none."""
    erase_header(buffer)
    shape = header.geometry
    facts = (content_code(header.content), header.namespace)
    sizes = (shape.row_bytes, shape.rows_count, shape.data_offset)
    _HEADER.pack_into(buffer, 0, bytes(len(MAGIC)), VERSION, *facts, *sizes)
    buffer[: len(MAGIC)] = MAGIC


def erase_header(buffer: Buffer) -> None:
    """Leaves the limit, which is the owner's."""
    buffer[: len(MAGIC)] = bytes(len(MAGIC))
    buffer[: _HEADER.size] = bytes(_HEADER.size)


def write_mark(buffer: Buffer, row: int, mark: Mark) -> None:
    """Makes a row visible. Its bytes must be there."""
    at = HEADER_BYTES + row * MARK_BYTES
    times = (mark.expires_s, mark.used_s)
    fields = (mark.kind, *times, mark.tenant, len(mark.key), mark.key, mark.asked_s)
    _MARK.pack_into(buffer, at, FREE, *fields)
    _STATE.pack_into(buffer, at, READY)


def write_use(buffer: Buffer, row: int, mark: Mark) -> None:
    """Notes a use of a row: what of its mark a use may change."""
    at = HEADER_BYTES + row * MARK_BYTES + _USE_AT
    _USE.pack_into(buffer, at, mark.kind, mark.expires_s, mark.used_s)


def clear_mark(buffer: Buffer, row: int) -> None:
    """Makes a row invisible, before its bytes change."""
    _STATE.pack_into(buffer, HEADER_BYTES + row * MARK_BYTES, FREE)


def marked_rows(buffer: Buffer, count: int) -> list[int]:
    """Returns the rows whose state word says anything but FREE."""
    words = buffer[HEADER_BYTES : HEADER_BYTES + count * MARK_BYTES].cast("I")
    states = words[:: MARK_BYTES // _STATE.size].tolist()
    return [row for row, state in enumerate(states) if state != FREE]


def read_marks(buffer: Buffer, count: int) -> Iterator[tuple[int, Mark]]:
    """Returns the rows that say READY and can be: a mark with a key that cannot be, or a time that
    is no number, is damage."""
    table = bytes(buffer[HEADER_BYTES : HEADER_BYTES + count * MARK_BYTES])
    for row, at in enumerate(range(0, len(table), MARK_BYTES)):
        state, kind, expires, used, tenant, length, key, stored = _MARK.unpack_from(table, at)
        if state == READY and 0 < length <= KEY_BYTES:
            mark = Mark(key[:length], expires, used, tenant, kind, stored)
            if mark.is_sound:
                yield row, mark


def _up(size: int, unit: int) -> Bytes:
    return Bytes(-(-size // unit) * unit)
