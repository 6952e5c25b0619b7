"""The handle of the front's deployment as a transport of httpx."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from arbiter.errors import RequestError
from deployments.front.by_handle import HandleRequest
from deployments.messages import ResponseHead

BROKEN = (RayError, RayServeException, RequestError)  # the last breaks a stream that has begun


def front_handle() -> Any:
    """The handle of the front; this process is connected to Ray. Raises RayServeException where
    there is no such application."""
    from ray import serve

    return serve.get_deployment_handle("front", app_name="front")


class HandleTransport(httpx.AsyncBaseTransport):
    """Sends a request of httpx by the handle. The bound on a read is that of a piece, as it is on a
    socket."""

    def __init__(self, handle: Any) -> None:
        self._send = handle.options(stream=True).respond.remote

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        handle_request = HandleRequest(
            request.method,
            request.url.raw_path.decode(),
            tuple((name.lower(), value) for name, value in request.headers.items()),
            await request.aread(),
        )
        bounds: dict[str, float | None] = request.extensions.get("timeout", {})
        parts = HandleStream(self._send(handle_request), bounds.get("read"), request)
        try:
            head = await parts.next()
        except BaseException:
            await parts.aclose()
            raise
        assert isinstance(head, ResponseHead), "a response begins with its head"
        return httpx.Response(head.status, headers=head.headers, stream=parts)


class HandleStream(httpx.AsyncByteStream):
    """The rest of a response; closing it cancels the work unless all of it was read."""

    def __init__(self, response: Any, within_s: float | None, request: httpx.Request) -> None:
        self._response, self._within_s, self._request = response, within_s, request
        self._has_ended = False

    async def next(self) -> ResponseHead | bytes | None:
        """None: that was all. Raises httpx.ReadTimeout, httpx.RemoteProtocolError."""
        try:
            async with asyncio.timeout(self._within_s):
                part: ResponseHead | bytes = await anext(self._response)
                return part
        except StopAsyncIteration:
            self._has_ended = True
            return None
        except TimeoutError:
            message = f"nothing came within {self._within_s} s"
            raise httpx.ReadTimeout(message, request=self._request) from None
        except BROKEN as error:
            self._has_ended = True
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise httpx.RemoteProtocolError(str(cause), request=self._request) from error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self.next()) is not None:
            assert isinstance(part, bytes), "one head, then bytes"
            yield part

    async def aclose(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._response.cancel()
