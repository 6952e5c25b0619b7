"""Bodies: what requests and answers say, in a folder beside the state file, of mode 0700, files
0600.

A body is written in pieces of bounded size. It gets its name when it is complete and on the disk,
so a name that is there is a whole body; files that grow by appending (events, results of a batch)
are cut back to the length that the state file knows.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deployments.jobs.database import storage_error
from deployments.jobs.errors import BodyLost, Conflict, StorageFailed, StorageFull

PIECE_BYTES = 1 << 20  # of one read, write or message: what a process holds of a body at once
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,80}(\.[a-z]+)?")
PART = ".part"  # of a body that is being written


def folder_of(state_file: Path) -> Path:
    """The folder of bodies, beside the state file."""
    return state_file.with_name("jobs")


class Bodies:
    """Every method blocks. Raises StorageFull, StorageFailed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._translated():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)

    def append(self, name: str, offset: int, piece: bytes, *, is_synced: bool = False) -> int:
        """Writes a piece at an offset, which must not leave a gap, and forgets what lay behind it;
        the same piece may be written twice. Returns the new length. Raises Conflict for a gap."""
        with self._translated(), self._opened(name, os.O_CREAT | os.O_WRONLY) as file:
            length = os.fstat(file).st_size
            if offset > length:
                raise Conflict("body", name, f"{length} bytes long", f"written at {offset}")
            os.ftruncate(file, offset)
            _write_all(file, piece, offset)
            if is_synced:
                os.fdatasync(file)
        return offset + len(piece)

    def finish(self, name: str) -> int:
        """Gives what was appended to `name.part` its name, durably. Returns its length."""
        with self._translated():
            part, whole = self.path(name + PART), self.path(name)
            if not part.exists() and whole.exists():
                return whole.stat().st_size  # asked twice
            with self._opened(name + PART, os.O_RDONLY) as file:
                os.fsync(file)
                length = os.fstat(file).st_size
            part.rename(whole)
            self._sync_folder()
        return length

    def write(self, name: str, body: bytes) -> None:
        """All of a body: afterwards it is there and durable, or nothing is."""
        self.draft(name, body)
        self.adopt(name, name)

    def draft(self, draft: str, body: bytes) -> None:
        """All of a body under a name of the writer's own, durable; `adopt` gives it its name. Where
        the disk does not take all of it, nothing of it stays there."""
        part = draft + PART
        try:
            self.append(part, 0, b"")
            for start in range(0, len(body), PIECE_BYTES):
                self.append(part, start, body[start : start + PIECE_BYTES])
            with self._translated(), self._opened(part, os.O_RDONLY) as file:
                os.fsync(file)
        except (StorageFull, StorageFailed):
            self.remove(part)
            raise

    def adopt(self, draft: str, name: str) -> None:
        """Gives a draft its name, in place of what has the name."""
        with self._translated():
            self.path(draft + PART).rename(self.path(name))
            self._sync_folder()

    def read(self, name: str, offset: int = 0, most_bytes: int = PIECE_BYTES) -> bytes:
        """Reads at most so many bytes from an offset; empty at the end. Raises BodyLost where
        the file is gone and its folder is not."""
        try:
            with self._translated(), self._opened(name, os.O_RDONLY) as file:
                return os.pread(file, most_bytes, offset)
        except StorageFailed as error:
            if isinstance(error.__cause__, FileNotFoundError) and self.folder.is_dir():
                raise BodyLost(error.path, error.why) from error
            raise

    def lines(self, name: str, offset: int = 0) -> Iterator[bytes]:
        """Each line with its end, from an offset on."""
        with self._translated(), self.path(name).open("rb") as file:
            file.seek(offset)
            yield from file

    def size(self, name: str) -> int:
        """0 where there is none."""
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return 0

    def changed_s(self, name: str) -> float:
        """When it was written last, in seconds of the wall clock."""
        with self._translated():
            return self.path(name).stat().st_mtime

    def cut(self, name: str, length: int) -> None:
        """Forgets what lies behind a length: a process died before it was told of."""
        if self.size(name) > length:
            with self._translated():
                os.truncate(self.path(name), length)

    def remove(self, *names: str) -> None:
        with self._translated():
            for name in names:
                self.path(name).unlink(missing_ok=True)

    def names(self) -> set[str]:
        """The names of all bodies; what a person or a file system put beside them is left alone."""
        with self._translated(), os.scandir(self.folder) as entries:
            files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return {name for name in files if NAME.fullmatch(name)}

    def path(self, name: str) -> Path:
        assert NAME.fullmatch(name), name  # ids are checked where they come in
        return self.folder / name

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        file = os.open(self.path(name), flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield file
        finally:
            os.close(file)

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(self.folder, error) from error


def _write_all(file: int, piece: bytes, offset: int) -> None:
    """A disk that becomes full takes a part first."""
    view = memoryview(piece)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
