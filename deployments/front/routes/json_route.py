"""JsonRoute: a route whose body is JSON whatever its content type says."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from deployments.front.dependencies import Require, check_site


class JsonRoute(APIRoute):
    """`curl -d` and urllib declare a form where they send JSON. The check of Origin, not the
    content type, keeps other sites out (deployments.front.access.auth).

    Origin, Host and key are checked before the body is read, because FastAPI asks for them after
    it: a sender without a key would take a place of the front for as long as its body lasts."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle: Callable[[Request], Any] = super().get_route_handler()
        needs = [n.call for n in self.dependant.dependencies if isinstance(n.call, Require)]

        async def as_json(request: Request) -> Response:
            await check_site(request)
            for need in needs:
                request.app.state.front.auth.require(request, need.scope)
            other_headers = [
                pair for pair in request.scope["headers"] if pair[0] != b"content-type"
            ]
            headers = [*other_headers, (b"content-type", b"application/json")]
            scope = {**request.scope, "headers": headers}
            response: Response = await handle(Request(scope, request.receive))
            return response

        return as_json
