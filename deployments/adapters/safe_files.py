"""Reads the files of an adapter, which a tenant controls: only plain files, and bounded."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from arbiter.errors import RequestError

# PEFT writes about 1 KB; long lists of target modules reach 20 KB.
MAX_CONFIG_BYTES = 1 << 18
# What the owner of an adapter has caused and can mend, as by a link or a mode. Every other error is
# the file system's, and may pass.
_OWNERS_FAULTS = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM}
)


class AdapterInvalid(RequestError):
    """The adapter exists and cannot be served; `reason` says why. Waiting does not help."""

    status_code, code = 400, "adapter_invalid"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"adapter {self.name!r} cannot be served: {self.reason}"


class AdaptersAway(RequestError):
    """The folder of an adapter cannot be read now."""

    # When a client is to ask again: a file server that is away is back after seconds, if it is.
    status_code, code, retry_after_s = 503, "adapters_away", 5.0

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return (
            f"adapter {self.name!r} cannot be read now, or whether there is one of this name:"
            f" {self.why}; ask again in {self.retry_after_s:.0f} s"
        )


def unreadable(name: str, error: OSError) -> AdapterInvalid | AdaptersAway:
    """What a file of an adapter that could not be read means for a request."""
    why = f"{error.filename or name}: {error.strerror}"
    return AdapterInvalid(name, why) if error.errno in _OWNERS_FAULTS else AdaptersAway(name, why)


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, and not a link to one. Raises OSError where that cannot be
    told."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_there(path: Path) -> bool:
    """Whether anything has this path, be it a broken link. Raises OSError where that cannot be
    told."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def open_plain(name: str, file: Path) -> BinaryIO:
    """Opens a file of an adapter to read: a plain file, in a folder and a parent folder that are no
    links, even if links take their places meanwhile. Never blocks for a writer. Raises
    AdapterInvalid, OSError."""
    inside: int | None = None
    for folder in (file.parent.parent, file.parent.name):
        inside = _opened(folder, os.O_DIRECTORY, inside)
    stream = os.fdopen(_opened(file.name, os.O_NONBLOCK, inside), "rb")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise AdapterInvalid(name, f"{file.name} is not a plain file")
    return stream


def _opened(path: Path | str, flags: int, inside: int | None) -> int:
    """Descriptor of `path` in the folder `inside`, whose descriptor this closes. Raises OSError,
    also for a link."""
    try:
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, dir_fd=inside)
    finally:
        if inside is not None:
            os.close(inside)


def read_json(name: str, file: Path, most_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Reads a JSON object of at most `most_bytes`. Raises AdapterInvalid, OSError."""
    with open_plain(name, file) as stream:
        raw = stream.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise AdapterInvalid(name, f"{file.name} is larger than {most_bytes} bytes")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterInvalid(name, f"{file.name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise AdapterInvalid(name, f"{file.name} is not an object")
    return document
