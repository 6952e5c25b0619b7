"""An epoch of the arbiter as JSON lines: what the core was made with, then every event it was given
and when. Opt-in (`arbiter record FILE`); it holds names, bytes and times, never a prompt.

Each line carries a hash over all decisions before it, so that a replay can say whether the core
still decides what it decided, and where it began to differ. A file holds several epochs when the
arbiter restarted; each begins with its own heading.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from arbiter.core import events as ev
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import Decision
from arbiter.core.settings import Settings
from arbiter.core.view import Policies
from arbiter.errors import ArbiterError, RequestError, error_fields
from arbiter.protocol.json_codec import from_json, to_json
from arbiter.protocol.messages import protocol_hash
from arbiter.units import Epoch, HolderId, Instant

logger = logging.getLogger("arbiter")

FILE_MOST_BYTES = 256 << 20  # about a million events, a day of ten busy replicas; then it ends
EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(ev.Event)}


@error_fields
class RecordingUnreadable(ArbiterError):
    """Says that a file is not a recording, or one of other code."""

    path: str
    line_count: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line_count}: {self.why}"


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """Holds what a core is made with, apart from its policies, which the settings name."""

    protocol: str
    settings: Settings
    epoch: Epoch
    known_holders: tuple[HolderId, ...]
    learned: Any  # as the core exported it; None: nothing yet
    began: Instant
    floors: Any = None  # as the core is given them; None: none set
    accounts: Any = None  # as the core exported them; None: no client has used anything
    usage: Any = None  # as the core exported it; None: no model was used
    removed_s: Any = None  # how long ago each tenant was removed; None: none was
    removed_models: Any = None  # as the core exported them; None: none was removed
    removing: Any = None  # models that were removed and are still held; None: none is
    asked: Any = None  # models that are to load without a request; None: none is

    def core(self, policies: Policies) -> Arbiter:
        holders = frozenset(self.known_holders)
        core = Arbiter(self.settings, policies, self.epoch, holders, self.began)
        restored = (
            (core.restore_learned, self.learned),
            (core.restore_floors, self.floors),
            (core.restore_accounts, self.accounts),
            (core.restore_usage, self.usage),
            (core.restore_removed, self.removed_s),
            (core.restore_removed_models, self.removed_models),  # after usage
            (core.restore_removing, self.removing),
            (core.restore_asked, self.asked),
        )
        for restore, kept in restored:
            if kept:
                restore(kept)
        return core


@dataclass(frozen=True, slots=True)
class Recorded:
    """Holds one event; `so_far` hashes the decisions of all events before it in this epoch."""

    at: Instant
    event: ev.Event
    so_far: str


@dataclass(frozen=True, slots=True)
class RecordedEpoch:
    heading: RecordingHeader
    events: tuple[Recorded, ...]


class DecisionHash:
    """Keeps the running hash over decisions."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=6)

    def add(self, decisions: list[Decision]) -> None:
        self._hash.update(repr(decisions).encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()


# -- writing --------------------------------------------------------------------------------------


class Recorder:
    """Appends; a full disk or a full file ends the recording, not the arbiter. Raises OSError where
    the heading cannot be written."""

    def __init__(self, path: Path, heading: RecordingHeader) -> None:
        self._sum = DecisionHash()
        self._left_bytes = FILE_MOST_BYTES - (path.stat().st_size if path.exists() else 0)
        opened = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._file = os.fdopen(opened, "a", buffering=1)  # by line: a kill loses at most one
        try:
            self._write({"heading": to_json(heading)})
        except OSError:
            self.close()
            raise

    def event(self, event: ev.Event, at: Instant) -> None:
        """Writes an event before the core sees it, so that an event which breaks the core is in
        the file."""
        if self._file.closed:
            return
        line = {"at": at, "kind": type(event).__name__, "so_far": str(self._sum)}
        try:
            self._write(line | {"event": to_json(event)})
        except OSError as error:
            logger.error("the recording ends here: %s", error)
            self.close()

    def decided(self, decisions: list[Decision]) -> None:
        self._sum.add(decisions)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that could not be written, tried once more
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        """Appends a line. Raises OSError."""
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._left_bytes -= len(text)
        self._file.write(text)
        if self._left_bytes < 0:
            logger.warning("the recording is full and ends here")
            self.close()


# -- reading --------------------------------------------------------------------------------------


def read(path: Path) -> list[RecordedEpoch]:
    """Returns every epoch in a file, oldest first, without a last line that was cut off by a kill.
    Raises RecordingUnreadable."""
    epochs: list[tuple[RecordingHeader, list[Recorded]]] = []
    count = 0
    try:
        with path.open() as file:
            for text in file:
                count += 1
                if text.endswith("\n"):
                    _take(epochs, json.loads(text))
    except (OSError, TypeError, ValueError, KeyError, IndexError) as error:
        raise RecordingUnreadable(str(path), count, f"not a recording: {error}") from error
    if not epochs:
        raise RecordingUnreadable(str(path), 0, "it is empty")
    return [RecordedEpoch(heading, tuple(events)) for heading, events in epochs]


def _take(epochs: list[tuple[RecordingHeader, list[Recorded]]], line: dict[str, Any]) -> None:
    if "heading" in line:
        epochs.append((_heading(line["heading"]), []))
    else:
        epochs[-1][1].append(_recorded(line))


def _heading(plain: dict[str, Any]) -> RecordingHeader:
    if plain["protocol"] != protocol_hash():
        raise ValueError(f"recorded by other code ({plain['protocol']}, this is {protocol_hash()})")
    heading: RecordingHeader = from_json(RecordingHeader, plain)
    return heading


def _recorded(line: dict[str, Any]) -> Recorded:
    event: ev.Event = from_json(EVENTS[line["kind"]], line["event"])
    return Recorded(Instant(line["at"]), event, line["so_far"])


# -- again ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """Holds an event that was given to a core again, with what that core decided."""

    at: Instant
    event: ev.Event
    decisions: list[Decision]
    is_same: bool  # everything before it was decided as recorded


def replay(epoch: RecordedEpoch, policies: Policies) -> Iterator[Step]:
    """Gives the same events to a new core, at the same instants."""
    core, decided = epoch.heading.core(policies), DecisionHash()
    for recorded in epoch.events:
        is_same = str(decided) == recorded.so_far
        try:
            decisions = core.handle(recorded.event, recorded.at)
        except RequestError:  # refused then as well: the event was recorded before it was refused
            decisions = []
        else:
            decided.add(decisions)
        yield Step(recorded.at, recorded.event, decisions, is_same)
