"""OtherSites: an ASGI middleware by which browsers let pages of `front.origins` read answers, and
send what a page may not send to another site unasked: JSON, and a key in a header (CORS)."""

from collections.abc import Callable

from starlette.middleware.cors import ALL_METHODS, CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.front.access.auth import Authenticator


class OtherSites(CORSMiddleware):
    """Starlette's. Its origins are those of the table as it is now. No cookie is asked for, so a
    page has what its own key allows and nothing else."""

    def __init__(self, app: ASGIApp, auth: Callable[[], Authenticator]) -> None:
        super().__init__(
            app,
            allow_methods=ALL_METHODS,
            allow_headers=("*",),
            allow_private_network=True,  # the front's address, as a page of a public site sees it
            expose_headers=("*",),
        )
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_of_page = any(name == b"origin" for name, _ in scope.get("headers", ()))
        await (super().__call__ if is_of_page else self.app)(scope, receive, send)

    def is_allowed_origin(self, origin: str) -> bool:
        return origin in self._auth().origins
