"""The front's own socket on its node, for the proxy beside it.

Between Serve's proxy and a replica a request and its answer are pickled, routed and called back
for: 5 ms of processor time of the two together. Requests for inference, and for what was kept, come
here instead, as plain HTTP. The proxy goes to Serve where there is no socket.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arbiter.protocol import ray_internals

logger = logging.getLogger("ray.serve")

NAME = "serve-arbiter-front.sock"
HEAD_S = 5.0  # from a connection to its request: the proxy connects when it has one to send


def place() -> Path | None:
    """None outside of a cluster."""
    folder = ray_internals.session_folder()
    return None if folder is None else folder / NAME


class FrontSocket:
    """Serves one application to processes of this user, until the front ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._server: asyncio.Server | None = None
        self._state: Any = None
        self._path: Path | None = None
        self._inode = 0
        self._listening: socket.socket | None = None  # a duplicate, which outlives the server
        self._connected: Callable[[], asyncio.Protocol] | None = None
        self._left = asyncio.Event()  # set when a connection has ended

    async def open(self) -> None:
        """Takes the place of an earlier front's socket; a second call changes nothing."""
        if self._server is not None or (path := place()) is None:
            return
        import uvicorn
        from uvicorn.server import ServerState

        from deployments.engines.peer_auth import SameUserOnly

        class Connection(SameUserOnly):
            def connection_lost(self, error: Exception | None) -> None:
                super().connection_lost(error)
                left.set()

        left = self._left

        config = uvicorn.Config(
            cast(Any, EndsWithClient(self._app)),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        config.load()
        self._state, self._path = ServerState(), path

        def connected() -> asyncio.Protocol:
            return Connection(config=config, server_state=self._state, app_state={})

        loop = asyncio.get_running_loop()
        bound = _bound(path)
        self._inode, self._listening = path.stat().st_ino, bound.dup()
        self._connected = connected
        self._server = await loop.create_unix_server(connected, sock=bound)

    async def close(self) -> None:
        """Takes no more connections; returns when every request of those that it has is answered,
        also of those that the kernel has taken and no one has read."""
        if self._server is None or self._path is None:
            return
        if self._path.exists() and self._path.stat().st_ino == self._inode:  # no later front's
            self._path.unlink()
        self._server.close()
        await self._accept_waiting()
        for connection in list(self._state.connections):
            if connection.cycle is not None:  # else the connection's request is still on its way
                connection.shutdown()  # uvicorn closes it at once if idle, else after its answer
        last = asyncio.get_running_loop().call_later(HEAD_S, self._shut_down)
        while self._state.connections:
            self._left.clear()
            await self._left.wait()
        last.cancel()
        if tasks := set(self._state.tasks):
            await asyncio.wait(tasks)

    async def _accept_waiting(self) -> None:
        """Accepts the connections that were made before the socket's name was gone."""
        assert self._listening is not None and self._connected is not None
        with self._listening as listening:
            while True:
                try:
                    conn, _ = listening.accept()
                except BlockingIOError:
                    return
                except ConnectionAbortedError:
                    continue  # the proxy has closed this connection again
                except OSError as error:  # the proxy answers the requests that wait with FrontLost
                    logger.warning("connections to %s end unanswered: %s", self._path, error)
                    return
                await asyncio.get_running_loop().connect_accepted_socket(self._connected, conn)

    def _shut_down(self) -> None:
        for connection in list(self._state.connections):
            connection.shutdown()


class EndsWithClient:
    """An ASGI middleware that cancels the application when its client leaves, as Serve does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_body_read, is_answered = asyncio.Event(), False

        async def received() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                is_body_read.set()
            return message

        async def noted(message: Message) -> None:
            nonlocal is_answered
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            is_answered = is_answered or is_last
            await send(message)

        async def leave() -> None:
            await is_body_read.wait()
            while (await receive())["type"] != "http.disconnect":
                continue

        answering = asyncio.ensure_future(self._app(scope, received, noted))
        leaving = asyncio.ensure_future(leave())
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not is_answered:
            answering.cancel()
        leaving.cancel()
        await asyncio.wait({answering})
        if not answering.cancelled():
            answering.result()


def _bound(path: Path) -> socket.socket:
    """A socket of mode 0600 at that path from its first moment."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.setblocking(False)
    bound.bind(str(draft))
    draft.chmod(0o600)  # nothing can connect before the server listens
    bound.listen(1_024)
    draft.rename(path)
    return bound
