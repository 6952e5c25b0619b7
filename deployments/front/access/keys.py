"""API keys: what a request may do, and for which tenant (L1).

Keys live in one JSON file of mode 0600 beside the arbiter's state, which has only a hash of each.
The front reads the file again when it changes, so that a new key works, and a removed key fails,
from the next request on. The first start writes a key with every scope beside it, for the owner of
the machine.

A key is `arb-<id>-<secret>`. The id is public and finds the entry; the secret has 256 random bits,
so that one round of SHA-256 keeps it: there is no dictionary of such secrets to try.
"""

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from arbiter.server.state_path import default_path
from arbiter.units import DEFAULT_TENANT

logger = logging.getLogger("ray.serve")

# A model's name without the separators: a tenant is part of folder names and metric labels.
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"arb-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")


class Scope(StrEnum):
    """What a key allows; none implies another."""

    INFER = "infer"  # the OpenAI routes
    VIEW = "view"  # the arbiter's state and events, which name every tenant's models
    PRIORITY = "priority"  # a request priority above normal
    LEASE = "lease"  # device memory for processes outside Serve
    ADMIN = "admin"  # load, unload, pin, drain, settings
    CLOUD = "cloud"  # requests may leave for remotes; in no key that was not given it by name


OPEN_SCOPES = frozenset({Scope.INFER, Scope.VIEW})  # need no key until the first key is added

FIRST_SCOPES = frozenset(Scope) - {Scope.CLOUD}  # of the key that the first start writes


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant and scopes of a request's key."""

    tenant: str
    scopes: frozenset[Scope]
    key_id: str | None = None  # None: no key was needed


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the file. A removed key stays, so that no other key gets its id and the file
    never looks as if no key had been added."""

    id: str
    name: str
    tenant: str
    scopes: tuple[Scope, ...]
    sha256: str
    created_unix_s: int
    removed: bool = False
    first: bool = False  # written at first start; OPEN_SCOPES stay open beside it


class KeyTrouble(Exception):
    """A key, or the file of keys, is wrong; the text is for a person."""


class KeysBroken(KeyTrouble):
    """The file exists and cannot be used; every request is refused until it is repaired."""


class KeysUnread(KeysBroken):
    """The system did not let the file be read, which may pass with the file as it is."""


def keys_path(configured: str | None = None, state_file: str | None = None) -> Path:
    """Returns the file of keys: beside the arbiter's state, if not configured otherwise."""
    if configured:
        return Path(configured)
    return (Path(state_file) if state_file else default_path()).with_name("keys.json")


def first_key_path(path: Path) -> Path:
    """Where the first start leaves the owner's key, in plain text."""
    return path.with_name("admin.key")


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Keyring:
    """The file as last read. A lookup costs a stat of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Inode, size, mtime, ctime: a change of mode or owner changes only the last.
        self._seen: tuple[int, int, int, int] | None = None
        self._keys: dict[str, Key] = {}
        self._tenants_count = 0
        self._broken: KeysBroken | None = None
        self._last = ""  # what the log has of it

    @property
    def is_open(self) -> bool:
        """True until a key is added: OPEN_SCOPES need no key. Raises KeysBroken."""
        return all(key.first for key in self._current().values())

    @property
    def tenants_count(self) -> int:
        """How many tenants have keys. Raises KeysBroken."""
        self._current()
        return self._tenants_count

    def caller(self, token: str) -> Caller | None:
        """None for an unknown key. A wrong secret takes as long as an unknown id. Raises
        KeysBroken."""
        keys = self._current()
        match = _KEY.fullmatch(token)
        key = keys.get(match[1]) if match else None
        good = hmac.compare_digest(digest(token), key.sha256 if key else digest(""))
        if key is None or not good or key.removed:
            return None
        return Caller(key.tenant, frozenset(key.scopes), key.id)

    def _current(self) -> dict[str, Key]:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            stamp = None
        except OSError as error:
            raise self._told(KeysUnread(f"{self.path}: {error}")) from error
        else:
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if stamp != self._seen:
            self._read()
            self._seen = stamp
        if self._broken:
            raise self._broken
        return self._keys

    def _read(self) -> None:
        try:
            self._keys, self._broken, self._last = load(self.path), None, ""
            self._tenants_count = len({k.tenant for k in self._keys.values() if not k.removed})
        except KeysUnread as error:
            self._told(error)
            raise  # not remembered: the next request reads again
        except KeysBroken as error:
            self._broken = self._told(error)

    def _told(self, error: KeysBroken) -> KeysBroken:
        """Logs it, unless the last one was the same: each request may meet it again."""
        if str(error) != self._last:
            logger.error("%s", error)
            self._last = str(error)
        return error


_FILE = TypeAdapter(list[Key])


def load(path: Path) -> dict[str, Key]:
    """The keys by id; empty when there is no file. Raises KeysBroken."""
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            raw = stream.read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise KeysUnread(f"{path}: {error}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise KeysBroken(f"{path} must be yours and of mode 0600; `chmod 600 {path}`")
    try:
        return {key.id: key for key in _FILE.validate_json(raw)}
    except ValidationError as error:
        raise KeysBroken(f"{path}: {error.errors()[0]['msg']}; restore it") from error


def add(path: Path, name: str, tenant: str, scopes: frozenset[Scope]) -> str:
    """The new key in plain text, for the only time. Raises KeyTrouble."""
    if not TENANT.fullmatch(tenant):
        raise KeyTrouble(f"tenant {tenant!r}: use letters, digits, and . _ - inside")
    if not scopes:
        raise KeyTrouble("a key needs a scope")
    with _changing(path) as keys:
        return _put(keys, name, tenant, scopes)


def remove(path: Path, key_id: str) -> None:
    """The key fails from the next request on. Raises KeyTrouble."""
    with _changing(path) as keys:
        if key_id not in keys or keys[key_id].removed:
            raise KeyTrouble(f"no key {key_id!r} in {path}; `arbiter key list` shows all")
        keys[key_id] = replace(keys[key_id], removed=True)


def ensure_first(path: Path) -> None:
    """Writes a key with every scope but `cloud` at the first start, into a file that only the owner
    can read.
    Where the folder is not writable there is no key, and routes that need a key stay off."""
    try:
        with _changing(path) as keys:
            if keys:
                return
            token = _put(keys, "first start", DEFAULT_TENANT, FIRST_SCOPES, first=True)
            _write(first_key_path(path), token.encode() + b"\n")
    except KeysBroken as error:
        logger.error("admin and lease routes stay off, no first key was written: %s", error)
        return
    logger.info("the key for admin and lease routes is in %s", first_key_path(path))


def _put(
    keys: dict[str, Key], name: str, tenant: str, scopes: frozenset[Scope], *, first: bool = False
) -> str:
    key_id = secrets.token_hex(6)
    token = f"arb-{key_id}-{secrets.token_urlsafe(32)}"
    now = int(time.time())
    keys[key_id] = Key(key_id, name, tenant, tuple(sorted(scopes)), digest(token), now, first=first)
    return token


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, Key]]:
    """Reads, lets the caller change, and replaces the file under a lock, because front and command
    line may both change it. Raises KeysBroken, also for a folder that is not writable."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = load(path)
            before = dict(keys)
            yield keys
            if keys != before:
                rows = [asdict(key) for key in keys.values()]
                _write(path, json.dumps(rows, indent=1).encode())
    except OSError as error:
        raise KeysBroken(f"{path}: {error}") from error


def _write(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)  # of a writer that died
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    new.rename(path)
