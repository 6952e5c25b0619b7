"""The body of an event stream on a connection of its own, to the process that has the client.

A replica that puts `messages.SIDE_STREAM` with a fresh word into a request's headers gets the head
of a successful event stream with the same header, and then nothing until the end. The pieces go to
whichever process of this user asks first for

    GET /control/side_stream/WORD

The replica's connection stays what it is without this: it counts the request, and closing it ends
the work. Every other answer comes there whole.

A piece waits for others until 5 ms after the last that went out; the first two never wait, and the
end waits for nothing.
"""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from deployments import messages
from deployments.engines import asgi
from deployments.engines.protocol import Asgi, Receive, Scope, Send

PATH = messages.SIDE_STREAM_PATH
HEADER = messages.SIDE_STREAM.encode()

JOIN_S = 0.005  # the most by which a piece is delayed, to be sent with the next ones

# Bytes that are held for the reader; beyond them the engine's application waits, as on a socket.
MOST_HELD_BYTES = 1 << 18

# How long a reader may take nothing. Its client has stopped reading by then, with what the sockets
# and processes on the way hold unread, and the request would keep its model in use for as long as
# the client likes. A client that a person puts aside, as a hidden page, goes on reading.
UNREAD_S = 90.0
# Sent at once: the socket takes the next piece once it has at most 16 KiB of this one left, so a
# reader that is only slow, of some 500 bytes a second, is none that takes nothing.
_PIECE_BYTES = 1 << 16

# How long the reader may take to come. The head reaches it through three processes of the node, in
# 2 ms.
TAKEN_WITHIN_S = 10.0


class SideStreamBroken(Exception):
    """No reader came for the stream or its reader stopped reading, or the application did not end
    it. The server closes the connection unfinished."""


class SideStream:
    """The pieces of one answer, from the application that makes them to its reader."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = self._sent = 0
        self._due_s = 0.0
        self._wakeup, self._room, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._send: Send | None = None  # the reader's connection, once there is one
        self._is_sending = self.is_whole = self.is_broken = False
        self.taken, self.carried = asyncio.Event(), asyncio.Event()

    async def put(self, piece: bytes) -> None:
        """Adds a piece, and sends what is held if that is due: to wake `carry` for each piece would
        cost a turn of another task. Waits while MOST_HELD_BYTES are held, or while the reader's
        socket takes no more. Raises SideStreamBroken where no reader comes, and where it takes
        nothing."""
        while self._held_bytes > MOST_HELD_BYTES and not self._over.is_set():
            self._room.clear()  # before the wait, because a reader that comes makes room at once
            await self.until_taken()
            await self._room.wait()
        if self.is_broken:
            raise SideStreamBroken
        self._held.append(piece)
        self._held_bytes += len(piece)
        loop = asyncio.get_running_loop()
        if loop.time() < self._due_s:
            if self._timer is None:
                self._timer = loop.call_at(self._due_s, self._wakeup.set)
        elif self._send is None or self._is_sending:
            self._wakeup.set()  # `carry` sends it, behind what is being sent now
        else:
            await self._flush(self._send)

    async def until_taken(self) -> None:
        """Returns once a reader is there. Raises SideStreamBroken where none comes."""
        try:
            async with asyncio.timeout(TAKEN_WITHIN_S):
                await self.taken.wait()
        except TimeoutError:
            raise SideStreamBroken from None

    def end(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._over.set()
        self._wakeup.set()
        self._room.set()

    async def carry(self, send: Send) -> None:
        """Sends what `put` has not sent, until the end. Raises SideStreamBroken."""
        self._send = send
        self.taken.set()
        try:
            while not (self._over.is_set() and not self._held):
                await self._wakeup.wait()
                self._wakeup.clear()
                if not self._is_sending:
                    await self._flush(send)
            if not self.is_whole:
                raise SideStreamBroken
            await self._pass(send, {"type": "http.response.body", "body": b""})
        finally:
            self.carried.set()

    async def _flush(self, send: Send) -> None:
        """Sends what is held as one piece, if it is not large. Raises SideStreamBroken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held, self._held_bytes = b"".join(self._held), [], 0
        self._room.set()
        if not held:
            return
        self._is_sending = True
        try:
            for at in range(0, len(held), _PIECE_BYTES):
                piece = held[at : at + _PIECE_BYTES]
                message = {"type": "http.response.body", "body": piece, "more_body": True}
                await self._pass(send, message)
        finally:
            self._is_sending = False
        self._sent += 1
        is_joined = self._sent >= messages.FIRST_PIECES
        self._due_s = asyncio.get_running_loop().time() + JOIN_S if is_joined else 0.0

    async def _pass(self, send: Send, message: dict[str, Any]) -> None:
        """Passes a message on once the reader's socket takes it. Raises SideStreamBroken where the
        reader takes nothing for UNREAD_S."""
        try:
            async with asyncio.timeout(UNREAD_S):
                await send(message)
        except TimeoutError:
            self.is_broken = True
            self.end(is_whole=False)
            raise SideStreamBroken from None


class SideStreams:
    """The side streams of one engine process."""

    def __init__(self) -> None:
        self._waiting: dict[str, SideStream] = {}

    async def answer(self, app: Asgi, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the engine's application. The connection that asked ends after the side stream, so
        that the request counts as in flight until all of it was taken. Raises what the application
        raises, SideStreamBroken."""
        word = next((v.decode() for k, v in scope["headers"] if k == HEADER), "")
        if not word:
            return await app(scope, receive, send)
        detour = _Detour(word, self._waiting, send)
        try:
            await app(scope, receive, detour)
            detour.stream.end(is_whole=detour.is_complete and not detour.stream.is_broken)
            if detour.is_complete:
                await detour.stream.until_taken()
                await detour.stream.carried.wait()
                if detour.stream.is_broken:
                    raise SideStreamBroken
                await send({"type": "http.response.body", "body": b""})
        finally:
            detour.stream.end(is_whole=detour.is_complete and not detour.stream.is_broken)
            self._waiting.pop(word, None)

    async def read(self, scope: Scope, send: Send) -> None:
        """The answer to the reader's question; a word counts once. Raises SideStreamBroken."""
        stream = self._waiting.pop(scope["path"].removeprefix(PATH), None)
        if stream is None:
            return await asgi.refuse(send, 404, "no such side stream", kind="NotFound")
        headers = [(b"content-type", b"application/octet-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await stream.carry(send)


class _Detour:
    """The `send` of an application whose event stream goes elsewhere."""

    def __init__(self, word: str, waiting: dict[str, SideStream], send: Send) -> None:
        self._word, self._waiting, self._send = word, waiting, send
        self.stream = SideStream()
        self.is_open = self.is_complete = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif not self.is_open:
            await self._send(message)
        else:
            if piece := message.get("body", b""):
                await self.stream.put(piece)
            self.is_complete = not message.get("more_body", False)

    async def _begin(self, message: MutableMapping[str, Any]) -> None:
        kind = dict(message["headers"]).get(b"content-type", b"")
        if message["status"] == 200 and kind.startswith(b"text/event-stream"):
            self.is_open = True
            self._waiting[self._word] = self.stream
            headers = [*message["headers"], (HEADER, self._word.encode())]
            message = {**message, "headers": headers}
        await self._send(message)
