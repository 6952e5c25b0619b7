"""The body of an event stream, read from its engine's socket by the process that has the client.

Serve's proxy marks each request with a token of this node, and a front that knows the token asks
for the stream where the proxy can reach it. So the pieces of a stream go from the engine's process
to the proxy's, while replica and front hold the call: they count it, cancel it, and say how it
ended.
"""

import asyncio
import functools
import hmac
import os
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path

from arbiter.protocol import ray_internals
from deployments.front.sockets.response_reader import ResponseReader
from deployments.messages import SIDE_STREAM_PATH, WholeEvents

# A header of a request on its way from proxy to front: the token. What a client sends in it is
# dropped.
READER = "x-arbiter-reader"


class SideStreamLost(Exception):
    """The stream broke off or could not be opened. The replica knows why."""


def reader_token() -> str:
    """Returns a token that all processes of this user on this node of the cluster share, and no
    others know; empty outside of a cluster, and where the token can be neither read nor kept."""
    folder = ray_internals.session_folder()
    try:
        return _token_in(folder) if folder is not None else ""
    except OSError:  # a full disk, say; the streams go by Serve, and the next request tries again
        return ""


@functools.cache
def _token_in(folder: Path) -> str:
    """Reads the token of this folder, and makes it where there is none. Raises OSError."""
    path = folder / "serve-arbiter-reader"
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    token = secrets.token_hex(16)
    draft = path.with_suffix(f".{token}")
    draft_file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(draft_file, "w") as file:
            file.write(token)
        os.link(draft, path)  # the file appears with its content, and only the first link succeeds
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)
    return _read(path)


def _read(path: Path) -> str:
    """Returns the token; empty where the file is another user's. Raises OSError."""
    with path.open() as token_file:  # others may write to the folder, so the open file is asked
        return token_file.read() if os.fstat(token_file.fileno()).st_uid == os.getuid() else ""


def is_reader(header: str | None) -> bool:
    """Whether the process that sent this token reads side streams on this node."""
    ours = reader_token() if header else ""
    return bool(ours) and hmac.compare_digest(header or "", ours)


async def read(place: str) -> AsyncGenerator[bytes, None]:
    """Yields the bytes of a side stream; where it breaks, up to the end of an event. `place`: `PATH
    WORD`, the engine's socket and the word under which the stream waits there. Raises
    SideStreamLost."""
    path, _, which = place.rpartition(" ")
    loop = asyncio.get_running_loop()
    try:
        transport, incoming = await loop.create_unix_connection(_Incoming, path)
    except OSError as error:
        raise SideStreamLost(place) from error
    transport.write(f"GET {SIDE_STREAM_PATH}{which} HTTP/1.1\r\nhost: engine\r\n\r\n".encode())
    events = WholeEvents()
    try:
        while (piece := await incoming.take()) is not None:
            if whole := events.whole(piece):
                yield whole
        if rest := events.rest():
            yield rest
    finally:
        transport.close()


class _Incoming(ResponseReader):
    """The response of an engine's socket, whose body is a side stream if the status is 200."""

    async def take(self) -> bytes | None:
        """Waits for bytes, and returns all that have come; None at the end. Raises
        SideStreamLost."""
        while not (held := self.take_held()):
            if self.is_complete:
                return None
            if self.is_lost:
                raise SideStreamLost
            await self.news()
        return held

    def on_headers_complete(self) -> None:
        self.is_lost = self.parser.get_status_code() != 200

    def on_body(self, piece: bytes) -> None:
        if not self.is_lost:
            super().on_body(piece)

    def on_message_complete(self) -> None:
        self.is_complete = not self.is_lost
