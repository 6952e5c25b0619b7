"""What engines of a node copied of a tenant, by folders named `@TENANT` (E6)."""

import contextlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger("arbiter.agent")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # others have no such folder


def remove(folders: tuple[str, ...], tenant: str, until_s: float) -> int:
    """Removes from `@TENANT` of each folder the copies that were made until then (wall-clock
    seconds): later ones are those of a tenant that has come again. Returns how many. Blocks."""
    if not _NAME.fullmatch(tenant):
        return 0
    return sum(_empty(Path(folder) / f"@{tenant}", until_s) for folder in folders)


def _empty(home: Path, until_s: float) -> int:
    count = 0
    for copy in _copies(home):
        try:
            if _made_s(copy) <= until_s:
                _remove(copy)
                count += 1
        except OSError as error:
            logger.warning("%s of a removed tenant stays: %s", copy, error)
    with contextlib.suppress(OSError):  # it is not empty, or there is none
        home.rmdir()
    return count


def _copies(home: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [] if home.is_symlink() else sorted(home.iterdir())
    return []


def _made_s(copy: Path) -> float:
    """The time of its last file: a folder's own time is that of its last use."""
    return max((file.lstat().st_mtime for file in copy.iterdir()), default=0.0)


def _remove(copy: Path) -> None:
    """Removes a folder under another name, so that no engine finds half of it. Raises OSError."""
    scratch = tempfile.mkdtemp(dir=copy.parent.parent, prefix=".removing-")
    try:
        os.rename(copy, Path(scratch) / copy.name)
    finally:
        shutil.rmtree(scratch)
