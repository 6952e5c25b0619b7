"""What must outlive the arbiter, in one SQLite file of mode 0600. Of each cluster's life: the epoch
counter, the holders and usage; from one life to the next: what a person set and registered; of all
of them: learned estimates.

The books are not in it: holders and measurement are their truth. Losing the file loses comfort,
never bytes, so a broken one is moved aside and a new one begun, and where none can be written the
arbiter goes on without.
"""

import json
import logging
import os
import pickle
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbiter.core.types import CapabilitySpec, DeviceBytes, LeaseHistory
from arbiter.protocol.json_codec import from_json, to_json
from arbiter.protocol.messages import Configuration, LeaseCall, Plain, protocol_hash
from arbiter.units import Epoch, HolderId, NodeId

logger = logging.getLogger("arbiter")

LearnedKey = tuple[str, str, str]  # capability, model, settings: see estimates.ModelKey
# Lives of clusters remembered, some kB each; a user has a few at once, and old ones never return.
SESSIONS_KEPT = 64
SPENDING_DAYS_KEPT = 62  # two months, for a person who compares them with a bill
# What a person set lasts until a person changes it, so the next life of a cluster takes it over.
_LASTING = ("configuration", "registered")
_ENDED = "ended"  # of a life that was ended in order: the next one may have the same name
LOCKED_S = 1.0  # another cluster's arbiter writes for 0.016 ms; heartbeats come each second

_SCHEMA = """
CREATE TABLE IF NOT EXISTS learned_rows (
    capability TEXT, model TEXT, settings_key TEXT, value BLOB NOT NULL,
    PRIMARY KEY (capability, model, settings_key)) STRICT;
CREATE TABLE IF NOT EXISTS sessions (session TEXT PRIMARY KEY, begun_ns INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS session_facts (
    session TEXT, name TEXT, value BLOB NOT NULL, PRIMARY KEY (session, name)) STRICT;
CREATE TABLE IF NOT EXISTS session_members (
    session TEXT, holder TEXT, node TEXT NOT NULL, pid INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL, PRIMARY KEY (session, holder)) STRICT;
CREATE TABLE IF NOT EXISTS session_drivers (
    session TEXT, holder TEXT, PRIMARY KEY (session, holder)) STRICT;
CREATE TABLE IF NOT EXISTS remote_spent (
    day TEXT, tenant TEXT, remote TEXT, tokens INTEGER NOT NULL, micros INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, remote)) STRICT;
CREATE TABLE IF NOT EXISTS remote_reserved (
    id TEXT PRIMARY KEY, day TEXT NOT NULL, tenant TEXT NOT NULL, remote TEXT NOT NULL,
    tokens INTEGER NOT NULL, micros INTEGER NOT NULL) STRICT;
"""
_USAGE = """
SELECT value FROM session_facts WHERE session = ? AND (name = 'usage' OR name LIKE 'usage %')
ORDER BY CAST(substr(name, 7) AS INTEGER)"""
_SPENDING = """
SELECT tenant, remote, sum(tokens), sum(micros), sum(held_tokens), sum(held_micros) FROM (
    SELECT tenant, remote, tokens, micros, 0 AS held_tokens, 0 AS held_micros
        FROM remote_spent WHERE day = ?
    UNION ALL SELECT tenant, remote, 0, 0, tokens, micros FROM remote_reserved WHERE day = ?)
GROUP BY tenant, remote ORDER BY tenant, remote"""
# What unpickling a configuration can raise though its code is the same (pickle's documentation:
# "other exceptions may also be raised, including (but not necessarily limited to)" these).
_STALE = (pickle.UnpicklingError, AttributeError, ImportError, EOFError, IndexError, TypeError)


@dataclass(frozen=True, slots=True)
class ExpectedHolder:
    """Describes a holder that is expected back, and its process; 0 where that is not known."""

    holder: HolderId
    node: NodeId
    pid: int = 0
    start_ticks: int = 0
    is_driver: bool = False  # its silence is its death (A5)


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """Describes a lease that the next epoch must know."""

    call: LeaseCall
    node: NodeId
    devices: tuple[DeviceBytes, ...]
    ends_unix_s: float  # of the wall clock: a monotonic one ends with its machine
    is_kept: bool  # no process beats for it
    history: LeaseHistory
    is_drained: bool = False  # by hand, and its holder has not yet given it back


class Store:
    """Reads and writes the state file for one session. Every write is durable against a killed
    process (WAL, synchronous NORMAL: 0.016 ms). A write that fails is logged and told to
    `on_trouble`, once until a write works again."""

    def __init__(self, path: Path, session: str) -> None:
        self.path, self._session = path, session
        self.moved_aside: Path | None = None  # where a broken predecessor went
        self.trouble: str | None = None
        self.on_trouble: Callable[[str], None] = lambda why: None
        self._is_file = self._is_open = True
        self._db = self._open_somehow()
        self.begins_life = self._begin()  # of a cluster: no arbiter of this one ran before

    def next_epoch(self) -> Epoch:
        """Returns a number that no epoch had before, whether or not the last could be saved: the
        clock is ahead of any count of restarts, which take a second each."""
        last = self._fact("epoch")
        epoch = max(json.loads(last) + 1 if last else 0, time.time_ns() // 1_000_000_000)
        self._save_fact("epoch", json.dumps(epoch).encode())
        return Epoch(epoch)

    def end_session(self) -> None:
        """Forgets the holders, because none is expected back. The epoch stays, because a holder
        that missed the end must hear of the next, and so does what lasts."""
        for table in ("session_members", "session_drivers"):
            self._write(f"DELETE FROM {table} WHERE session = ?", self._session)
        kept = ("epoch", *_LASTING)
        others = f"session = ? AND name NOT IN ({', '.join('?' * len(kept))})"
        self._write(f"DELETE FROM session_facts WHERE {others}", self._session, *kept)
        self._save_fact(_ENDED, b"")

    # -- holders that are expected back --------------------------------------------------------

    def members(self) -> tuple[ExpectedHolder, ...]:
        mine = "SELECT holder, node, pid, start_ticks FROM session_members WHERE session = ?"
        rows = self._read(mine, self._session)
        driving = "SELECT holder FROM session_drivers WHERE session = ?"
        drivers = {row[0] for row in self._read(driving, self._session)}
        return tuple(
            ExpectedHolder(HolderId(h), NodeId(n), pid, ticks, h in drivers)
            for h, n, pid, ticks in rows
        )

    def add_member(self, member: ExpectedHolder) -> None:
        row = (member.holder, member.node, member.pid, member.start_ticks)
        statement = "INSERT OR REPLACE INTO session_members VALUES (?, ?, ?, ?, ?)"
        self._write(statement, self._session, *row)
        if member.is_driver:
            statement = "INSERT OR REPLACE INTO session_drivers VALUES (?, ?)"
            self._write(statement, self._session, member.holder)

    def drop_holder(self, holder: HolderId) -> None:
        for table in ("session_members", "session_drivers"):
            statement = f"DELETE FROM {table} WHERE session = ? AND holder = ?"
            self._write(statement, self._session, holder)

    # -- learned and set -----------------------------------------------------------------------

    def learned(self) -> list[Plain]:
        """Returns what all sessions have learned, a row for each model under its settings. The rows
        that were written last are at the end: a row that is replaced gets another rowid."""
        rows = self._read("SELECT value FROM learned_rows ORDER BY rowid")
        return [json.loads(row[0]) for row in rows]

    def save_learned(self, rows: list[Plain], forgotten: Iterable[LearnedKey] = ()) -> bool:
        """Writes rows and removes those of forgotten keys; all others are another session's to
        change, or newer code's. False: not all was written; the caller gives all of it again."""
        for row in rows:
            values = *_key(row), json.dumps(row).encode()
            if not self._write("INSERT OR REPLACE INTO learned_rows VALUES (?, ?, ?, ?)", *values):
                return False  # a locked file takes LOCKED_S for each
        one = "capability = ? AND model = ? AND settings_key = ?"
        return all(self._write(f"DELETE FROM learned_rows WHERE {one}", *key) for key in forgotten)

    def floors(self) -> Any:
        """Returns what `save_floors` was given last in this session; empty when nothing was."""
        return json.loads(self._fact("floors") or b"[]")

    def save_floors(self, rows: Any) -> None:
        self._save_fact("floors", json.dumps(rows).encode())

    def removing(self) -> Any:
        """Returns what `save_removing` was given last in this session; empty when nothing was."""
        return json.loads(self._fact("removing") or b"[]")

    def save_removing(self, rows: Any) -> bool:
        """Saves the models that are being removed. Returns whether that could be written."""
        return self._save_fact("removing", json.dumps(rows).encode())

    def asked(self) -> Any:
        """What `save_asked` was given last in this session; empty when nothing was."""
        return json.loads(self._fact("asked") or b"[]")

    def save_asked(self, rows: Any) -> bool:
        """False: they could not be written."""
        return self._save_fact("asked", json.dumps(rows).encode())

    def registered(self) -> tuple[CapabilitySpec, ...]:
        """Returns the capabilities that `save_registered` was given last. Raises
        ValueError when they were written by code that described them otherwise."""
        rows = json.loads(self._fact("registered") or b"[]")
        return tuple(from_json(CapabilitySpec, row) for row in rows)

    def save_registered(self, capabilities: tuple[CapabilitySpec, ...]) -> None:
        self._save_fact("registered", json.dumps(to_json(capabilities)).encode())

    def leases(self) -> tuple[GrantedLease, ...]:
        """Returns what `save_leases` was given last in this session; nothing where code that
        described leases otherwise wrote it."""
        rows = json.loads(self._fact("leases") or b"[]")
        try:
            return tuple(from_json(GrantedLease, row) for row in rows)
        except ValueError as error:
            logger.warning("leases must be asked for again: %s", error)
            return ()

    def save_leases(self, leases: tuple[GrantedLease, ...]) -> None:
        self._save_fact("leases", json.dumps(to_json(leases)).encode())

    def removed_tenants(self) -> dict[str, float]:
        """Returns when tenants were removed, as last saved, in seconds of the wall clock."""
        removed_at_s: dict[str, float] = json.loads(self._fact("removed_tenants") or b"{}")
        return removed_at_s

    def save_removed_tenants(self, removed: dict[str, float]) -> None:
        self._save_fact("removed_tenants", json.dumps(removed).encode())

    def removed_models(self) -> Any:
        """Returns which models were removed, as last saved."""
        return json.loads(self._fact("removed_models") or b"[]")

    def save_removed_models(self, rows: Any) -> bool:
        """Saves which models were removed. Returns whether that could be written."""
        return self._save_fact("removed_models", json.dumps(rows).encode())

    def accounts(self) -> Any:
        """Returns what clients of this session have used, as last saved."""
        return json.loads(self._fact("accounts") or b"[]")

    def save_accounts(self, rows: Any) -> bool:
        """Saves what clients have used. Returns whether that could be written."""
        return self._save_fact("accounts", json.dumps(rows).encode())

    def usage(self) -> Any:
        """Returns how the models of this session were used, as last saved; None when it never
        was."""
        return _joined([json.loads(row[0]) for row in self._read(_USAGE, self._session)])

    def save_usage(self, part: int, exported: Any) -> bool:
        """Saves what was exported of some models, as one part. False: it could not be written."""
        return self._save_fact(f"usage {part}" if part else "usage", json.dumps(exported).encode())

    def drop_usage_from(self, part: int) -> bool:
        """Removes the parts from this number on: there are fewer than before. False: it could not
        be written."""
        beyond = "name LIKE 'usage %' AND CAST(substr(name, 7) AS INTEGER) >= ?"
        delete = f"DELETE FROM session_facts WHERE session = ? AND {beyond}"
        return self._write(delete, self._session, part)

    def configuration(self, at_start: Configuration) -> Configuration:
        """Returns the configuration that this arbiter begins with. What was saved wins over that of
        its start, except where a life of a cluster begins with another file than what was saved
        began with (C12). What other code saved is not read: a pickle has its fields by place, so
        an object of other classes would be read without an error, and wrong."""
        saved = _configuration(self._fact("configuration"))
        if saved is None:
            return at_start.numbered(1)
        if self.begins_life and at_start.table not in (saved.table, saved.written):
            return at_start.numbered(saved.generation + 1)
        return saved

    def save_configuration(self, configuration: Configuration) -> None:
        blob = protocol_hash().encode() + b"\n" + pickle.dumps(configuration)
        self._save_fact("configuration", blob)

    def recording(self) -> str | None:
        """Returns the file into which this session's events are recorded; None where they are
        not."""
        path = self._fact("recording")
        return path.decode() if path else None

    def save_recording(self, path: str | None) -> None:
        self._save_fact("recording", (path or "").encode())

    # -- what was spent at remotes, by all sessions ----------------------------------------------

    def spent(self, day: str, tenant: str, remote: str) -> tuple[int, int]:
        """Returns tokens, and millionths of money: spent, and reserved by requests that have not
        ended yet."""
        tokens = micros = 0
        for table in ("remote_spent", "remote_reserved"):
            statement = f"SELECT total(tokens), total(micros) FROM {table}"
            where = "WHERE day = ? AND tenant = ? AND remote = ?"
            for row in self._read(f"{statement} {where}", day, tenant, remote):
                tokens, micros = tokens + int(row[0]), micros + int(row[1])
        return tokens, micros

    def spending(self, day: str) -> list[Plain]:
        """Returns a row for each tenant and remote of a day: what was spent, and what is reserved
        by requests that have not ended, those of a front that died among them."""
        names = (
            "tenant",
            "remote",
            "tokens",
            "money_micros",
            "reserved_tokens",
            "reserved_money_micros",
        )
        return [dict(zip(names, row, strict=True)) for row in self._read(_SPENDING, day, day)]

    def reserve(
        self, key: str, day: str, tenant: str, remote: str, tokens: int, micros: int
    ) -> bool:
        """Reserves the price of a request. A repeated call reserves once. Returns False where it
        could not be written."""
        statement = "INSERT OR IGNORE INTO remote_reserved VALUES (?, ?, ?, ?, ?, ?)"
        return self._write(statement, key, day, tenant, remote, tokens, micros)

    def is_reserved(self, key: str) -> bool:
        return bool(self._read("SELECT 1 FROM remote_reserved WHERE id = ?", key))

    def settle(self, key: str, tokens: int, micros: int) -> bool:
        """Puts what was spent in the place of what `is_reserved`. False: it could not be written,
        and stays reserved."""
        if not self._write("BEGIN IMMEDIATE"):  # without it a crash would forget what was spent
            return False
        gone = "DELETE FROM remote_reserved WHERE id = ? RETURNING day, tenant, remote"
        rows = self._run(gone, key)
        is_written = rows is not None and all(
            self._write(
                "INSERT INTO remote_spent VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " tokens = tokens + excluded.tokens, micros = micros + excluded.micros",
                *row,
                tokens,
                micros,
            )
            for row in rows
        )
        if is_written and self._write("COMMIT"):
            return True
        if self._db.in_transaction:  # a full disk has ended it already
            self._db.execute("ROLLBACK")
        return False

    def close(self) -> None:
        """Closes the file. Nothing is kept from here on: that a holder leaves an arbiter which has
        ended is no failure."""
        self._is_open = False
        self._db.close()

    # -- the file ------------------------------------------------------------------------------

    def _open_somehow(self) -> sqlite3.Connection:
        try:
            return self._open_or_replace()
        except (sqlite3.Error, OSError) as error:  # locked, full, read-only: not the file's fault
            self._failed(error)
            self._is_file = False
            db = sqlite3.connect(":memory:", isolation_level=None)
            db.executescript(_SCHEMA)
            return db

    def _open_or_replace(self) -> sqlite3.Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return _open(self.path)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            self.moved_aside = self.path.with_suffix(f".broken-{time.time_ns()}")
            self.path.rename(self.moved_aside)
            for suffix in ("-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            return _open(self.path)

    def _begin(self) -> bool:
        """Returns whether a life of a cluster begins, which then has what lasts of the one
        before."""
        begins = not self._read("SELECT 1 FROM sessions WHERE session = ?", self._session)
        if begins:
            before = "SELECT session FROM sessions ORDER BY begun_ns DESC LIMIT 1"
            lasting = f"session = ({before}) AND name IN ({', '.join('?' * len(_LASTING))})"
            taken = f"SELECT ?, name, value FROM session_facts WHERE {lasting}"
            self._write(f"INSERT INTO session_facts {taken}", self._session, *_LASTING)
        ended = "DELETE FROM session_facts WHERE session = ? AND name = ? RETURNING name"
        begins = bool(self._read(ended, self._session, _ENDED)) or begins
        self._write("INSERT OR REPLACE INTO sessions VALUES (?, ?)", self._session, time.time_ns())
        newest = f"SELECT session FROM sessions ORDER BY begun_ns DESC LIMIT {SESSIONS_KEPT}"
        for table in ("session_members", "session_drivers", "session_facts", "sessions"):
            self._write(f"DELETE FROM {table} WHERE session NOT IN ({newest})")
        for table in ("remote_spent", "remote_reserved"):
            days = f"SELECT DISTINCT day FROM {table} ORDER BY day DESC LIMIT {SPENDING_DAYS_KEPT}"
            self._write(f"DELETE FROM {table} WHERE day NOT IN ({days})")
        return begins

    def _fact(self, name: str) -> bytes | None:
        mine = "session = ? AND name = ?"
        rows = self._read(f"SELECT value FROM session_facts WHERE {mine}", self._session, name)
        return rows[0][0] if rows else None

    def _save_fact(self, name: str, value: bytes) -> bool:
        statement = "INSERT OR REPLACE INTO session_facts VALUES (?, ?, ?)"
        return self._write(statement, self._session, name, value)

    def _read(self, statement: str, *values: str | bytes | int) -> list[Any]:
        """Returns the rows of a query; none when it failed."""
        return self._run(statement, *values) or []

    def _write(self, statement: str, *values: str | bytes | int) -> bool:
        """Performs a write. Returns False where it failed."""
        return self._run(statement, *values) is not None

    def _run(self, statement: str, *values: str | bytes | int) -> list[Any] | None:
        if not self._is_open:
            return None
        try:
            rows = self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
            return None
        if self._is_file:
            self.trouble = None
        return rows

    def _failed(self, error: Exception) -> None:
        if self.trouble is None:
            self.trouble = f"{self.path}: {error}"
            logger.error("what is learned and set now will not outlive this: %s", self.trouble)
            self.on_trouble(self.trouble)


def learned_rows(path: Path) -> list[Plain]:
    """Returns what a file has learned in all sessions, for a reader beside the arbiter; empty where
    there is no such file, or it cannot be read."""
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCKED_S)
        try:
            return [json.loads(row[0]) for row in db.execute("SELECT value FROM learned_rows")]
        finally:
            db.close()
    except sqlite3.Error:
        return []


def kept_table(path: Path, session: str) -> Plain | None:
    """Returns the table that an arbiter of this session runs, for a reader beside it; None where
    there is no such file, or no table in it that this code can read."""
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=LOCKED_S)
        try:
            mine = "session = ? AND name = 'configuration'"
            statement = f"SELECT value FROM session_facts WHERE {mine}"
            row = db.execute(statement, (session,)).fetchone()
        finally:
            db.close()
    except sqlite3.Error:
        return None
    configuration = _configuration(row[0] if row else None)
    return None if configuration is None else configuration.table


def _configuration(fact: bytes | None) -> Configuration | None:
    code, _, blob = (fact or b"").partition(b"\n")
    if code != protocol_hash().encode():
        return None
    try:
        # Our own file, 0600: a process that can write it runs as us already.
        configuration: Configuration = pickle.loads(blob)
        return configuration
    except _STALE:
        return None


def _joined(parts: list[Any]) -> Any:
    """Returns all parts of an export of usage as one. They were saved one after the other, so a
    model may be in none of them or in two, and its last use may be later than the clock of the
    first part."""
    if not parts:
        return None
    whole, *others = parts
    for part in others:
        whole["exported_ns"] = max(whole["exported_ns"], part["exported_ns"])
        whole["hours"]["days"] += part["hours"]["days"]
        whole["reuse"]["models"] += part["reuse"]["models"]
        for name in ("rates", "lasting_rates", "followers"):
            whole[name] += part[name]
    if others:
        reuse = whole["reuse"]
        names = {(capability, model) for capability, model, *_ in reuse["models"]}
        reuse["recent"] = [name for name in reuse["recent"] if tuple(name) in names]
        reuse["clock"] = max([reuse["clock"], *(last for _, _, _, last, *_ in reuse["models"])])
    return whole


def _key(row: Plain) -> LearnedKey:
    return row["capability"], row["model"], row["settings_key"]


def _open(path: Path) -> sqlite3.Connection:
    """Opens the state file. Raises sqlite3.DatabaseError when it is not a sound database."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    path.chmod(0o600)
    db = sqlite3.connect(path, isolation_level=None, timeout=LOCKED_S)  # each statement commits
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
