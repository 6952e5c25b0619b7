"""What engines of a node copied of a tenant, by folders named `@TENANT` (E6)."""

import contextlib
import logging
import os
import re
import shutil
import uuid
from pathlib import Path

logger = logging.getLogger("arbiter.agent")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # others have no such folder
_REMOVING = ".removing-"


def remove(folders: tuple[str, ...], tenant: str, until_s: float) -> int:
    """Removes from `@TENANT` of each folder the copies that were made until then (wall-clock
    seconds): later ones are those of a tenant that has come again. Returns how many. Blocks."""
    sweep(folders)
    if not _NAME.fullmatch(tenant):
        return 0
    return sum(_empty(Path(folder) / f"@{tenant}", until_s) for folder in folders)


def sweep(folders: tuple[str, ...]) -> None:
    """Removes what an agent that was killed was removing. Another agent of this machine may be
    removing it now, which is as well. A folder whose file server is away waits for the next sweep.
    Blocks."""
    for folder in folders:
        try:
            for renamed in Path(folder).glob(f"{_REMOVING}*"):
                _erase(renamed)
        except OSError as error:
            logger.warning("copies of removed tenants in %s stay for now: %s", folder, error)


def _empty(home: Path, until_s: float) -> int:
    count = 0
    try:
        copies = _copies(home)
    except OSError as error:
        logger.warning("copies of a removed tenant in %s stay: %s", home, error)
        return 0
    for copy in copies:
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
    """Returns when a folder was made, in seconds of the wall clock: the time of its last file,
    because a folder's own time is that of its last use."""
    return max((file.lstat().st_mtime for file in copy.iterdir()), default=0.0)


def _remove(copy: Path) -> None:
    """Removes a folder under another name, so that no engine finds half of it. What cannot be
    removed of it is tried again with the next sweep. Raises OSError."""
    renamed = copy.parent.parent / f"{_REMOVING}{uuid.uuid4().hex}"
    os.rename(copy, renamed)
    _erase(renamed)


def _erase(renamed: Path) -> None:
    """Removes as much as can be removed, and tells of what stays."""
    shutil.rmtree(renamed, ignore_errors=True)
    if renamed.exists():
        logger.warning("%s, a copy of a removed tenant's, cannot be removed: remove it", renamed)
