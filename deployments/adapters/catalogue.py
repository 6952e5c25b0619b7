"""Adapters by name: what lies in a folder per base model, as it is now.

    <folder>/<name>/adapter_config.json            for all tenants
    <folder>/<name>/adapter_model.safetensors
    <folder>/@<tenant>/<name>/...                  for one tenant; hides a common one of that name
    <folder>/<name>/serve.json                     optional: {"priority": "high", "pin": true,
                                                   "int8": true} (deployments.adapters.int8)
    <folder>/remote.json, <folder>/@<tenant>/remote.json     names of adapters behind a URL:
        {"med": "s3://our-loras/med-v3/", "law": {"url": "hf://our-org/law/", "pin": true}}

The next call finds a folder that was dropped into place, and no longer finds a removed one: nothing
is registered and nothing restarts. The front and the engines use it alike:

    catalogue = Catalogue(table.adapter_folders, frozenset(table.homes))
    found = catalogue.find("legal-v2", tenant="acme")       # or "small-chat:legal-v2"
    found.base                                              # the model whose engine serves it
    catalogue.names("acme")                                 # for GET /v1/models and near misses

`find` makes two or three stats and reads a changed entry again; `names` lists only folders whose
time has changed. So both may be called for each request at 10,000 entries. Neither opens the
weights: an engine copies, hashes and checks them before it uses them (deployments.adapters.store),
because what is named here may still change.

A URL must begin with a prefix of its model's allow-list, and its content must never change: new
content gets a new URL. The replica fetches it before it asks the engine
(deployments.adapters.fetch).

Tenants write their own folders, so no link leads out of one: a link in place of a tenant's folder
or an adapter is no adapter, and a file that is a link, a pipe or a device makes its adapter
invalid."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from arbiter.errors import RequestError
from deployments.adapters.safe_files import (
    AdapterInvalid,
    AdaptersAway,
    is_folder,
    is_there,
    open_plain,
    read_json,
    unreadable,
)
from deployments.config.adapter_names import bare_of, base_of, full_name, is_full
from deployments.config.url_allowlist import is_allowed

CONFIG, WEIGHTS, EXTRAS = "adapter_config.json", "adapter_model.safetensors", "serve.json"
MANIFEST = "remote.json"
FETCHED = ".fetched"  # in a store: what came from URLs (deployments.adapters.fetch)
MAX_MANIFEST_BYTES = 32 << 20  # of MAX_NAMES rows, 300 bytes each
# A tenant may write its own anew before each of its requests, and all others wait while it is
# read: 10 ms.
MAX_TENANT_MANIFEST_BYTES = 1 << 20
PRIORITIES = ("urgent", "high", "normal", "low", "batch")  # C2
# One component of a path: without separator and leading dot a name cannot leave its folder. `:` and
# `@` have a meaning here.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Names listed of one folder. F2 asks for 10,000 and more, and memory holds the listing.
MAX_NAMES = 100_000
# Entries remembered, 1 KB each. A tenant may rename its adapters without end; a forgotten entry is
# read again, 0.1 ms.
MAX_READ = 32_768


class AdapterAmbiguous(RequestError):
    """More than one base model has an adapter of this name."""

    status_code, code = 400, "adapter_ambiguous"

    def __init__(self, name: str, bases: tuple[str, ...]) -> None:
        super().__init__(name, bases)
        self.name, self.bases = name, bases

    def __str__(self) -> str:
        full = ", ".join(full_name(base, self.name) for base in self.bases)
        return f"several models have an adapter {self.name!r}; write one of {full}"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One adapter in the state in which its owner left it."""

    name: str
    base: str  # the model it is for, by the name it is served under
    path: Path
    rank: int
    size_bytes: int
    stamp: tuple[int, ...] = ()  # times and inodes of its files: equal as long as nothing changed
    tenant: str = ""  # empty: of all tenants
    priority: str = "normal"
    pin: bool = False
    int8: bool = False  # its weights are rounded when it is published
    url: str = ""  # its source; then `rank` and `size_bytes` are 0, because they are not known yet

    @property
    def full_name(self) -> str:
        return full_name(self.base, self.name)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an adapter lies, a folder or a row of a manifest, and its tenant."""

    path: Path
    owner: str
    row: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Listing:
    """The names in one folder when its time was `mtime_ns`."""

    mtime_ns: int
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A manifest as it was at `stamp`: its rows, or why it has none. A broken one is kept as well:
    no request for another adapter reads it again."""

    stamp: tuple[int, ...]
    rows: Mapping[str, Mapping[str, Any]]
    fault: str = ""


class Catalogue:
    """The adapters of some base models. Several threads may look at once: what is remembered of a
    folder is replaced as a whole."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        reserved: frozenset[str] = frozenset(),
        urls: Mapping[str, Sequence[str]] = MappingProxyType({}),
        fetched: Path = Path("/nonexistent"),
    ) -> None:
        """`folders`: base model to its folder. `reserved`: names of base models, which no adapter
        may have; those of `folders` always are. `urls`: base model to the prefixes that its
        manifests may use; `fetched`: where what they name is on this node."""
        self._folders = dict(folders)
        self._resolved: dict[str, Path] = {}  # of those looked into: a file server may hang
        self._reserved = reserved | set(folders)
        self._urls, self._fetched = urls, fetched
        self._listings: dict[Path, _Listing] = {}
        self._manifests: dict[Path, _Manifest] = {}
        self._read: dict[Path, tuple[tuple[int, ...], CatalogueEntry]] = {}

    def find(self, name: str, tenant: str = "") -> CatalogueEntry | None:
        """The adapter that a client names, or None when this tenant may see none of that name. What
        lies behind a manifest that cannot be read is told only to a client that names its base, or
        an adapter of all tenants, which the manifest may hide: any other bare name may mean an
        adapter of another base, or none at all. Raises AdapterAmbiguous, AdapterInvalid,
        AdaptersAway; OSError where a folder cannot be read."""
        if not self.may_name(name):
            return None
        base, bare = (base_of(name) if is_full(name) else ""), bare_of(name)
        look = self._place if base else self._place_of_bare
        places: dict[str, _Place] = {}
        for each in [base] if base else list(self._folders):
            if home_place := look(each, bare, tenant):
                places[each] = home_place
        if len(places) > 1:
            raise AdapterAmbiguous(bare, tuple(sorted(places)))
        for base, home_place in places.items():
            is_remote = home_place.row is not None
            return (self._remote if is_remote else self._entry)(bare, base, home_place)
        return None

    def may_name(self, name: str) -> bool:
        """Whether an adapter may be called so, whatever is in the folders. Reads no disk."""
        bare = bare_of(name)
        return base_of(name) != "" and bool(_NAME.fullmatch(bare)) and bare not in self._reserved

    def entries(self, names: Iterable[str], tenant: str = "") -> list[CatalogueEntry]:
        """The entries of those names that mean an adapter which can be read."""
        entries = []
        for name in names:
            with contextlib.suppress(AdapterInvalid, AdapterAmbiguous, AdaptersAway, OSError):
                if entry := self.find(name, tenant):
                    entries.append(entry)
        return entries

    def names(self, tenant: str = "") -> list[str]:
        """Full names, `base:adapter`, of all that this tenant may see, sorted."""
        return sorted(
            full_name(base, name)
            for base in self._folders
            for name in self._names_of(self._folder(base), tenant)
        )

    def _folder(self, base: str) -> Path:
        """The folder of a base model, without links."""
        if base not in self._resolved:
            self._resolved[base] = self._folders[base].resolve()
        return self._resolved[base]

    def _names_of(self, folder: Path, tenant: str) -> set[str]:
        names: set[str] = set()
        for home, owner in _homes(folder, tenant):
            names |= self._listed(home)
            # A request for one of them gets the reason.
            with contextlib.suppress(AdapterInvalid, AdaptersAway):
                names |= self._rows(home, owner).keys() - self._reserved
        return names

    def _place(self, base: str, name: str, tenant: str) -> _Place | None:
        """A tenant's own adapter hides the common one. Raises OSError, and what `_rows` raises."""
        if base not in self._folders:
            return None
        for home, owner in _homes(self._folder(base), tenant):
            path = home / name
            if is_folder(home) and is_folder(path) and is_there(path / CONFIG):
                return _Place(path, owner)
            row = self._rows(home, owner).get(name)
            if row is not None:
                return _Place(home / MANIFEST, owner, row)
        return None

    def _place_of_bare(self, base: str, name: str, tenant: str) -> _Place | None:
        """Like `_place`, but a manifest that cannot be read is an error only where all tenants have
        such an adapter."""
        try:
            return self._place(base, name, tenant)
        except (AdapterInvalid, AdaptersAway):
            if self._is_common(base, name):
                raise
            return None

    def _is_common(self, base: str, name: str) -> bool:
        """Whether all tenants have an adapter of this name, as far as can be read."""
        try:
            return self._place(base, name, "") is not None
        except (AdapterInvalid, AdaptersAway):
            return False

    def _rows(self, home: Path, owner: str) -> Mapping[str, Mapping[str, Any]]:
        """Rows of the manifest in a folder, read again when it changed. Raises AdapterInvalid,
        AdaptersAway."""
        file = home / MANIFEST
        try:
            status = file.lstat()
            stamp = status.st_mtime_ns, status.st_ino, status.st_size
            manifest = self._manifests.get(file)
            if manifest is None or manifest.stamp != stamp:
                manifest = self._manifests[file] = _read_manifest(file, owner, stamp)
        except (FileNotFoundError, NotADirectoryError):
            self._manifests.pop(file, None)
            return {}
        except OSError as error:
            raise unreadable(MANIFEST, error) from error
        if manifest.fault:
            raise AdapterInvalid(MANIFEST, manifest.fault)
        return manifest.rows

    def _remote(self, name: str, base: str, home_place: _Place) -> CatalogueEntry:
        """Raises AdapterInvalid."""
        row = home_place.row or {}
        url = row.get("url")
        if not isinstance(url, str):
            options = "with `url` and, if need be, `priority`, `pin` and `int8`"
            raise AdapterInvalid(name, f"its row in {MANIFEST} is no URL and no object {options}")
        if not is_allowed(url, self._urls.get(base, ())):
            reason = f"its URL in {MANIFEST} begins with no prefix that `adapters.urls` lists"
            raise AdapterInvalid(name, reason)
        extras = _extras(name, MANIFEST, row)
        path = home_of(self._fetched, home_place.owner) / place(url)
        return CatalogueEntry(name, base, path, 0, 0, (), home_place.owner, *extras, url)

    def _entry(self, name: str, base: str, home_place: _Place) -> CatalogueEntry:
        """Raises AdapterInvalid, AdaptersAway."""
        path = home_place.path
        try:
            stamp = _stamp(path)
            stamped = self._read.get(path)
            if stamped is None or stamped[0] != stamp:
                if len(self._read) >= MAX_READ:
                    self._read.clear()
                stamped = self._read[path] = stamp, _read_entry(name, base, home_place, stamp)
        except OSError as error:
            raise unreadable(name, error) from error
        return stamped[1]

    def _listed(self, folder: Path) -> frozenset[str]:
        try:
            if not is_folder(folder):
                self._listings.pop(folder, None)
                return frozenset()
            mtime_ns = folder.stat().st_mtime_ns
            listing = self._listings.get(folder)
            if listing is None or listing.mtime_ns != mtime_ns:
                listing = self._listings[folder] = _Listing(mtime_ns, self._list(folder))
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        return listing.names

    def _list(self, folder: Path) -> frozenset[str]:
        with os.scandir(folder) as rows:
            names = (
                r.name for r in rows if _NAME.fullmatch(r.name) and r.is_dir(follow_symlinks=False)
            )
            matching = [name for name, _ in zip(names, range(MAX_NAMES), strict=False)]
        return frozenset(matching) - self._reserved


def home_of(folder: Path, tenant: str) -> Path:
    """Where in a folder the things of one tenant lie, or with an empty one those of all."""
    return folder / f"@{tenant}" if tenant else folder


def _homes(folder: Path, tenant: str) -> list[tuple[Path, str]]:
    """The folders that may hold an adapter for this tenant, each with the tenant it belongs to."""
    own = [(home_of(folder, tenant), tenant)] if _NAME.fullmatch(tenant) else []
    return [*own, (folder, "")]


def _stamp(path: Path) -> tuple[int, ...]:
    """Times, inodes and sizes, which change when an adapter is replaced, also by an owner who sets
    the times back. Raises OSError."""
    config, weights = (path / CONFIG).lstat(), (path / WEIGHTS).lstat()
    extras = (path / EXTRAS).lstat().st_mtime_ns if is_there(path / EXTRAS) else 0
    return (
        config.st_mtime_ns,
        config.st_ctime_ns,
        config.st_ino,
        weights.st_mtime_ns,
        weights.st_ctime_ns,
        weights.st_ino,
        weights.st_size,
        extras,
    )


def _read_entry(name: str, base: str, home_place: _Place, stamp: tuple[int, ...]) -> CatalogueEntry:
    """Raises AdapterInvalid, OSError."""
    path = home_place.path
    rank = read_json(name, path / CONFIG).get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterInvalid(name, f"{CONFIG}: `r` is {rank!r}, not a rank")
    extras = read_json(name, path / EXTRAS) if is_there(path / EXTRAS) else {}
    options = _extras(name, EXTRAS, extras)
    with open_plain(name, path / WEIGHTS) as weights:
        size = os.fstat(weights.fileno()).st_size
    return CatalogueEntry(name, base, path, rank, size, stamp, home_place.owner, *options)


def _read_manifest(file: Path, owner: str, stamp: tuple[int, ...]) -> _Manifest:
    """Raises OSError."""
    try:
        bound = MAX_TENANT_MANIFEST_BYTES if owner else MAX_MANIFEST_BYTES
        manifest = read_json(MANIFEST, file, bound)
        if len(manifest) > MAX_NAMES:
            fault = f"{MANIFEST} has {len(manifest):,} names; leave {MAX_NAMES:,} at most"
            raise AdapterInvalid(MANIFEST, fault)
    except AdapterInvalid as error:
        return _Manifest(stamp, {}, error.reason)
    return _Manifest(stamp, {n: _row(row) for n, row in manifest.items() if _NAME.fullmatch(n)})


def _row(value: Any) -> dict[str, Any]:
    """What is kept of a manifest's row: nothing where it can be no adapter, because a tenant could
    fill memory with it."""
    row = value if isinstance(value, dict) else {"url": value}
    options = {key: row[key] for key in ("url", "priority", "pin", "int8") if key in row}
    is_flat = all(isinstance(each, str | int | float | None) for each in options.values())
    return options if is_flat else {}


def _extras(name: str, file: str, row: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """Priority, pin, int8. Raises AdapterInvalid."""
    priority, pin, int8 = (
        row.get("priority", "normal"),
        row.get("pin", False),
        row.get("int8", False),
    )
    if priority not in PRIORITIES or not isinstance(pin, bool) or not isinstance(int8, bool):
        allowed = f"`priority` is one of {', '.join(PRIORITIES)}, `pin` and `int8` true or false"
        raise AdapterInvalid(name, f"{file}: {allowed}")
    return priority, pin, int8


def place(url: str) -> str:
    """Name of the folder for the content behind `url`, which never changes."""
    return hashlib.sha256(url.encode()).hexdigest()[:32]
