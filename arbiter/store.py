"""What must outlive the arbiter, in one SQLite file of mode 0600: the epoch counter, who held
tickets, learned estimates, and the configuration.

The books are not in it: holders and measurement are their truth. Losing the file loses comfort,
never bytes, so a broken one is moved aside and a new one begun.
"""

import json
import os
import pickle
import sqlite3
import time
from pathlib import Path
from typing import Any

from arbiter.units import Epoch, HolderId
from arbiter.wire import Configuration

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS holders (holder TEXT PRIMARY KEY) STRICT;
"""
# What unpickling a configuration of other code can raise (pickle's documentation: "other
# exceptions may also be raised, including (but not necessarily limited to)" these).
_STALE = (pickle.UnpicklingError, AttributeError, ImportError, EOFError, IndexError, TypeError)


def default_path() -> Path:
    """Beside the user's other state, as the XDG base directory specification has it."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "serve-arbiter" / "arbiter.sqlite"


class Store:
    """Every write is durable against a killed process (WAL, synchronous NORMAL: 0.016 ms)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moved_aside: Path | None = None  # where a broken predecessor went
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._db = _open(path)
        except sqlite3.DatabaseError:
            self.moved_aside = path.with_suffix(f".broken-{time.time_ns()}")
            path.rename(self.moved_aside)
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
            self._db = _open(path)

    def next_epoch(self) -> Epoch:
        """Never one given before: a lost file falls back on the clock, which is ahead of any
        count of restarts."""
        last = self._read("epoch")
        epoch = json.loads(last) + 1 if last else time.time_ns() // 1_000_000_000
        self._write("epoch", json.dumps(epoch))
        return Epoch(epoch)

    def is_of_session(self, name: str) -> bool:
        """Whether the file was last used in this life of the cluster."""
        return bool(self._read("session") == name.encode())

    def begin_session(self, name: str) -> None:
        """Forget holders and configuration of another life of the cluster; learned stays."""
        self._db.execute("DELETE FROM holders")
        self._db.execute("DELETE FROM facts WHERE name = 'configuration'")
        self._write("session", name)

    # -- who is expected back ----------------------------------------------------------------

    def holders(self) -> frozenset[HolderId]:
        rows = self._db.execute("SELECT holder FROM holders")
        return frozenset(HolderId(row[0]) for row in rows)

    def add_holder(self, holder: HolderId) -> None:
        self._db.execute("INSERT OR IGNORE INTO holders VALUES (?)", (holder,))

    def drop_holder(self, holder: HolderId) -> None:
        self._db.execute("DELETE FROM holders WHERE holder = ?", (holder,))

    # -- learned and set -----------------------------------------------------------------------

    def learned(self) -> Any:
        """What `save_learned` was given last, or None. Plain JSON values."""
        raw = self._read("learned")
        return json.loads(raw) if raw else None

    def save_learned(self, plain: Any) -> None:
        self._write("learned", json.dumps(plain))

    def configuration(self) -> Configuration | None:
        """None when none was saved, or by code too different to read."""
        raw = self._read("configuration")
        try:
            # Our own file, 0600: whoever can write it runs as us already.
            return pickle.loads(raw) if raw else None
        except _STALE:
            return None

    def save_configuration(self, configuration: Configuration) -> None:
        self._write("configuration", pickle.dumps(configuration))

    def close(self) -> None:
        self._db.close()

    def _read(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def _write(self, name: str, value: str | bytes) -> None:
        blob = value.encode() if isinstance(value, str) else value
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, blob))


def _open(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.DatabaseError when the file is not a sound database."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    path.chmod(0o600)
    db = sqlite3.connect(path, isolation_level=None)  # each statement commits
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError(f"{path} is damaged")
        db.executescript(_SCHEMA)
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db
