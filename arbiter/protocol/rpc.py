"""Calls between two of our processes: over a unix socket where both are on one node, else by Ray.

A call by Ray passes six threads and takes 2 ms each way on two busy cores; over a socket it takes a
tenth of that, and a load that evicts waits for seven of them in turn (docs/adr/0006). Both ways a
call means the same: it may arrive twice or never, and only its answer says that it arrived.

Messages are pickles, as Ray's are, so each end looks at the other's user before it reads a byte.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from ray.exceptions import RayError, RayTaskError

from arbiter.errors import ArbiterError, error_fields
from arbiter.protocol.peer_credentials import peer_uid
from arbiter.protocol.ray_internals import raised_there
from arbiter.units import NodeId

_SIZE_BYTES = 4
# The largest message is the table: some kB for each of thousands of models.
MESSAGE_MOST_BYTES = 64 << 20
# A peer that leaves this unread does not read; it comes back by a new connection.
UNREAD_MOST_BYTES = 2 * MESSAGE_MOST_BYTES

Offers = Mapping[str, Callable[..., Awaitable[Any]]]  # what may be called, by name


@error_fields
class ConnectionLost(ArbiterError):
    """Says that the process at the other end is gone, or cannot be reached."""

    name: str  # of the call

    def __str__(self) -> str:
        return f"no answer to {self.name!r}: the connection broke; whether it arrived is not known"


@error_fields
class RemoteError(ArbiterError):
    """Says that the process at the other end has a bug."""

    name: str  # of the call
    cause: str

    def __str__(self) -> str:
        return f"{self.name!r} failed: {self.cause}"


class Peer(Protocol):
    """Calls the process at the other end."""

    @property
    def is_open(self) -> bool: ...

    async def call(self, name: str, *args: Any) -> Any:
        """Returns the answer of a method at the other end. Raises ConnectionLost, RemoteError, or
        the ArbiterError of the answer."""

    def close(self) -> None: ...


class RayPeer:
    """Calls an actor on any node, by Ray."""

    is_open = True  # as far as we know: its calls say when it is not

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, name: str, *args: Any) -> Any:
        try:
            return await getattr(self._handle, name).remote(*args)
        except RayError as error:
            if refusal := raised_there(error, ArbiterError):
                raise refusal from None
            if isinstance(error, RayTaskError):
                raise RemoteError(name, str(error)) from error
            raise ConnectionLost(name) from error

    def close(self) -> None:
        """Does nothing: the connection is Ray's."""


async def connect_to_socket(handle: Any, address: dict[str, str] | None, own_node: NodeId) -> Peer:
    """Connects to the socket at `address`, as `RpcServer.address` gives it; by Ray where the socket
    is on another node or does not open."""
    if address is not None and address["node"] == own_node:
        with contextlib.suppress(OSError):
            return await connect(Path(address["path"]))
    return RayPeer(handle)


async def connect(path: Path) -> "SocketPeer":
    """Connects to a socket of this user. Raises OSError."""
    loop = asyncio.get_running_loop()
    _, peer = await loop.create_unix_connection(SocketPeer, str(path))
    if not peer.is_open:
        raise PermissionError(f"{path} belongs to another user")
    return peer


class _Frames(asyncio.Protocol):
    """Reads and writes messages: each is its length in four bytes, little end first, and a
    pickle."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if peer_uid(transport.get_extra_info("socket")) != os.getuid():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while len(self._unread) >= _SIZE_BYTES and self.is_open:
            size = int.from_bytes(self._unread[:_SIZE_BYTES], "little")
            end = _SIZE_BYTES + size
            if size > MESSAGE_MOST_BYTES:
                return self.close()
            if len(self._unread) < end:
                return
            message = bytes(self._unread[_SIZE_BYTES:end])
            del self._unread[:end]
            self.received(pickle.loads(message))

    def received(self, message: Any) -> None:
        raise NotImplementedError

    def write(self, message: object) -> None:
        assert self._transport is not None
        data = pickle.dumps(message)
        self._transport.write(len(data).to_bytes(_SIZE_BYTES, "little") + data)
        if self._transport.get_write_buffer_size() > UNREAD_MOST_BYTES:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class SocketPeer(_Frames):
    """Calls the process at the other end of a socket."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    async def call(self, name: str, *args: Any) -> Any:
        if not self.is_open:
            raise ConnectionLost(name)
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = (name, answer)
        try:
            self.write((number, name, args))
            return await answer
        finally:
            del self._waiting[number]

    def received(self, message: Any) -> None:
        number, value, error = message
        _, answer = self._waiting.get(number, ("", None))
        if answer is None or answer.done():
            return  # the caller has gone
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        for name, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(name))


class RpcServer:
    """Answers calls over a socket that only this user may open, in a folder only this user may
    enter."""

    def __init__(self, node: NodeId, path: Path, offers: Offers) -> None:
        self._node, self._path, self._offers = node, path, offers
        self._connections: set[_ServerConnection] = set()
        self._server: asyncio.Server | None = None
        self._opening = asyncio.ensure_future(self._listen())

    async def address(self) -> dict[str, str] | None:
        """Returns the address for `connect_to_socket`; None when the socket could not be opened, so
        that Ray carries all calls."""
        await asyncio.wait({self._opening})
        is_open = not self._opening.cancelled() and self._opening.exception() is None
        return {"node": self._node, "path": str(self._path)} if is_open else None

    async def _listen(self) -> None:
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)
        except OSError:
            listener.close()
            raise
        # Nothing is awaited before `close` can find the server.
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _ServerConnection(self._offers, self._connections),
            sock=listener,
            start_serving=False,
        )
        await self._server.start_serving()

    def close(self) -> None:
        self._opening.cancel()
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for connection in tuple(self._connections):
            connection.close()


class _ServerConnection(_Frames):
    """Answers the calls of one connection. A call goes on when its connection breaks, as with Ray:
    another call may share the answer."""

    def __init__(self, offers: Offers, connections: "set[_ServerConnection]") -> None:
        super().__init__()
        self._offers, self._connections = offers, connections
        self._running: set[asyncio.Future[Any]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)

    def received(self, message: Any) -> None:
        number, name, args = message
        call = asyncio.ensure_future(self._offers[name](*args))
        self._running.add(call)
        call.add_done_callback(partial(self._answer, number, name))

    def _answer(self, number: int, name: str, call: asyncio.Future[Any]) -> None:
        self._running.discard(call)
        failure = ConnectionLost(name) if call.cancelled() else call.exception()
        if failure is not None and not isinstance(failure, ArbiterError):
            failure = RemoteError(name, repr(failure))
        if self.is_open:
            self.write((number, None if failure else call.result(), failure))
