"""The body of an event stream on a connection of its own, over a real socket."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments import messages
from deployments.engines import side_streams
from deployments.engines.side_streams import SideStream
from deployments.front.sockets import side_stream
from deployments.replica.engine_client import EngineLink
from tests.support.streaming_engine import StreamingEngine, serving

pytestmark = pytest.mark.spec("N1")
WORD = {messages.SIDE_STREAM: "w"}
Parts = AsyncGenerator[messages.ResponseHead | bytes, None]


@asynccontextmanager
async def asked(engine: StreamingEngine) -> AsyncIterator[Parts]:
    """The answer as the replica has it."""
    async with serving(engine) as path:
        link = EngineLink("m", TicketId("t"), path)
        async with aclosing(link.stream("POST", "/v1/x", WORD, b"{}")) as parts:
            yield parts
        link.cut()
        await link.closed()


async def place_of(parts: Parts) -> str:
    head = await anext(parts)
    assert isinstance(head, messages.ResponseHead)
    return head.headers[messages.SIDE_STREAM]


async def test_pieces_come_to_the_reader_and_the_end_to_both() -> None:
    engine = StreamingEngine(b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n").let_all()
    async with asked(engine) as parts:
        place = await place_of(parts)
        assert b"".join([p async for p in side_stream.read(place)]).count(b"data:") == 3
        assert [part async for part in parts] == []


async def test_answer_that_is_no_event_stream_comes_to_the_one_who_asked() -> None:
    async with asked(StreamingEngine(b'{"error": 1}', status=400).let_all()) as parts:
        head, *rest = [part async for part in parts]
        assert isinstance(head, messages.ResponseHead)
        assert (head.status, rest) == (400, [b'{"error": 1}'])
        assert messages.SIDE_STREAM not in head.headers


async def test_closing_the_asking_connection_ends_the_work_and_the_side_stream() -> None:
    engine = StreamingEngine(b"data: 1\n\n", b"data: 2\n\n")
    async with asked(engine) as parts:
        pieces = side_stream.read(await place_of(parts))
        engine.gates[0].set()
        assert await anext(pieces) == b"data: 1\n\n"
        await parts.aclose()
        with pytest.raises(side_stream.SideStreamLost):
            await anext(pieces)
        await asyncio.wait_for(engine.left.wait(), 60)


async def test_application_that_breaks_is_a_lost_engine_to_both() -> None:
    engine = StreamingEngine(b"data: 1\n\n", breaks=True).let_all()
    async with asked(engine) as parts:
        place = await place_of(parts)
        with pytest.raises(side_stream.SideStreamLost):
            async for _ in side_stream.read(place):
                pass
        with pytest.raises(EngineLost):
            await anext(parts)


@pytest.mark.parametrize("sizes", [[9], [1 << 20, 9]], ids=["held", "more_than_is_held"])
async def test_stream_that_nothing_reads_is_broken(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(side_streams, "TAKEN_WITHIN_S", 0.0)
    async with asked(StreamingEngine(*[b"x" * size for size in sizes]).let_all()) as parts:
        await place_of(parts)
        with pytest.raises(EngineLost):
            await anext(parts)


async def test_word_counts_once_and_another_finds_nothing() -> None:
    async with asked(StreamingEngine(b"data: 1\n\n").let_all()) as parts:
        place = await place_of(parts)
        with pytest.raises(side_stream.SideStreamLost):
            await anext(side_stream.read(place + "x"))
        assert [piece async for piece in side_stream.read(place)] == [b"data: 1\n\n"]
        with pytest.raises(side_stream.SideStreamLost):
            await anext(side_stream.read(place))


async def test_request_is_in_flight_until_its_last_piece_was_taken() -> None:
    piece = b"x" * (1 << 20)  # more than a socket holds
    async with asked(StreamingEngine(*[piece] * 4).let_all()) as parts:
        pieces = side_stream.read(await place_of(parts))
        first = await anext(pieces)
        end = asyncio.ensure_future(anext(parts, None))
        await asyncio.sleep(0)
        assert not end.done()
        rest = sum([len(p) async for p in pieces])
        assert len(first) + rest == 4 * len(piece)
        assert await end is None


@pytest.mark.parametrize("is_ended", [False, True])
async def test_stream_whose_reader_takes_nothing_is_broken_and_leaves_its_engine(
    is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine still makes pieces, and once it has made the last."""
    monkeypatch.setattr(side_streams, "UNREAD_S", 0.05)
    count = 1 if is_ended else 8  # the processes on the way hold a part of them
    events = (b"x" * (62 << 10) + b"\n\n") * 128
    engine = StreamingEngine(*[events] * count).let_all()
    async with asyncio.timeout(60), asked(engine) as parts:
        pieces = side_stream.read(await place_of(parts))
        await anext(pieces)  # and no more
        with pytest.raises(EngineLost):
            await anext(parts)
        await pieces.aclose()


async def test_end_that_no_reader_takes_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's `send` waits first for what is in the socket's buffer."""
    monkeypatch.setattr(side_streams, "UNREAD_S", 0.05)

    async def send(message: Any) -> None:
        if not message.get("more_body"):
            await asyncio.Event().wait()

    stream = SideStream()
    carrying = asyncio.ensure_future(stream.carry(send))
    await stream.put(b"data: 1\n\n")
    stream.end(is_whole=True)
    async with asyncio.timeout(60):
        with pytest.raises(side_streams.SideStreamBroken):
            await carrying
    assert stream.carried.is_set() and stream.is_broken


class Sent:
    """The `send` of the reader's connection."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, message: Any) -> None:
        self.bodies.append(message["body"])


async def test_pieces_after_the_first_two_are_joined_and_the_end_waits_for_nothing() -> None:
    stream, sent = SideStream(), Sent()
    carrying = asyncio.ensure_future(stream.carry(sent))
    for piece in (b"1", b"2"):
        await stream.put(piece)
        while sent.bodies[-1:] != [piece]:
            await asyncio.sleep(0)
    for piece in (b"3", b"4", b"5"):
        await stream.put(piece)
        await asyncio.sleep(0)
    assert sent.bodies == [b"1", b"2"]  # the three wait for their time
    stream.end(is_whole=True)
    await carrying
    assert sent.bodies == [b"1", b"2", b"345", b""]


async def test_piece_that_is_due_goes_out_within_the_task_that_made_it() -> None:
    stream, sent = SideStream(), Sent()
    carrying = asyncio.ensure_future(stream.carry(sent))
    await asyncio.sleep(0)
    await stream.put(b"1")
    assert sent.bodies == [b"1"]
    stream.end(is_whole=True)
    await carrying


async def test_what_comes_while_a_piece_waits_for_the_socket_follows_it() -> None:
    stream, sent, may_send = SideStream(), Sent(), asyncio.Event()

    async def slow(message: Any) -> None:
        await may_send.wait()
        await sent(message)

    await stream.put(b"1")
    carrying = asyncio.ensure_future(stream.carry(slow))
    await asyncio.sleep(0)
    await stream.put(b"2")
    stream.end(is_whole=True)
    may_send.set()
    await carrying
    assert sent.bodies == [b"1", b"2", b""]
