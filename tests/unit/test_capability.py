"""What a replica lets out when its engine dies: an error where nothing useful was sent, the last
event of a stream where something was.
"""

import json
from collections.abc import AsyncGenerator
from types import TracebackType

import pytest

from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments import wire
from deployments.capability import Capability
from deployments.pace import Pace

JSON = wire.Head(200, {"content-type": "application/json"})
SSE = wire.Head(200, {"content-type": "text/event-stream; charset=utf-8"})
LOST = EngineLost("m", TicketId("t"))
CALL = wire.Call("/v1/thing", b"{}", {}, "req-1", "m")


class DyingEngine:
    """Sends a head and one piece, then is gone. Stands for a Residency and its Use."""

    ticket, predicted_s = TicketId("t"), 0.0

    def __init__(self, head: wire.Head) -> None:
        self.head = head

    def use(self, model: str, **how: object) -> "DyingEngine":
        return self

    async def __aenter__(self) -> "DyingEngine":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        return None

    async def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[wire.Head | bytes, None]:
        yield self.head
        yield b"data: 1\n\n"
        raise LOST


class Thing(Capability):
    paths = frozenset({"/v1/thing"})

    def __init__(self, head: wire.Head) -> None:
        self._pace = Pace()
        self._residency = DyingEngine(head)  # type: ignore[assignment]

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing was started."""


async def test_within_a_stream_the_error_is_the_last_event() -> None:
    head, first, last = [part async for part in Thing(SSE).handle(CALL)]
    assert (head, first) == (SSE, b"data: 1\n\n")
    assert isinstance(last, bytes)
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_lost"


async def test_within_anything_else_it_is_raised_for_the_front_to_try_again() -> None:
    got: list[wire.Part] = []
    with pytest.raises(EngineLost):
        async for part in Thing(JSON).handle(CALL):
            got.append(part)
    assert got == []


async def test_a_path_of_another_capability_is_named() -> None:
    other = wire.Call("/v1/other", b"{}", {}, "req-1", "m")
    [said] = [part async for part in Thing(JSON).handle(other)]
    assert isinstance(said, wire.Whole)
    assert said.head.status == 404
    assert b"/v1/thing" in said.body
