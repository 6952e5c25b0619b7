"""Files that unpack to hundreds of times their size; what they cost a process that reads them."""

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from arbiter.units import MIB

UNPACKED_BYTES = 96 * MIB
MOST_GROWN_BYTES = 40 * MIB  # of a process that reads one: less than half of what it unpacks to
# What a process that ends meanwhile is met with: by its files, or as a zombie by their contents.
GONE = FileNotFoundError, ProcessLookupError, LookupError
FAST = 1  # of zlib's levels; zeros pack well on any


def _zipped(*names: str) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=FAST) as archive:
        for name in names:
            archive.writestr(name, bytes(UNPACKED_BYTES // len(names)))
    return sink.getvalue()


def _tarred() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz", compresslevel=FAST) as archive:
        entry = tarfile.TarInfo("zeros")
        entry.size = UNPACKED_BYTES
        archive.addfile(entry, io.BytesIO(bytes(UNPACKED_BYTES)))
    return sink.getvalue()


def _atom(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + kind + body


def _film() -> bytes:
    """A QuickTime file, of whose compressed header FFmpeg unpacks all."""
    packed = zlib.compress(bytes(UNPACKED_BYTES), FAST)
    body = _atom(b"dcom", b"zlib") + _atom(b"cmvd", struct.pack(">I", UNPACKED_BYTES) + packed)
    return _atom(b"ftyp", b"qt  \0\0\0\0qt  ") + _atom(b"moov", _atom(b"cmov", body))


def _tag() -> bytes:
    """An ID3 tag with a compressed text, which FFmpeg unpacks too."""

    def size(count: int) -> bytes:
        return bytes(count >> shift & 0x7F for shift in (21, 14, 7, 0))

    packed = zlib.compress(bytes(UNPACKED_BYTES), FAST)
    is_compressed = b"\0\x09"
    frame = b"TXXX" + size(4 + len(packed)) + is_compressed + size(UNPACKED_BYTES) + packed
    return b"ID3\4\0\0" + size(len(frame)) + frame


_MAKERS: dict[str, Callable[[], bytes]] = {
    "zip": lambda: _zipped("zeros"),
    "docx": lambda: _zipped("[Content_Types].xml", "_rels/.rels", "word/document.xml"),
    "gzip": lambda: gzip.compress(bytes(UNPACKED_BYTES), FAST),
    "tar.gz": _tarred,
    "film": _film,
}
KINDS = tuple(_MAKERS)


@cache
def archive(kind: str) -> bytes:
    """Of one of KINDS."""
    return _MAKERS[kind]()


@cache
def tag() -> bytes:
    return _tag()


def _status(pid: int | str, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def grown_of(readers: Callable[[], Iterable[int]], work: Callable[[], object]) -> dict[int, int]:
    """How many bytes more than before each process had in RAM at its peak while `work` ran, of
    those that lived throughout: a reader may end by itself meanwhile, and is a zombie until its
    parent has looked."""
    with ExitStack() as stack:
        peaks = {}
        for pid in readers():
            with suppress(*GONE):
                peaks[pid] = stack.enter_context(growth(pid))
        work()
        peak_bytes = {}
        for pid, peak in peaks.items():
            with suppress(*GONE):
                peak_bytes[pid] = peak()
        return peak_bytes


@contextmanager
def growth(pid: int | str = "self") -> Iterator[Callable[[], int]]:
    """Yields how many bytes more than now the process had in RAM at its peak since."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted anew
    before = _status(pid, "VmRSS")
    yield lambda: _status(pid, "VmHWM") - before
