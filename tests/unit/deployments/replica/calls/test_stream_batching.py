"""Streams are joined into fewer pieces under load, never changed."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments.messages import ResponseHead
from deployments.replica.calls.stream_batching import Part, StreamBatching

HEAD = ResponseHead(200, {})


class Pipe:
    """What arrived since it was last asked, as one piece: like a socket's buffer."""

    def __init__(self) -> None:
        self.buffer, self.ended = b"", False
        self.came = asyncio.Event()

    def put(self, data: bytes) -> None:
        self.buffer += data
        self.came.set()

    def end(self) -> None:
        self.ended = True
        self.came.set()

    async def parts(self) -> AsyncGenerator[Part, None]:
        yield HEAD
        while True:
            await self.came.wait()
            if self.buffer:
                piece, self.buffer = self.buffer, b""
                if not self.ended:
                    self.came.clear()
                yield piece
            elif self.ended:
                return


async def test_batched_stream_delivers_every_byte_once_and_in_order() -> None:
    pipe = Pipe()
    got: list[Part] = []

    async def read() -> None:
        async for part in StreamBatching(chunks_per_s=1_000).follow(pipe.parts()):
            got.append(part)

    reading = asyncio.ensure_future(read())
    for number in range(200):
        pipe.put(b"%d," % number)
        await asyncio.sleep(0)
    pipe.end()
    await reading
    assert got[0] == HEAD
    joined = b"".join(p for p in got if isinstance(p, bytes))
    assert joined == b"".join(b"%d," % number for number in range(200))


async def begun(pace: StreamBatching, pipe: Pipe) -> AsyncGenerator[Part, None]:
    """A stream whose first pieces went out."""
    stream = pace.follow(pipe.parts())
    assert await anext(stream) == HEAD
    for piece in (b"role", b"first"):
        pipe.put(piece)
        assert await anext(stream) == piece
    return stream


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_chunks_that_arrive_before_the_next_send_go_out_as_one() -> None:
    pipe = Pipe()
    stream = await begun(StreamBatching(chunks_per_s=50), pipe)
    following = asyncio.ensure_future(anext(stream))
    for _ in range(10):
        pipe.put(b"b")
        await asyncio.sleep(0)
    assert not following.done()
    assert await following == b"b" * 10


FOR_EVER = 1e12  # times the microseconds between two pieces here


async def test_chunk_waits_for_the_next_of_its_stream_when_there_are_several_streams() -> None:
    pace, pipes = StreamBatching(chunks_per_s=1e9, patience=FOR_EVER), [Pipe(), Pipe()]
    stream, _ = [await begun(pace, pipe) for pipe in pipes]
    following = asyncio.ensure_future(anext(stream))
    pipes[0].put(b"one,")
    await settled()
    assert not following.done()
    pipes[0].put(b"two,")
    assert await asyncio.wait_for(following, 60) == b"one,two,"


@pytest.mark.parametrize("patience", [0.0, FOR_EVER])
async def test_late_and_last_chunks_are_sent_without_waiting(patience: float) -> None:
    pace, pipes = StreamBatching(chunks_per_s=1e9, patience=patience), [Pipe(), Pipe()]
    stream, _ = [await begun(pace, pipe) for pipe in pipes]
    following = asyncio.ensure_future(anext(stream))
    pipes[0].put(b"last")
    if patience:
        await settled()
        pipes[0].end()
    assert await asyncio.wait_for(following, 60) == b"last"


async def test_single_stream_is_sent_without_waiting() -> None:
    pipe = Pipe()
    stream = await begun(StreamBatching(chunks_per_s=1e9, patience=FOR_EVER), pipe)
    for piece in (b"a", b"b", b"c"):
        pipe.put(piece)
        assert await asyncio.wait_for(anext(stream), 60) == piece


async def test_chunks_before_an_error_are_sent_before_it() -> None:
    async def breaking() -> AsyncGenerator[Part, None]:
        yield HEAD
        yield b"a"
        raise EngineLost("m", TicketId("t"))

    got: list[Part] = []
    with pytest.raises(EngineLost):
        async for part in StreamBatching().follow(breaking()):
            got.append(part)
    assert got == [HEAD, b"a"]


async def test_closing_a_batched_stream_closes_its_source() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[Part, None]:
        try:
            yield HEAD
            while True:
                yield b"x"
        finally:
            closed.set()

    source = endless()
    stream = StreamBatching().follow(source)
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(closed.wait(), 60)


@pytest.mark.parametrize("streams", [1, 4])
async def test_rate_of_a_stream_shrinks_with_the_number_of_streams(streams: int) -> None:
    pace = StreamBatching(chunks_per_s=100, patience=0.0)
    pipes = [Pipe() for _ in range(streams)]
    followed = [await begun(pace, pipe) for pipe in pipes]
    loop = asyncio.get_running_loop()
    began = loop.time()
    pipes[0].put(b"b")
    assert await anext(followed[0]) == b"b"
    assert loop.time() - began >= 0.9 * streams / 100
