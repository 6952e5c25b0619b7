"""The front's window on the arbiter: hand over the table, read state, follow events."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from arbiter.client.admin import call_arbiter, start_arbiter
from deployments.config import boot
from deployments.config.schema import Table

EVENT_WAIT_S = 15.0  # below the usual 30-60 s after which proxies cut a silent connection

EVENT_NUMBER = re.compile(r"[0-9]{1,18}")  # a million events a second for 30,000 years
STATE_WAIT_S = 5.0  # a restart of the arbiter takes 1-2 s; a probe must not hang for longer


async def configure(table: Table) -> None:
    """Starts the arbiter if there is none; all or nothing."""
    await start_arbiter(boot.boot(table))
    await call_arbiter("configure", boot.configuration(table))


async def state() -> dict[str, Any]:
    """Raises ArbiterUnavailable."""
    answer: dict[str, Any] = await call_arbiter("state", within_s=STATE_WAIT_S)
    return answer


async def readiness(table: Table) -> dict[str, Any]:
    """Per capability: ready, loading, scaled_to_zero, or failed with the cause (J9)."""
    now = await state()
    return {name: _readiness(name, now) for name in sorted(table.capabilities)}


def _readiness(capability: str, now: dict[str, Any]) -> dict[str, Any]:
    tickets = [t for t in now["tickets"] if t["capability"] == capability]
    states = {t["model"]: t["state"] for t in tickets}
    failures = [c for c in now["cooldowns"] if c["capability"] == capability]
    return {"state": _word(set(states.values()), failures), "models": states} | (
        {"cause": failures[0]["cause"]} if failures else {}
    )


def _word(states: set[str], failures: list[dict[str, Any]]) -> str:
    if states & {"resident", "draining"}:
        return "ready"
    if states & {"queued", "loading"}:
        return "loading"
    if "asleep" in states:
        return "ready"
    return "failed" if failures else "scaled_to_zero"


async def explain(ticket: str) -> dict[str, Any]:
    """Raises UnknownTicket."""
    answer: dict[str, Any] = await call_arbiter("explain", ticket, within_s=STATE_WAIT_S)
    return answer


async def recent_events(after: int) -> list[dict[str, Any]]:
    """What the ring holds behind `after`, oldest first; does not wait."""
    found: list[dict[str, Any]] = await call_arbiter("events", after, 0.0)
    return found


def event_number(text: str, otherwise: int) -> int:
    """From a `Last-Event-ID`, which a client may fill with anything."""
    return int(text) if EVENT_NUMBER.fullmatch(text) else otherwise


async def event_stream(after: int) -> AsyncIterator[bytes]:
    """SSE, one event a line; a comment when nothing happened, so that the connection lives."""
    while True:
        batch = await call_arbiter("events", after, EVENT_WAIT_S)
        if not batch:
            yield b": nothing happened\n\n"
        for event in batch:
            after = event["seq"]
            data = json.dumps(event)
            yield f"id: {after}\nevent: {event['kind']}\ndata: {data}\n\n".encode()
        await asyncio.sleep(0)  # a full ring must not starve this replica's requests
