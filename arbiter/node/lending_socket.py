"""A socket at which a node agent hands open files to its engines (L4): slabs, and copies of
models' files.

An engine sends one line of JSON, `{"ticket": T, "key": K}`, and is answered with one byte and the
descriptors of what it was lent under that key (SCM_RIGHTS); with nothing where it was lent no such
thing. Only processes of this user are answered.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from arbiter.protocol.accepting import SHORT_PAUSE_S, is_shortage
from arbiter.protocol.peer_credentials import peer_uid
from arbiter.units import TicketId

logger = logging.getLogger("arbiter.agent")

ANSWER_S = 10.0  # a line that takes longer is not coming
LINE_MOST_BYTES = 1_024

Finds = Callable[[TicketId, str], Sequence[int]]


class LendingSocket:
    """Hands descriptors to engines. `find` returns those that were lent to the engine of a ticket
    under a key; none for what was not lent."""

    def __init__(self, path: Path, find: Finds) -> None:
        """Binds the socket. Raises OSError."""
        self.path, self._find = path, find
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._answering: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answers engines that connect, until it is cancelled. Raises OSError where the socket
        itself is at fault."""
        while True:
            peer = await self._accepted()
            task = asyncio.ensure_future(self._answer(peer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _accepted(self) -> socket.socket:
        while True:
            try:
                return (await asyncio.get_running_loop().sock_accept(self._listener))[0]
            except ConnectionAbortedError:
                continue  # it has gone again
            except OSError as error:
                if not is_shortage(error):
                    raise
                logger.warning(
                    "engines that ask at %s for what they are lent wait: %s; raise the limits of"
                    " the node agent (ulimit -n), pid %d",
                    self.path,
                    error,
                    os.getpid(),
                )
                await asyncio.sleep(SHORT_PAUSE_S)

    async def _answer(self, peer: socket.socket) -> None:
        with peer:
            try:
                if peer_uid(peer) != os.getuid():
                    return  # before a byte of it is read (adr/0005)
                request = await read_request(peer)
                fds = self._find(TicketId(request["ticket"]), request["key"])
                if fds:
                    socket.send_fds(peer, [b"\n"], list(fds))
            except (OSError, TimeoutError, ValueError, KeyError, TypeError):
                return  # it has gone, or is no engine of ours

    def close(self) -> None:
        for task in self._answering:
            task.cancel()
        self._listener.close()
        self.path.unlink(missing_ok=True)


async def read_request(peer: socket.socket) -> dict[str, str]:
    """Returns what the process at the other end asks for. Raises OSError, TimeoutError,
    ValueError."""
    async with asyncio.timeout(ANSWER_S):
        line = await _line(peer)
    request = json.loads(line)
    if not isinstance(request, dict):
        raise ValueError(f"{request!r} is no JSON object")
    return request


async def _line(peer: socket.socket) -> bytes:
    loop, read = asyncio.get_running_loop(), b""
    while b"\n" not in read and len(read) < LINE_MOST_BYTES:
        more = await loop.sock_recv(peer, LINE_MOST_BYTES)
        if not more:
            break
        read += more
    return read
