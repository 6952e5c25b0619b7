"""Middlewares of Serve's HTTP proxy, which Serve loads from the variable
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` (the Makefile sets it; it is read when Ray starts).

Without them two requests get Serve's bare 500: a request in flight when the front's process dies,
and a request whose `x-request-id` is not ASCII. A response that has begun is cut in either case.
"""

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arbiter.errors import RequestError
from deployments import messages

REQUEST_ID = b"x-request-id"


class FrontLost(RequestError):
    """Serve starts another front; that takes about two seconds."""

    code, retry_after_s = "front_lost", 2.0

    def __str__(self) -> str:
        return "the front died under this request; send it again in 2 s"


class ProxyErrors:
    """An ASGI middleware around Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        kept = [(k, v) for k, v in scope["headers"] if k != REQUEST_ID or v.isascii()]
        await self._app({**scope, "headers": kept}, receive, noted)
        if not has_begun:
            head, body = messages.refusal(FrontLost())
            await Response(body, head.status, head.headers)(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Called by Serve in each proxy, outermost last."""
    return [Middleware(ProxyErrors)]
