"""The front's access to the arbiter: hand over the table, read the state, follow events.

The only module of the front that knows the form of the arbiter's state; the routes use the typed
rows below.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from arbiter.client.admin import call_arbiter, start_arbiter
from arbiter.errors import ArbiterUnavailable
from deployments.config import boot
from deployments.config.schema import Table, parse_table
from deployments.monitoring.view import ORDER

EVENT_WAIT_S = 15.0  # below the usual 30-60 s after which proxies cut a silent connection

STATE_WAIT_S = 5.0  # a restart of the arbiter takes 1-2 s; a probe must not hang for longer


AWAY_S = 1.0  # until a reader of events asks again where no arbiter answers


@dataclass(frozen=True, slots=True)
class TicketRow:
    """One ticket or lease."""

    ticket: str
    capability: str
    model: str
    state: str
    in_state_s: float
    host_bytes: int  # charged for its host copies, over all nodes
    lease_tenant: str | None  # None: no lease
    plain: Mapping[str, Any]  # as JSON

    @property
    def is_lease(self) -> bool:
        return self.lease_tenant is not None


@dataclass(frozen=True, slots=True)
class Presence:
    """Where one model is, at best, and when it could answer a request that comes now."""

    state: str  # of its ticket; `cold` without one, `unknown` while no arbiter answers
    estimate_s: float | None  # as loads took so far; None: no load of it was seen


AWAY = Presence("unknown", None)


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """What one model took of late. None: nothing was seen."""

    load_s: float | None = None
    run_s: float | None = None  # of an answered request, in the middle
    run_long_s: float | None = None  # of the longest of the newest ones


NEVER_SEEN = ModelTimes()


@dataclass(frozen=True, slots=True)
class ArbiterState:
    """What the routes read of the arbiter's state; `plain` is all of it, as JSON."""

    tickets: tuple[TicketRow, ...]
    load_failures: Mapping[str, str]  # capability to the cause of a load that failed lately
    floors: Mapping[tuple[str, str], str]  # of (capability, model)
    plain: Mapping[str, Any]

    @property
    def leases(self) -> Iterator[TicketRow]:
        """The leases of processes outside Serve. Node agents hold host copies by leases as well."""
        held = (row for row in self.tickets if row.is_lease)
        return (row for row in held if not row.plain["lease"].get("on_host"))

    def of_model(self, capability: str, model: str) -> list[TicketRow]:
        """The tickets of one model, without leases."""
        return [
            row
            for row in self.tickets
            if (row.capability, row.model) == (capability, model) and not row.is_lease
        ]

    def hours_of(self, capability: str, model: str) -> dict[str, Any] | None:
        """The hours of a model, and when they begin or end (C13); None: it has none."""
        for row in self.plain["hours"]:
            if (row["work"], row["capability"], row["model"]) == ("model", capability, model):
                return {name: row[name] for name in ("hours", "is_open", "left_s")}
        return None

    def times(self) -> dict[tuple[str, str], ModelTimes]:
        """Load times by (capability, model); a model that never loaded is not in it."""
        return {
            (row["capability"], row["model"]): ModelTimes(
                row["load_s"], row.get("run_s"), row.get("run_long_s")
            )
            for row in self.plain["load_times"]
        }

    def presences(self, homes: Mapping[str, str]) -> dict[str, Presence]:
        """Where each model of `homes` is; `homes` says its capability."""
        took = {(row["capability"], row["model"]): row for row in self.plain["load_times"]}
        predicted = {row["ticket"]: row["predicted_s"] for row in self.plain["queue"]}
        blocked = {
            (row["capability"], row["model"]): row["left_s"] for row in self.plain["cooldowns"]
        }
        for row in self.plain["hours"]:
            if row["work"] == "model" and not row["is_open"]:
                blocked[row["capability"], row["model"]] = row["left_s"]
        rows: dict[tuple[str, str], list[TicketRow]] = {}
        for row in self.tickets:
            if not row.is_lease and row.state != "reclaiming":
                rows.setdefault((row.capability, row.model), []).append(row)
        presences = {}
        for model, capability in homes.items():
            name = capability, model
            load_s: float | None = took[name]["load_s"] if name in took else None
            wake_s: float | None = took[name]["wake_s"] if name in took else None
            tickets = [
                Presence(row.state, _left_s(row, load_s, wake_s, predicted.get(row.ticket)))
                for row in rows.get(name, ())
            ]
            cold_s = None if load_s is None else load_s + blocked.get(name, 0.0)
            presences[model] = min(tickets, key=soonest, default=Presence("cold", cold_s))
        return presences


def soonest(presence: Presence) -> float:
    return math.inf if presence.estimate_s is None else presence.estimate_s


def _left_s(
    row: TicketRow, load_s: float | None, wake_s: float | None, predicted_s: float | None
) -> float | None:
    """Seconds until a ticket serves. A ticket that drains leaves, and its model is loaded again."""
    match row.state:
        case "resident":
            return 0.0
        case "loading" if load_s is not None:  # or it wakes, which takes less
            return max(0.0, load_s - row.in_state_s)
        case "asleep" if wake_s is not None:
            return wake_s
        case "queued" if predicted_s is not None:
            return predicted_s
    return load_s


def typed(plain: Mapping[str, Any]) -> ArbiterState:
    failures = {row["capability"]: row["cause"] for row in reversed(plain["cooldowns"])}
    floors = {(row["capability"], row["model"]): row["floor"] for row in plain["floors"]}
    return ArbiterState(tuple(_row(row) for row in plain["tickets"]), failures, floors, plain)


def _row(row: Mapping[str, Any]) -> TicketRow:
    charged: Mapping[str, int] = row["charged_bytes"]
    lease = row["lease"]
    copies = (  # a node's host device carries its engine's private RAM as well
        max(0, size - row["ram_bytes"])
        for device, size in charged.items()
        if device.endswith("/host")
    )
    return TicketRow(
        row["ticket"],
        row["capability"],
        row["model"],
        row["state"],
        row["in_state_s"],
        sum(copies),
        lease["tenant"] if lease else None,
        row,
    )


async def configure(table: Table) -> Table:
    """Starts the arbiter if there is none. Takes all of the table or nothing. Returns it with the
    tasks that the arbiter keeps: those of the file, unless they were changed since the file said
    something else (J5)."""
    await start_arbiter(boot.boot(table))
    await call_arbiter("configure", boot.configuration(table))
    stored = await call_arbiter("table")
    return parse_table(boot.as_plain(table) | {"tasks": stored.get("tasks", {})}, "the tasks kept")


async def state(within_s: float = STATE_WAIT_S) -> ArbiterState:
    """Raises ArbiterUnavailable."""
    return typed(await call_arbiter("state", within_s=within_s))


async def readiness(table: Table, failures: Mapping[str, str]) -> dict[str, Any]:
    """Per capability: ready, loading, scaled_to_zero, or failed with the cause (J9). `failures`:
    capability to what Serve says of its application. Raises ArbiterUnavailable."""
    now = await state()
    return {
        name: _readiness(name, now, failures.get(name, "")) for name in sorted(table.capabilities)
    }


async def nodes() -> dict[str, Any]:
    """Each node: `ready` once its zygote has imported what engines need and a spare worker is at
    hand, `starting` before, `failed` with the cause. Raises ArbiterUnavailable."""
    nodes: dict[str, Any] = await call_arbiter("nodes", within_s=STATE_WAIT_S)
    return nodes


def _readiness(capability: str, now: ArbiterState, serve_failure: str) -> dict[str, Any]:
    rows = [row for row in now.tickets if row.capability == capability]
    states: dict[str, str] = {}  # of a model the best, where an old ticket of it still leaves
    for row in rows:
        states[row.model] = min(states.get(row.model, row.state), row.state, key=ORDER.index)
    load_failure = now.load_failures.get(capability, "")
    cause = serve_failure or load_failure
    word = _word({row.state for row in rows}, has_failed=bool(load_failure))
    if serve_failure and word != "ready":
        word = "failed"
    return {"state": word, "models": states} | ({"cause": cause} if cause else {})


def _word(states: set[str], *, has_failed: bool) -> str:
    if states & {"resident", "draining"}:
        return "ready"
    if states & {"queued", "loading"}:
        return "loading"
    if "asleep" in states:
        return "ready"
    return "failed" if has_failed else "scaled_to_zero"


async def explain(ticket: str) -> dict[str, Any]:
    """Raises UnknownTicket, ArbiterUnavailable."""
    answer: dict[str, Any] = await call_arbiter("explain", ticket, within_s=STATE_WAIT_S)
    return answer


async def recent_events(after: int) -> list[dict[str, Any]]:
    """The ring's events with a number above `after`, oldest first; does not wait."""
    events: list[dict[str, Any]] = await call_arbiter("events", after, 0.0)
    return events


async def next_events(after: int, wait_s: float) -> list[dict[str, Any]]:
    """Events with a number above `after`, oldest first; waits at most `wait_s` for one. Raises
    ArbiterUnavailable."""
    events: list[dict[str, Any]] = await call_arbiter(
        "events", after, wait_s, within_s=wait_s + STATE_WAIT_S
    )
    return events


async def event_stream(after: int) -> AsyncGenerator[bytes, None]:
    """SSE, one event a line; a comment when nothing happened or no arbiter answers, so that the
    connection lives."""
    while True:
        try:
            batch = await call_arbiter("events", after, EVENT_WAIT_S)
        except ArbiterUnavailable as error:
            yield f": {error}\n\n".encode()
            await asyncio.sleep(AWAY_S)
            continue
        if not batch:
            yield b": nothing happened\n\n"
        for event in batch:
            after = event["seq"]
            data = json.dumps(event)
            yield f"id: {after}\nevent: {event['kind']}\ndata: {data}\n\n".encode()
        await asyncio.sleep(0)  # a full ring must not starve this replica's requests
