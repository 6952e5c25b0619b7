"""The proxy's side of the front's socket: one ASGI request over a connection of its own."""

import asyncio
import os
import socket
from pathlib import Path

from starlette.types import Message, Receive, Scope, Send

from arbiter.protocol.peer_credentials import peer_uid
from deployments.front.sockets.response_reader import ResponseReader

# Headers of a connection, not of a request: the connection of Serve's proxy ends here.
_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect"})


class NoFront(Exception):
    """Nothing listens there. No byte of the request was taken."""


async def carry(path: Path, scope: Scope, first: Message, receive: Receive, send: Send) -> None:
    """Carries request and response. Returns with nothing sent where the front died first, and
    raises FrontGone where it died later. Raises NoFront, and has then read nothing of the client's
    but `first`.

    `first`: the client's first message. It is read before this connects, so that a connection
    always has the head of a request on its way: a front that ends need not wait for idle ones."""
    connection = await _connected(path)
    try:
        leaving = await connection.ask(scope, first, receive)
        carrying = asyncio.ensure_future(connection.answer(send))
        await asyncio.wait({leaving, carrying}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if carrying.done():
            carrying.result()
        else:
            carrying.cancel()
            await asyncio.wait({carrying})
    finally:
        connection.close()


async def _connected(path: Path) -> "_Connection":
    """Connects to a front of this user: others may write to the session's folder, so a stranger
    could put a socket of its own there, and would get keys and prompts. Raises NoFront."""
    loop = asyncio.get_running_loop()
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    conn.setblocking(False)
    try:
        await loop.sock_connect(conn, str(path))
        if peer_uid(conn) != os.getuid():
            raise NoFront(f"{path} is another user's")
        _, connection = await loop.create_unix_connection(_Connection, sock=conn)
        return connection
    except OSError as error:
        conn.close()
        raise NoFront(str(path)) from error
    except BaseException:
        conn.close()
        raise


class FrontGone(Exception):
    """The front died in the middle of a response."""


class _Connection(ResponseReader):
    """One request and its response."""

    def __init__(self) -> None:
        super().__init__()
        self._flows = asyncio.Event()
        self._flows.set()
        self._headers: list[tuple[bytes, bytes]] = []
        self._start: Message | None = None

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    async def ask(self, scope: Scope, first: Message, receive: Receive) -> "asyncio.Task[None]":
        """Writes the request. Returns a task that writes the rest of the body, and ends when the
        client leaves.

        The request has no `connection: close`. With it the front could answer before the end of the
        body and close the connection, and the next write to a closed connection drops the answer
        that was not read from it yet."""
        assert self.transport is not None
        target = scope["raw_path"] + (
            b"?" + scope["query_string"] if scope["query_string"] else b""
        )
        body, has_more = first.get("body", b""), first.get("more_body", False)
        head = [b"%s %s HTTP/1.1\r\n" % (scope["method"].encode(), target)]
        is_sized = False
        for name, value in scope["headers"]:
            if name == b"content-length":
                # A body that has come whole is declared by its own length, not by the header: the
                # proxy's server hands over an empty body where the client asks for an upgrade.
                is_sized = True
                length = value if has_more else b"%d" % len(body)
                head.append(b"%s: %s\r\n" % (name, length))
            elif name not in _HOP:
                head.append(b"%s: %s\r\n" % (name, value))
        is_chunked = not is_sized and (has_more or bool(body))
        if is_chunked:
            head.append(b"transfer-encoding: chunked\r\n")
        self.transport.write(b"".join([*head, b"\r\n", _framed(body, is_chunked, has_more)]))
        return asyncio.ensure_future(self._rest(receive, is_chunked, has_more))

    async def _rest(self, receive: Receive, is_chunked: bool, has_more: bool) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            if has_more and self.transport is not None:
                has_more = message.get("more_body", False)
                await self._flows.wait()
                self.transport.write(_framed(message.get("body", b""), is_chunked, has_more))

    async def answer(self, send: Send) -> None:
        """Sends head and body on. Raises FrontGone."""
        while self._start is None and not self.is_lost:
            await self.news()
        if self._start is None:
            return
        await send(self._start)
        while (held := self.take_held()) or not self.is_complete:
            if held:
                await send({"type": "http.response.body", "body": held, "more_body": True})
            elif self.is_lost:
                raise FrontGone
            else:
                await self.news()
        await send({"type": "http.response.body", "body": b""})

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._flows.set()

    def pause_writing(self) -> None:
        self._flows.clear()

    def resume_writing(self) -> None:
        self._flows.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name not in _HOP:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200:  # else: it goes on with the body, or hints at what comes
            self._start = {
                "type": "http.response.start",
                "status": status,
                "headers": self._headers,
            }

    def on_message_complete(self) -> None:
        self.is_complete = self._start is not None


def _framed(piece: bytes, is_chunked: bool, has_more: bool) -> bytes:
    if not is_chunked:
        return piece
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b""
    return chunk if has_more else chunk + b"0\r\n\r\n"
