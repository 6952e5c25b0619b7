"""The reading side of one HTTP response over a socket: it is parsed by httptools, and what has come
is held until it is asked for, within a bound."""

import asyncio
from typing import cast

import httptools

# Of bytes that have come and not been asked for; then the sender's socket fills, which stops it.
MOST_HELD_BYTES = 1 << 18


class ResponseReader(asyncio.Protocol):
    """Reads one response. A subclass says what its head means, in `on_headers_complete` and
    `on_message_complete`; what httptools calls has its names."""

    def __init__(self) -> None:
        self.is_lost = False  # the connection ended, or what came is no HTTP
        self.is_complete = False
        self.parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._wakeup = asyncio.Event()

    async def news(self) -> None:
        """Returns once more has come, or the connection has ended."""
        self._wakeup.clear()
        await self._wakeup.wait()

    def take_held(self) -> bytes:
        """Returns all bytes of the body that have come and were not taken; empty for none."""
        held, self._held = b"".join(self._held), []
        if self._held_bytes > MOST_HELD_BYTES and self.transport and not self.is_lost:
            self.transport.resume_reading()
        self._held_bytes = 0
        return held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of it

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.is_lost = True
        if self._held_bytes > MOST_HELD_BYTES and self.transport:
            self.transport.pause_reading()
        self._wakeup.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._wakeup.set()

    def on_body(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)
