"""What a replica reads of the answers of an engine."""

from contextlib import aclosing

import pytest

from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments.messages import ResponseHead
from deployments.replica.engine_client import EngineLink
from tests.support.streaming_engine import StreamingEngine, serving


@pytest.mark.spec("J1")
async def test_half_an_event_of_an_engine_that_dies_is_not_read() -> None:
    """A client would read it as one with the error event that follows, which is no JSON."""
    engine = StreamingEngine(b"data: 1\n\ndata: {", b'"half', breaks=True)
    async with serving(engine) as path:
        link = EngineLink("m", TicketId("t"), path)
        async with aclosing(link.stream("POST", "/v1/x", {}, b"{}")) as parts:
            assert isinstance(await anext(parts), ResponseHead)
            engine.gates[0].set()
            assert await anext(parts) == b"data: 1\n\n"
            engine.gates[1].set()
            with pytest.raises(EngineLost):
                await anext(parts)
        link.cut()
        await link.closed()


@pytest.mark.spec("J1")
async def test_event_stream_that_ends_well_is_read_to_its_end() -> None:
    engine = StreamingEngine(b"data: 1\n\ndata: 2\n").let_all()
    async with serving(engine) as path:
        link = EngineLink("m", TicketId("t"), path)
        async with aclosing(link.stream("POST", "/v1/x", {}, b"{}")) as parts:
            pieces = [part async for part in parts if isinstance(part, bytes)]
        link.cut()
        await link.closed()
    assert b"".join(pieces) == b"data: 1\n\ndata: 2\n"
