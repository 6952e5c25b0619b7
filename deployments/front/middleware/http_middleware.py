"""What the front's middlewares of ASGI have in common."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HttpMiddleware:
    """Sees HTTP requests alone: what else a server says, as that it starts and ends, goes past
    it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.answer if scope["type"] == "http" else self._app
        await answer(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, which it may hand on to `_app`."""
        raise NotImplementedError
