"""The copy of an adapter that an engine may load, in a folder named by its content.

A tenant may change or remove an adapter in the catalogue at any moment, and vLLM's prefix cache
knows adapters by path. So an engine serves `<store>/<digest>/`, which is copied with bounds, hashed
during the copy, and checked after it: the engine loads what was checked.

The copies of a tenant's own adapters lie in `<store>/@<tenant>/`, which leaves with the tenant
(arbiter.node.tenant_folders): files of equal content are copied once for each of their owners.

`<store>/.known/` says which entry, in which state, became which copy: the next engine finds the
copy, or the images made of it (deployments.engines.vllm.adapters.adapter_images), and reads no
weights.
"""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from arbiter.errors import RequestError
from deployments.adapters.catalogue import (
    FETCHED,
    MAX_READ,
    WEIGHTS,
    Catalogue,
    CatalogueEntry,
    home_of,
)
from deployments.adapters.folder_cache import alone, make_room, remove_abandoned
from deployments.adapters.int8 import round_weights
from deployments.adapters.safe_files import AdapterInvalid, AdaptersAway, open_plain, unreadable
from deployments.adapters.validate import Rules, check, rules_of
from deployments.config.file_threads import in_thread

_CHUNK_BYTES = 1 << 20
# The store's bound: 2,000 adapters of an 8 B model at rank 16. Beyond it the longest unused are
# removed.
MAX_STORE_BYTES = 160 << 30
_SCRATCH = ".copying-"
_COPIES = 4  # at once of one engine's adapters, as many as are fetched at once
_COPY_MOST_S = 3_600.0  # a gigabyte from a slow file server takes minutes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk or a limit says that takes no more
_KNOWN = ".known"
_MOST_KNOWN = 100_000  # entries; a forgotten one is copied and checked again


class AdapterNotCopied(RequestError):
    """This node has no room for the checked copy; the adapter is not at fault."""

    status_code, code, retry_after_s = 503, "adapter_not_copied", 10.0

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"adapter {self.name!r} could not be copied to the node's store: {self.reason}"


@dataclass(frozen=True, slots=True)
class Published:
    """An adapter that an engine may load."""

    digest: str
    path: Path
    size_bytes: int


class Store:
    """Copies of one node, named by content. Several engines and threads may share the folder."""

    def __init__(self, folder: Path, max_bytes: int = MAX_STORE_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._max_bytes = folder.resolve(), max_bytes

    def publish(self, entry: CatalogueEntry, rules: Rules) -> Published:
        """Copies, hashes and checks the adapter, and only then names the copy, unless the copy of
        this entry under these rules is there. Blocks for the copy. Raises AdapterInvalid,
        AdaptersAway, AdapterNotCopied."""
        if entry.rank > rules.max_rank:
            reason = f"rank {entry.rank} is above the {rules.max_rank} its model serves"
            raise AdapterInvalid(entry.name, reason)
        if published := self._known(entry, rules):
            return published
        try:
            scratch = Path(tempfile.mkdtemp(dir=self._folder, prefix=_SCRATCH))
        except OSError as error:
            raise AdapterNotCopied(entry.name, str(error.strerror)) from error
        try:
            new = self._publish(entry, rules, scratch)
            self._note(entry, rules, new)
            return new
        except OSError as error:
            if error.errno in _FULL:
                raise AdapterNotCopied(entry.name, str(error.strerror)) from error
            raise unreadable(entry.name, error) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _publish(self, entry: CatalogueEntry, rules: Rules, scratch: Path) -> Published:
        hashed = hashlib.sha256()
        for name, bound in rules.bounds.items():
            _copy(entry, name, scratch / name, bound, hashed)
        check(entry.name, scratch, rules)
        if entry.int8:
            hashed = _rounded(scratch, rules)
        digest = hashed.hexdigest()[:32]
        home = home_of(self._folder, entry.tenant)
        target = home / digest
        size_bytes = (scratch / WEIGHTS).stat().st_size
        with alone(self._folder):
            remove_abandoned(self._folder, _SCRATCH, _COPY_MOST_S)
            if target.is_dir():
                os.utime(target)  # the time of use, by which the longest unused are removed
            else:
                # A copy may be removed although an engine has loaded it: the engine keeps what it
                # read, and publishes the adapter again before it loads it again.
                make_room(self._folder, size_bytes, self._max_bytes)
                home.mkdir(mode=0o700, exist_ok=True)
                scratch.rename(target)
        return Published(digest, target, size_bytes)

    def _known(self, entry: CatalogueEntry, rules: Rules) -> Published | None:
        with contextlib.suppress(OSError):
            if published := self.peek(entry, rules):
                os.utime(published.path)  # the time of use; raises OSError where the copy is gone
                return published
        return None

    def peek(self, entry: CatalogueEntry, rules: Rules) -> Published | None:
        """What was published of this entry in this state, which does not count as a use. The copy
        may be gone."""
        with contextlib.suppress(OSError, ValueError):  # there is no note, or it is incomplete
            note = json.loads(self._note_of(entry, rules).read_text())
            path = home_of(self._folder, entry.tenant) / str(note["digest"])
            return Published(path.name, path, int(note["size_bytes"]))
        return None

    def _note(self, entry: CatalogueEntry, rules: Rules, published: Published) -> None:
        """Raises OSError."""
        note = self._note_of(entry, rules)
        note.parent.mkdir(mode=0o700, exist_ok=True)
        if sum(1 for _ in os.scandir(note.parent)) >= _MOST_KNOWN:
            shutil.rmtree(note.parent)
            note.parent.mkdir(mode=0o700, exist_ok=True)
        whole = {"digest": published.digest, "size_bytes": published.size_bytes}
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(whole))
        temporary.rename(note)

    def _note_of(self, entry: CatalogueEntry, rules: Rules) -> Path:
        """Returns the path of the note on an entry. Its name is a hash of the entry, with the times
        of its files, and of the rules by which it was checked."""
        facts = repr((entry, rules.max_rank, sorted(rules.shapes.items())))
        return self._folder / _KNOWN / hashlib.sha256(facts.encode()).hexdigest()[:32]


def store_of(config: Mapping[str, Any]) -> Store:
    """The store of an engine with this configuration, which its replica shares."""
    return Store(Path(config["adapters"]["store"]))


class CheckedAdapters:
    """The store as one engine uses it: an adapter that was published and has not changed is there
    at once, also while others are copied."""

    def __init__(self, store: Store, rules: Rules) -> None:
        self._store, self._rules = store, rules
        self._known: dict[tuple[str, str], tuple[CatalogueEntry, Published]] = {}
        # One per adapter that is asked for now, so that many requests for a new adapter have it
        # copied once.
        self._copying = WeakValueDictionary[tuple[str, str], asyncio.Lock]()
        self._places = asyncio.Semaphore(_COPIES)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "CheckedAdapters":
        """Those of an engine with this configuration. Reads its model's headers. Raises OSError,
        BadHeader."""
        return cls(store_of(config), rules_of(config))

    async def take(self, entry: CatalogueEntry) -> Published:
        """The checked copy, which is made again when the entry changed or the copy is gone. Raises
        AdapterInvalid, AdaptersAway, AdapterNotCopied."""
        if published := self._current(entry):
            return published
        key = entry.tenant, entry.name
        async with self._copying.setdefault(key, asyncio.Lock()):
            if published := self._current(entry):
                return published
            async with self._places:
                new = await in_thread(str(entry.path), self._store.publish, entry, self._rules)
            if len(self._known) >= MAX_READ:
                self._known.clear()  # found again by the store's notes
            self._known[key] = entry, new
        return new

    async def peek(self, entries: Iterable[CatalogueEntry]) -> dict[str, Published]:
        """What was published of these entries as they are now, by full name; publishes nothing."""
        return await asyncio.to_thread(self._peek, list(entries))

    def _peek(self, entries: list[CatalogueEntry]) -> dict[str, Published]:
        peeked = {entry.full_name: self._store.peek(entry, self._rules) for entry in entries}
        return {name: published for name, published in peeked.items() if published}

    def _current(self, entry: CatalogueEntry) -> Published | None:
        known = self._known.get((entry.tenant, entry.name))
        if known is None or known[0] != entry or not known[1].path.is_dir():
            return None
        return known[1]


class EngineCatalogue:
    """The catalogue that an engine and its replica share. It looks in a thread, because the folder
    may lie on a file server that hangs; looks come one after another."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: the engine's."""
        section, base = config["adapters"], str(config.get("served_name", config["model"]))
        fetched = Path(section["store"]) / FETCHED
        urls = {base: section.get("urls", ())}
        self._thread = f"adapters in {section['folder']}"
        self._adapters = Catalogue({base: Path(section["folder"])}, urls=urls, fetched=fetched)

    async def find(self, name: str, tenant: str) -> CatalogueEntry | None:
        """As `Catalogue.find`. Raises AdapterAmbiguous, AdapterInvalid, AdaptersAway."""
        try:
            return await in_thread(self._thread, self._adapters.find, name, tenant)
        except OSError as error:
            raise AdaptersAway(name, f"{error.filename}: {error.strerror}") from error

    async def entries(self, names: Iterable[str], tenant: str) -> list[CatalogueEntry]:
        """As `Catalogue.entries`. Raises OSError where the process gets no thread."""
        return await in_thread(self._thread, self._adapters.entries, names, tenant)

    async def outdated(self, entries: Mapping[str, CatalogueEntry]) -> list[str]:
        """The keys of those entries that the catalogue has no more, or otherwise; not of those that
        cannot be read now. Raises OSError where the process gets no thread."""
        return await in_thread(self._thread, self._outdated, dict(entries)) if entries else []

    def _outdated(self, entries: Mapping[str, CatalogueEntry]) -> list[str]:
        return [key for key, entry in entries.items() if not self._is_current(entry)]

    def _is_current(self, entry: CatalogueEntry) -> bool:
        try:
            return self._adapters.find(entry.full_name, entry.tenant) == entry
        except (OSError, AdaptersAway):
            return True
        except RequestError:
            return False

    async def names(self) -> list[str]:
        """Full names of the adapters of all tenants. Raises OSError."""
        return await in_thread(self._thread, self._adapters.names)


def _rounded(folder: Path, rules: Rules) -> Any:
    """Rounds the weights and returns the hash of what the folder holds then. Raises OSError."""
    weights = folder / WEIGHTS
    weights.chmod(0o600)
    round_weights(weights)
    weights.chmod(0o400)
    hashed = hashlib.sha256()
    for name in rules.bounds:
        with (folder / name).open("rb") as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                hashed.update(chunk)
        hashed.update(name.encode())
    return hashed


def _copy(entry: CatalogueEntry, name: str, target: Path, bound: int, hashed: Any) -> None:
    """Copies and hashes one file. Raises AdapterInvalid for a file that is not plain or larger than
    the bound, OSError for links."""
    with open_plain(entry.name, entry.path / name) as reader, target.open("xb") as writer:
        target.chmod(0o400)
        remaining_bytes = bound
        while chunk := reader.read(_CHUNK_BYTES):
            remaining_bytes -= len(chunk)
            if remaining_bytes < 0:
                raise AdapterInvalid(entry.name, f"{name} is larger than {bound} bytes")
            hashed.update(chunk)
            writer.write(chunk)
    hashed.update(name.encode())
