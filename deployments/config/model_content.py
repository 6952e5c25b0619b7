"""What a model's files hold: a row for each file (`files`), and a hash of their bytes (`contents`),
in 5 ms for a large file."""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

# Of a file up to 16 MiB all is read, of a larger one 64 pieces of 64 KiB from its first to its last
# byte. Weights that were trained or converted anew differ in every piece.
WHOLE_BYTES = 16 << 20
PIECE_BYTES, PIECES = 64 << 10, 64

Row = tuple[str | int, ...]
Files = tuple[Row, ...]


def files(
    model: str, look_at: Callable[[Path], os.stat_result] = lambda path: path.stat()
) -> Files:
    """Returns name, size, mtime, ctime and inode of each file in a model's folder, or of a model in
    one file; empty for a name that is neither, like a hub id, whose revisions have folders of their
    own. Follows symlinks. Of a file that cannot be looked at, its name alone. Raises OSError where
    the folder cannot be."""
    root = Path(model)
    rows: list[Row] = []
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        try:
            status = look_at(path)
        except FileNotFoundError:
            continue  # just replaced: the next look sees the new one
        except OSError:  # closed to us, a loop of symlinks, or its server is away just now
            rows.append((name,))
            continue
        if stat.S_ISREG(status.st_mode):
            rows.append(
                (name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            )
    return tuple(rows)


def contents(model: str, rows: Files) -> str:
    """Returns a hash of small files and of pieces of large ones, as far as `files` could look at
    them. Equal for equal bytes, whatever their times. Raises OSError for a file that cannot be
    read."""
    digest = hashlib.blake2b()
    for name, size, *_ in (row for row in rows if len(row) > 1):
        try:
            with (Path(model) / str(name)).open("rb") as stream:
                digest.update(f"{name} {size} ".encode())
                for start, length in pieces(int(size)):
                    stream.seek(start)
                    digest.update(stream.read(length))
        except FileNotFoundError:
            continue
    return digest.hexdigest()


def content_of(model: str) -> str:
    """Returns the hash of what a model's files hold now, by which its pictures are known; of a hub
    id, which names its content, the id itself. Raises OSError."""
    rows = files(model)
    return contents(model, rows) if rows else model


def pieces(size_bytes: int) -> list[tuple[int, int]]:
    """Returns which parts of a file `contents` reads, as start and length."""
    if size_bytes <= WHOLE_BYTES:
        return [(0, size_bytes)]
    last = size_bytes - PIECE_BYTES
    return [(last * number // (PIECES - 1), PIECE_BYTES) for number in range(PIECES)]
