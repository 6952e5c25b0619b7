"""Viewing: what all open consoles see, by one subscription at the arbiter (K4).

    async for message in viewing.follow(facts, after): ...   # one per viewer, each a dict for JSON

While a viewer is there, one task waits for the arbiter's next events and reads its state after
them. While memory moves or requests run it also reads each second, because measured bytes and
counts change without an event; at rest it asks once in `REST_S`. Without a viewer it asks nothing.
Each viewer is sent what has changed since its last message, however slowly it reads.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from arbiter.errors import ArbiterUnavailable
from deployments.front.status import arbiter_gateway
from deployments.monitoring.story import event_row
from deployments.monitoring.view import Facts, View, to_plain, view_of

REST_S = 15.0  # the arbiter's own bound of a wait for events
BUSY_S = 1.0  # K4: visible within a second
PAUSE_S = 0.25  # between two reads of the state, so that a burst of events costs four a second
QUIET_S = 10.0  # below the 30-60 s after which proxies cut a silent connection
AWAY_S = 0.5  # between two tries while no arbiter answers; a restart takes 1-2 s
FACTS_S = 5.0  # counting 10,000 adapters takes a listing of their folder
KEPT_EVENTS, KEPT_SAMPLES = 1_000, 900  # a quarter of an hour of changes each second
LONGEST_S = 600.0  # then the viewer comes again, with a key that still counts

FactsOf = Callable[[], Awaitable[Facts]]
State = Callable[[], Awaitable[Any]]
Events = Callable[[int, float], Awaitable[list[dict[str, Any]]]]


async def read_state() -> Any:
    """Raises ArbiterUnavailable."""
    return (await arbiter_gateway.state()).plain


async def read_events(after: int, wait_s: float) -> list[dict[str, Any]]:
    """Raises ArbiterUnavailable."""
    return await arbiter_gateway.next_events(after, wait_s)


@dataclass(slots=True)
class ViewerState:
    """What one viewer has."""

    event: int  # the newest
    sample_unix_s: float = 0.0
    sections: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    away_unix_s: float | None = math.nan  # it is told first whether the arbiter is away


class Viewing:
    """One per front, on its event loop."""

    def __init__(
        self,
        state: State = read_state,
        events: Events = read_events,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state, self._next_events, self._clock = state, events, clock
        self._viewers_count = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._newest: Any = None  # the state of which `_view` was made
        self._view: dict[str, Any] | None = None
        self._models: dict[str, Any] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self._samples: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._seen = 0
        self._is_busy = True
        self._is_first = True  # since a viewer came: what was before is not known
        self._away_unix_s: float | None = None
        self._facts, self._facts_unix_s = Facts(), 0.0

    @property
    def viewers_count(self) -> int:
        return self._viewers_count

    async def read(self, facts_of: FactsOf) -> View:
        """The view as of now, for a client that looks once. Raises ArbiterUnavailable."""
        state = await self._state()
        return view_of(state, await facts_of(), self._clock())

    async def state(self) -> Any:
        """What the viewers' subscription last read; without a viewer as of now. Raises
        ArbiterUnavailable."""
        is_followed = self._viewers_count and self._view is not None
        return self._newest if is_followed else await self._state()

    async def follow(self, facts_of: FactsOf, after: int) -> AsyncIterator[dict[str, Any]]:
        """First all, with events behind `after`, then what changes; an empty message now and then
        while nothing does."""
        sent, ends = ViewerState(after), self._clock() + LONGEST_S
        self._enter(facts_of)
        try:
            while self._clock() < ends:
                changed = self._changed
                if message := self._message(sent):
                    yield message
                if not await _within(changed, QUIET_S):
                    yield {}
                if self._task is not None and self._task.done():
                    self._task.result()  # raises what ended it; the next viewer starts another
        finally:
            self._leave()

    # -- the one subscription ------------------------------------------------------------------

    def _enter(self, facts_of: FactsOf) -> None:
        self._viewers_count += 1
        if self._task is None or self._task.done():
            self._view, self._is_first = None, True  # what is known is of another time
            self._away_unix_s = None
            self._task = asyncio.ensure_future(self._watch(facts_of))

    def _leave(self) -> None:
        self._viewers_count -= 1
        if self._viewers_count == 0 and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _watch(self, facts_of: FactsOf) -> None:
        try:
            await self._watch_on(facts_of)
        finally:
            self._announce()  # also that it has ended

    async def _watch_on(self, facts_of: FactsOf) -> None:
        wait_s = 0.0  # what has happened while no viewer was there
        while True:
            try:
                events = await self._next_events(self._seen, wait_s)
                await self._take(events, facts_of)
                self._away_unix_s = None
                wait_s, pause_s = BUSY_S if self._is_busy else REST_S, PAUSE_S
            except ArbiterUnavailable:
                self._away_unix_s = self._away_unix_s or self._clock()
                wait_s, pause_s = 0.0, AWAY_S
            self._announce()
            await asyncio.sleep(pause_s)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _take(self, events: list[dict[str, Any]], facts_of: FactsOf) -> None:
        state, now = await self._state(), self._clock()
        if now - self._facts_unix_s > FACTS_S:
            self._facts, self._facts_unix_s = await facts_of(), now
        self._newest, view = state, view_of(state, self._facts, now)
        for event in events[-KEPT_EVENTS:]:
            self._events.append(msgspec.to_builtins(event_row(event)))
        self._seen = events[-1]["seq"] if events else self._seen
        self._view = to_plain(view)
        self._models = {f"{m['capability']}/{m['model']}": m for m in self._view.pop("models")}
        self._is_busy = is_busy(view)
        sample = sample_of(view) | {"is_first": self._is_first}
        if self._is_first or self._samples[-1]["devices"] != sample["devices"]:
            self._samples.append(sample)
        self._is_first = False

    # -- one viewer ----------------------------------------------------------------------------

    def _message(self, sent: ViewerState) -> dict[str, Any]:
        """What this viewer lacks; empty: nothing."""
        message: dict[str, Any] = {}
        if sent.away_unix_s != self._away_unix_s:
            message["away_unix_s"] = sent.away_unix_s = self._away_unix_s
        if self._view is None:
            return message
        message |= self._changes(sent)
        if events := [event for event in self._events if event["seq"] > sent.event]:
            message["events"], sent.event = events, events[-1]["seq"]
        samples = [row for row in self._samples if row["unix_s"] > sent.sample_unix_s]
        if samples:
            message["samples"], sent.sample_unix_s = samples, samples[-1]["unix_s"]
        return message

    def _changes(self, sent: ViewerState) -> dict[str, Any]:
        assert self._view is not None
        before, now = sent.sections, self._view
        passes = {"at_unix_s", "sequence"}  # of no interest by themselves
        sections = {name: value for name, value in now.items() if before.get(name) != value}
        models = [row for name, row in self._models.items() if sent.models.get(name) != row]
        gone = [name for name in sent.models if name not in self._models]
        sent.sections, sent.models = now, self._models
        changes: dict[str, Any] = {}
        if sections.keys() - passes or models or gone:
            changes["view"] = sections
        if models:
            changes["models"] = models
        if gone:
            changes["gone"] = gone
        return changes


def is_busy(view: View) -> bool:
    """True while bytes or counts change without an event of their own."""
    moves = {"queued", "loading", "draining", "reclaiming"}
    runs = any(row.state in ("in_progress", "finalizing") for row in view.jobs)
    moved = any(row.inflight or row.state in moves for row in view.models)
    return bool(view.queue) or runs or moved


def sample_of(view: View) -> dict[str, Any]:
    """One moment of the picture over time: per device the size and the tickets of each part, what
    is measured of all that is there, and the budget."""
    devices = {}
    for row in view.devices:
        sizes: dict[str, tuple[int, str]] = {}
        for part in row.parts:
            name = f"{part.kind}/{part.label}"
            size, tickets = sizes.get(name, (0, ""))
            sizes[name] = size + part.size_bytes, f"{tickets} {part.ticket}".strip()
        measured = row.measured_bytes + row.foreign_bytes
        devices[row.device] = {"parts": sizes, "measured": measured, "budget": row.budget_bytes}
    return {"unix_s": view.at_unix_s, "devices": devices}


async def _within(event: asyncio.Event, wait_s: float) -> bool:
    """Whether it was set in time."""
    try:
        async with asyncio.timeout(wait_s):
            return await event.wait()
    except TimeoutError:
        return False
