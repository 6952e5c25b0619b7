"""Memory files with a copy of a model's files (D4): made, filled once, sealed, found again.

A copy is a memory file for each of the model's files, and an index that says what they are. All are
sealed against any change once they are full, so a process that maps one has the bytes that were
hashed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from arbiter.core.types import ModelName
from arbiter.node import procfs
from arbiter.protocol.messages import CopyRequest
from arbiter.units import Bytes

VERSION = 1  # of the index and of what is hashed
FILES_MOST = 200  # one message hands over 253 descriptors (SCM_MAX_FD), the index among them
USER_MODE, GROUP_MODE = 0o600, 0o660
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CHUNK_BYTES = 4 << 20  # hashed in 5 ms
_BLOCK_BYTES = 512  # the unit of st_blocks (stat(2))
_NAME = re.compile(rf"/memfd:{procfs.SHARED_COPY}-(?P<lease>[\w.-]+)\.(?P<part>index|\d+)\b")


@dataclass(frozen=True, slots=True)
class FileRow:
    """Describes one file as it lies on disk. Any change of it changes its ctime, which no program
    sets."""

    name: str  # in the folder
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    place: tuple[int, int]  # device and inode


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Describes the files of a request, as they were at one look."""

    root: Path
    rows: tuple[FileRow, ...]

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """Returns names and sizes: equal for equal files, wherever they lie."""
        return tuple((row.name, row.size_bytes) for row in self.rows)

    @property
    def size_bytes(self) -> Bytes:
        """Returns what a copy of these files takes, in whole pages, the index included."""
        page = os.sysconf("SC_PAGESIZE")
        pages = sum(-(-row.size_bytes // page) for row in self.rows) + 1
        return Bytes(pages * page)

    @property
    def newest_ns(self) -> int:
        return max(row.ctime_ns for row in self.rows)


@dataclass(frozen=True, slots=True)
class Index:
    """Describes what a copy has: readers and the next agent know it by this."""

    version: int
    key: str
    lease: str
    owner: ModelName  # for which it was made
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    for_group: bool

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class CopyFiles:
    """Holds a copy's descriptors, open for reading: that of the index, then one for each file."""

    index: Index
    fds: tuple[int, ...]

    @property
    def allocated_bytes(self) -> Bytes:
        return Bytes(sum(os.fstat(fd).st_blocks for fd in self.fds) * _BLOCK_BYTES)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def look(request: CopyRequest) -> SourceFiles | None:
    """Returns the files of a request as they are now; None where there are no such files, or more
    than a copy has. Raises OSError."""
    path = Path(request.folder)
    if path.is_file():
        return SourceFiles(path.parent, (_row(path.parent, path),))
    paths = {p for pattern in request.patterns for p in path.glob(pattern) if p.is_file()}
    if not 0 < len(paths) <= FILES_MOST:
        return None
    return SourceFiles(path, tuple(_row(path, p) for p in sorted(paths)))


def _row(root: Path, path: Path) -> FileRow:
    status = path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return FileRow(
        str(path.relative_to(root)), status.st_size, *times, (status.st_dev, status.st_ino)
    )


def key_of(source: SourceFiles) -> str:
    """Returns the key of the files as they are now: a hash of version, names, sizes and bytes.
    Raises OSError."""
    return _hashed(source, [None] * len(source.rows))


def make(source: SourceFiles, lease: str, request: CopyRequest) -> CopyFiles:
    """Copies the files and hashes what it copies. Raises OSError, and then nothing is left of
    it."""
    mode = GROUP_MODE if request.for_group else USER_MODE
    parts = ["index", *map(str, range(len(source.rows)))]
    fds, sealed = list[int](), list[int]()
    try:
        fds.extend(_create(f"{lease}.{part}", mode) for part in parts)
        key = _hashed(source, fds[1:])
        for row, fd in zip(source.rows, fds[1:], strict=True):  # an engine tells files by times too
            os.utime(fd, ns=(row.mtime_ns, row.mtime_ns))
        names, sizes = zip(*source.layout, strict=True)
        index = Index(VERSION, key, lease, request.owner, names, sizes, request.for_group)
        os.write(fds[0], json.dumps(asdict(index)).encode())
        sealed.extend(map(_sealed, fds))
        return CopyFiles(index, tuple(sealed))
    except OSError:
        fds.extend(sealed)  # their memory is given back with the last descriptor
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _create(name: str, mode: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    fd = os.memfd_create(f"{procfs.SHARED_COPY}-{name}", flags)
    os.fchmod(fd, mode)
    return fd


def _hashed(source: SourceFiles, fds: Iterable[int | None]) -> str:
    digest, buffer = hashlib.blake2b(digest_size=16), memoryview(bytearray(_CHUNK_BYTES))
    digest.update(f"{VERSION} {source.layout}".encode())
    for row, fd in zip(source.rows, fds, strict=True):
        with (source.root / row.name).open("rb", buffering=0) as stream:
            remaining_bytes = row.size_bytes
            while remaining_bytes and (count := stream.readinto(buffer[:remaining_bytes])):
                digest.update(buffer[:count])
                if fd is not None:
                    _write_all(fd, buffer[:count])
                remaining_bytes -= count
        if remaining_bytes:
            raise OSError(f"{source.root / row.name} was cut while it was copied")
    return digest.hexdigest()


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _sealed(fd: int) -> int:
    """Lets nothing change it any more. Returns a descriptor of its own that only reads."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


# -------------------------------------------------------------------------------------------------
# Copies that engines have open when their agent has ended.


def held_by(pid: int) -> list[CopyFiles]:
    """Returns the whole and sealed copies that a process has open, each with descriptors of our
    own."""
    folder = procfs.PROC / str(pid) / "fd"
    by_lease: dict[str, dict[str, Path]] = {}
    try:
        paths = list(folder.iterdir())
    except OSError:  # it has just ended
        return []
    for path in paths:
        with contextlib.suppress(OSError):  # closed since it was listed
            if match := _NAME.match(os.readlink(path)):
                by_lease.setdefault(match["lease"], {}).setdefault(match["part"], path)
    adopted = (_adopted(lease, parts) for lease, parts in by_lease.items())
    return [copy for copy in adopted if copy is not None]


def _adopted(lease: str, parts: dict[str, Path]) -> CopyFiles | None:
    fds: list[int] = []
    try:
        fds.append(os.open(parts["index"], os.O_RDONLY | os.O_CLOEXEC))
        index = read_index(fds[0])
        for number in range(len(index.names)):
            fds.append(os.open(parts[str(number)], os.O_RDONLY | os.O_CLOEXEC))
        if index.lease == lease and all(map(is_sealed, fds)):
            return CopyFiles(index, tuple(fds))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # it ended meanwhile, or has something of that name that no agent made
    for fd in fds:
        os.close(fd)
    return None


def read_index(fd: int) -> Index:
    """Reads the index of a copy. Raises OSError, ValueError, KeyError, TypeError for what is no
    index."""
    raw = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    owner, names = ModelName(*raw.pop("owner")), tuple(raw.pop("names"))
    index = Index(owner=owner, names=names, sizes=tuple(raw.pop("sizes")), **raw)
    if index.version != VERSION:
        raise ValueError(f"a host copy of version {index.version}; this is {VERSION}")
    return index


def is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS)
