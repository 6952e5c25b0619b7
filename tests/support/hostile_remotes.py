"""What remotes that mean harm do with a request, for tests.support.remote_server.raw_remote."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from ssl import SSLContext

from tests.support.remote_server import Answer, raw_remote

OK = b"HTTP/1.1 200 OK\r\ncontent-type: "
JSON, SSE = OK + b"application/json\r\n", OK + b"text/event-stream\r\n"
EVENT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


def says(*pieces: bytes) -> Answer:
    """Sends the pieces, reads nothing, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return answer


def forever(piece: bytes, beginning: bytes = b"") -> Answer:
    """Sends the piece for as long as it is taken, many at a time: the client has this loop too."""
    piece *= 1 + (1 << 16) // len(piece)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        while True:
            writer.write(piece)
            await writer.drain()

    return answer


def hangs(beginning: bytes = b"") -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        await writer.drain()
        await asyncio.Event().wait()

    return answer


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A space of JSON at a time: never silent for long, never done."""
    writer.write(JSON + b"content-length: 4000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(1 << 20)


def resets(beginning: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        await writer.drain()
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    return answer


@contextmanager
def listening(answers: Mapping[str, tuple[Answer, SSLContext | None]]) -> Iterator[dict[str, int]]:
    """The port of each, by name; they run on a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stack = AsyncExitStack()

    async def begin() -> dict[str, int]:
        return {
            name: await stack.enter_async_context(raw_remote(answer, tls))
            for name, (answer, tls) in answers.items()
        }

    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
