"""A use that lasts until its client hangs up: POST /v1/acquire, for several calls of which no other
model takes the place in between (A7)."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from deployments.messages import ACQUIRE_S, ResponseHead
from deployments.replica.calls.wait_progress import LOOK_S
from deployments.replica.use import Use

COMMENT_EVERY_S = (
    15.0  # between two comments: below the usual 30-60 s after which proxies cut a connection
)
HEAD = ResponseHead(200, {"content-type": "text/event-stream", "cache-control": "no-store"})


async def events(use: Use, body: bytes) -> AsyncGenerator[ResponseHead | bytes, None]:
    """Yields an event that says the ticket, then comments, then an event with the reason of the
    end. Ends when the term is over, or the engine is. A barrier does not end it, and drops (A9)."""
    term_s = float(json.loads(body).get("term_s", ACQUIRE_S))
    use.exclude_from_run_times()
    end_s = said_s = time.monotonic()
    end_s += term_s
    yield HEAD
    yield _event(use, state="held", term_s=term_s)
    while use.is_open and (now_s := time.monotonic()) < end_s:
        await asyncio.sleep(min(LOOK_S, end_s - now_s))
        if now_s - said_s > COMMENT_EVERY_S:
            said_s = now_s
            yield b": held\n\n"
    reason = "term" if use.is_open else "engine_lost"
    yield _event(use, state="ended", reason=reason)


def _event(use: Use, **fields: Any) -> bytes:
    event = {"object": "acquired", "ticket": use.ticket, "model": use.model, **fields}
    return b"data: " + json.dumps(event).encode() + b"\n\n"
