"""Adapters by name: what lies in a folder per base model, as it is now.

    <folder>/<name>/adapter_config.json            for everybody
    <folder>/<name>/adapter_model.safetensors
    <folder>/@<tenant>/<name>/...                  for one tenant; hides a common one of that name
    <folder>/<name>/serve.json                     optional: {"priority": "high", "pin": true}

A folder dropped into place is found by the next call, a removed one no longer: nothing is
registered and nothing restarts. How to use it, in the front and in an engine alike:

    catalogue = Catalogue(table.adapter_folders, frozenset(table.homes))
    found = catalogue.find("legal-v2", tenant="acme")       # or "small-chat:legal-v2"
    found.base                                              # the model whose engine serves it
    catalogue.names("acme")                                 # for GET /v1/models and near misses

`find` looks at the disk (two or three stats; a changed entry is read again) and `names` lists only
folders whose time has changed, so both may be called for each request at 10,000 entries. Neither
opens the weights: an engine copies, hashes and checks them before it uses them
(deployments.text.adapters), because what is named here may still change.

Tenants write their own folders, so nothing in one is followed anywhere else: a link in place of a
tenant's folder or an adapter is no adapter, and a file that is a link, a pipe or a device makes its
adapter invalid.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from arbiter.errors import RequestError

CONFIG, WEIGHTS, EXTRAS = "adapter_config.json", "adapter_model.safetensors", "serve.json"
PRIORITIES = ("urgent", "high", "normal", "low", "batch")  # SPEC C2
# One component of a path: no separator, no leading dot, so a name cannot leave its folder. `:` and
# `@` are ours.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# PEFT writes about 1 KB; long lists of target modules reach 20 KB.
MAX_CONFIG_BYTES = 1 << 18
# Names listed of one folder; SPEC F2 asks for 10,000 and more, and a listing is held in memory.
MAX_NAMES = 100_000


class AdapterInvalid(RequestError):
    """There is such an adapter and it cannot be served; says why. Waiting does not help."""

    status_code, code = 400, "adapter_invalid"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"adapter {self.name!r} cannot be served: {self.reason}"


class AdapterAmbiguous(RequestError):
    """More than one base model has an adapter of this name."""

    status_code, code = 400, "adapter_ambiguous"

    def __init__(self, name: str, bases: tuple[str, ...]) -> None:
        super().__init__(name, bases)
        self.name, self.bases = name, bases

    def __str__(self) -> str:
        full = ", ".join(f"{base}:{self.name}" for base in self.bases)
        return f"several models have an adapter {self.name!r}; write one of {full}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter as its owner put it there."""

    name: str
    base: str  # the model it is for, by the name it is served under
    path: Path
    rank: int
    size_bytes: int
    stamp: tuple[int, ...] = ()  # times and inodes of its files: equal as long as nothing changed
    tenant: str = ""  # empty: everybody's
    priority: str = "normal"
    pin: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.base}:{self.name}"


@dataclass(frozen=True, slots=True)
class _Listing:
    """The names in one folder when its time was `mtime_ns`."""

    mtime_ns: int
    names: frozenset[str]


class Catalogue:
    """One per process; not for use from several threads at once."""

    def __init__(self, folders: Mapping[str, Path], reserved: frozenset[str] = frozenset()) -> None:
        """`folders`: base model to its folder. `reserved`: names of base models, which no adapter
        may have; those of `folders` always are."""
        self._folders = {base: folder.resolve() for base, folder in folders.items()}
        self._reserved = reserved | set(folders)
        self._listings: dict[Path, _Listing] = {}
        self._read: dict[Path, tuple[tuple[int, ...], Entry]] = {}

    def find(self, name: str, tenant: str = "") -> Entry | None:
        """The adapter a client means, or None when there is none of that name that this tenant may
        see. Raises AdapterAmbiguous, AdapterInvalid."""
        base, colon, bare = name.partition(":")
        if not colon:
            base, bare = "", name
        if not _NAME.fullmatch(bare) or bare in self._reserved or (colon and not base):
            return None
        bases = [base] if base else list(self._folders)
        places = {b: place for b in bases if (place := self._place(b, bare, tenant))}
        if len(places) > 1:
            raise AdapterAmbiguous(bare, tuple(sorted(places)))
        for base, (path, owner) in places.items():
            return self._entry(bare, base, path, owner)
        return None

    def names(self, tenant: str = "") -> list[str]:
        """Full names, `base:adapter`, of all that this tenant may see, sorted."""
        found = set()
        for base, folder in self._folders.items():
            owned = self._listed(folder / f"@{tenant}") if _NAME.fullmatch(tenant) else frozenset()
            found |= {f"{base}:{name}" for name in self._listed(folder) | owned}
        return sorted(found)

    def _place(self, base: str, name: str, tenant: str) -> tuple[Path, str] | None:
        """Where it lies and whose it is; the tenant's own before everybody's."""
        folder = self._folders.get(base)
        if folder is None:
            return None
        tries = [(folder / name, "")]
        if _NAME.fullmatch(tenant):
            tries.insert(0, (folder / f"@{tenant}" / name, tenant))
        for path, owner in tries:
            if _is_folder(path.parent) and _is_folder(path) and os.path.lexists(path / CONFIG):
                return path, owner
        return None

    def _entry(self, name: str, base: str, path: Path, owner: str) -> Entry:
        try:
            stamp = _stamp(path)
            known = self._read.get(path)
            if known is None or known[0] != stamp:
                known = self._read[path] = stamp, _read_entry(name, base, path, stamp, owner)
        except OSError as error:
            raise AdapterInvalid(name, f"{error.filename}: {error.strerror}") from error
        return known[1]

    def _listed(self, folder: Path) -> frozenset[str]:
        try:
            if not _is_folder(folder):
                return frozenset()
            mtime_ns = folder.stat().st_mtime_ns
            known = self._listings.get(folder)
            if known is None or known.mtime_ns != mtime_ns:
                known = self._listings[folder] = _Listing(mtime_ns, self._list(folder))
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        return known.names

    def _list(self, folder: Path) -> frozenset[str]:
        with os.scandir(folder) as rows:
            names = (
                r.name for r in rows if _NAME.fullmatch(r.name) and r.is_dir(follow_symlinks=False)
            )
            found = [name for name, _ in zip(names, range(MAX_NAMES), strict=False)]
        return frozenset(found) - self._reserved


def _is_folder(path: Path) -> bool:
    """And no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when an adapter is replaced. Raises OSError."""
    config, weights = (path / CONFIG).lstat(), (path / WEIGHTS).lstat()
    extras = (path / EXTRAS).lstat().st_mtime_ns if os.path.lexists(path / EXTRAS) else 0
    return (config.st_mtime_ns, config.st_ino, weights.st_mtime_ns, weights.st_ino, weights.st_size,
            extras)  # fmt: skip


def _read_entry(name: str, base: str, path: Path, stamp: tuple[int, ...], owner: str) -> Entry:
    """Raises AdapterInvalid, OSError."""
    config = read_json(name, path / CONFIG)
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterInvalid(name, f"{CONFIG}: `r` is {rank!r}, not a rank")
    extras = read_json(name, path / EXTRAS) if os.path.lexists(path / EXTRAS) else {}
    priority, pin = extras.get("priority", "normal"), extras.get("pin", False)
    if priority not in PRIORITIES or not isinstance(pin, bool):
        allowed = f"`priority` is one of {', '.join(PRIORITIES)}, `pin` true or false"
        raise AdapterInvalid(name, f"{EXTRAS}: {allowed}")
    with open_plain(name, path / WEIGHTS) as weights:
        size = os.fstat(weights.fileno()).st_size
    return Entry(name, base, path, rank, size, stamp, owner, priority, pin)


def open_plain(name: str, file: Path) -> BinaryIO:
    """To read a file of an adapter: a plain one, in a folder and a parent folder that are no links,
    whatever takes their places meanwhile. Never blocks for a writer. Raises AdapterInvalid,
    OSError."""
    inside: int | None = None
    for folder in (file.parent.parent, file.parent.name):
        inside = _opened(folder, os.O_DIRECTORY, inside)
    stream = os.fdopen(_opened(file.name, os.O_NONBLOCK, inside), "rb")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise AdapterInvalid(name, f"{file.name} is not a plain file")
    return stream


def _opened(path: Path | str, flags: int, inside: int | None) -> int:
    """Descriptor of `path` in the folder `inside`, which is closed. Raises OSError, for a link
    too."""
    try:
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, dir_fd=inside)
    finally:
        if inside is not None:
            os.close(inside)


def read_json(name: str, file: Path) -> dict[str, Any]:
    """A small object. Raises AdapterInvalid, OSError."""
    with open_plain(name, file) as stream:
        raw = stream.read(MAX_CONFIG_BYTES + 1)
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterInvalid(name, f"{file.name} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterInvalid(name, f"{file.name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise AdapterInvalid(name, f"{file.name} is not an object")
    return found
