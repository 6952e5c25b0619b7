"""The front's own socket on its node, for the proxy beside it.

Between Serve's proxy and a replica a request and its answer are pickled, routed and called back
for: 5 ms of processor time of the two together. Requests for inference come here instead, as plain
HTTP. The proxy goes to Serve where there is no socket.
"""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arbiter.protocol import ray_internals

NAME = "serve-arbiter-front.sock"


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

    async def open(self) -> None:
        """Takes the place of an earlier front's socket; a second call changes nothing."""
        if self._server is not None or (path := place()) is None:
            return
        import uvicorn
        from uvicorn.server import ServerState

        from deployments.engines.peer_auth import SameUserOnly

        config = uvicorn.Config(
            cast(Any, EndsWithClient(self._app)),
            http=SameUserOnly,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        config.load()
        self._state, self._path = ServerState(), path

        def connected() -> asyncio.Protocol:
            return SameUserOnly(config=config, server_state=self._state, app_state={})

        loop = asyncio.get_running_loop()
        bound = _bound(path)
        self._inode = path.stat().st_ino
        self._server = await loop.create_unix_server(connected, sock=bound)

    async def close(self) -> None:
        """Takes no more requests; returns when those that it has are answered."""
        if self._server is None or self._path is None:
            return
        self._server.close()
        if self._path.exists() and self._path.stat().st_ino == self._inode:  # no later front's
            self._path.unlink()
        for connection in list(self._state.connections):
            connection.shutdown()  # those that are idle now, the others when they have answered
        if tasks := set(self._state.tasks):
            await asyncio.wait(tasks)


class EndsWithClient:
    """An ASGI middleware that cancels the application when its client leaves, as Serve does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        was_heard, is_answered = asyncio.Event(), False

        async def heard() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                was_heard.set()
            return message

        async def noted(message: Message) -> None:
            nonlocal is_answered
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            is_answered = is_answered or is_last
            await send(message)

        async def leave() -> None:
            await was_heard.wait()
            while (await receive())["type"] != "http.disconnect":
                continue

        answering = asyncio.ensure_future(self._app(scope, heard, noted))
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
