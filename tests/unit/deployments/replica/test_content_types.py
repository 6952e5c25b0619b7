"""A replica passes any content type on, as a stream where the engine declares no length."""

from collections.abc import AsyncGenerator
from types import TracebackType

import pytest

from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments import messages
from deployments.replica.calls.stream_batching import StreamBatching
from deployments.replica.capability import Capability

AUDIO = messages.ResponseHead(200, {"content-type": "audio/wav"}, is_chunked=True)
IMAGE = messages.ResponseHead(200, {"content-type": "image/png"})
CALL = messages.InferenceCall("/v1/anything", b"--b", {}, "req-1", "m")


class Engine:
    """Stands for a Residency, its Use and the engine behind it."""

    ticket, predicted_s = TicketId("t"), 0.0

    def __init__(self, *parts: messages.ResponseHead | bytes | EngineLost) -> None:
        self.parts, self.slots = parts, {"m": None}

    def use(self, model: str, **how: object) -> "Engine":
        return self

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        return None

    async def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[messages.ResponseHead | bytes, None]:
        for part in self.parts:
            if isinstance(part, EngineLost):
                raise part
            yield part


class Plain(Capability):
    """Lists no paths: the table does."""

    def __init__(self, engine: Engine) -> None:
        self._stream_batching = StreamBatching()
        self._residency = engine  # type: ignore[assignment]

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing was started."""


async def test_bytes_without_a_declared_length_are_a_stream_of_their_type() -> None:
    engine = Engine(AUDIO, b"RIFF", b"\x00\xff")
    head, *rest = [part async for part in Plain(engine).handle(CALL)]
    assert head == AUDIO
    assert b"".join(part for part in rest if isinstance(part, bytes)) == b"RIFF\x00\xff"


async def test_bytes_of_a_declared_length_are_one_message() -> None:
    parts = [part async for part in Plain(Engine(IMAGE, b"\x89PNG", b"...")).handle(CALL)]
    assert parts == [messages.FullResponse(IMAGE, b"\x89PNG...")]


async def test_stream_of_bytes_that_breaks_gets_no_event() -> None:
    lost = EngineLost("m", TicketId("t"))
    got: list[messages.Part] = []
    with pytest.raises(EngineLost):
        async for part in Plain(Engine(AUDIO, b"RIFF", lost)).handle(CALL):
            got.append(part)
    assert got == [AUDIO, b"RIFF"]
