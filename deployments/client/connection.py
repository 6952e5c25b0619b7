"""A client's way to the front: over HTTP, or by the handle of its deployment. Both are httpx; only
the transport beneath it differs, so that there is one way to write a request and to read a refusal.
"""

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from arbiter.leases import LeaseTransport
from deployments.client import leases
from deployments.client.typed_errors import FrontUnreachable, error_of_event, error_of_response
from deployments.config.proxy_trust import httpx_options

CONNECT_S = 5.0
END = "[DONE]"  # OpenAI's last event
DATA = "data: "

Files = dict[str, tuple[str, bytes, str]]  # by field: name, content, type
T = TypeVar("T")
Read = Callable[[bytes, str], T]  # of a body and its content type


def of_json(read: Callable[[Any], T]) -> Read[T]:
    """Makes a reader of JSON bodies."""
    return lambda raw, _: read(json.loads(raw))


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    method: str
    path: str
    json: Mapping[str, Any] | None = None
    form: Mapping[str, Any] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    within_s: float | None = None  # None: the client's own bound
    headers: Mapping[str, str] = field(default_factory=dict)


class Connection:
    """One per client; views of it share it."""

    def __init__(
        self, http: httpx.AsyncClient, where: str, lease_way: Callable[[], LeaseTransport]
    ) -> None:
        self._http, self._where, self.lease_way = http, where, lease_way

    @classmethod
    def over_http(cls, url: str, key: str, timeout_s: float) -> "Connection":
        """`key`: empty where the front asks for none."""
        http = _client(url, key, timeout_s, None)
        return cls(http, url, lambda: leases.over_http(url, key))

    @classmethod
    def by_handle(cls, handle: Any, key: str, timeout_s: float) -> "Connection":
        """`handle`: of the front's deployment."""
        from deployments.client.handle import HandleTransport

        http = _client("http://localhost", key, timeout_s, HandleTransport(handle))
        return cls(http, "the front's deployment", lambda: leases.by_handle(handle, key))

    async def close(self) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def opened(self, request: Request) -> AsyncGenerator[httpx.Response]:
        """The response once its head is there; leaving ends it. Raises RequestError."""
        how: dict[str, Any] = {"json": request.json} if request.json is not None else {}
        if request.files:
            how = {"data": request.form, "files": request.files}
        how["headers"] = request.headers
        if request.within_s is not None:
            how["timeout"] = httpx.Timeout(request.within_s, connect=CONNECT_S)
        with _reached(self._where):
            async with self._http.stream(request.method, request.path, **how) as response:
                if response.is_error:
                    raise error_of_response(
                        response.status_code, response.headers, await response.aread()
                    )
                yield response

    async def read(self, request: Request) -> Any:
        """A JSON value. Raises RequestError."""
        return await self.answer(request, of_json(lambda value: value))

    async def answer(self, request: Request, read: Read[T]) -> T:
        """What `read` makes of the body and its content type. Raises RequestError."""
        async with self.opened(request) as response:
            return read(await response.aread(), response.headers.get("content-type", ""))

    async def pieces(self, request: Request) -> AsyncGenerator[tuple[bytes, str]]:
        """The body as it comes, each piece with the content type. Raises RequestError."""
        async with self.opened(request) as response:
            kind = response.headers.get("content-type", "")
            async for piece in response.aiter_bytes():
                yield piece, kind

    async def rows(self, request: Request) -> AsyncGenerator[dict[str, Any]]:
        """Yields the rows of a file with a JSON object on each line. Raises RequestError."""
        async with self.opened(request) as response:
            async for line in _lines(response):
                yield json.loads(line)

    async def events(
        self, request: Request, on_event: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream, without its comments; `on_event` is called with each sign of the
        front, also a comment. Raises RequestError, also where a refusal comes as an event."""
        async with self.opened(request) as response:
            on_event()
            async for line in _lines(response):
                on_event()
                if line.startswith(DATA) and line != DATA + END:
                    event = json.loads(line.removeprefix(DATA))
                    if refusal := error_of_event(event):
                        raise refusal
                    yield event


async def _lines(response: httpx.Response) -> AsyncGenerator[str]:
    """The lines of a body. httpx's own also end at U+2028, U+2029 and U+0085, which JSON has within
    texts."""
    begun: list[bytes] = []
    async for piece in response.aiter_bytes():
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end)).removesuffix(b"\r").decode()
            begun = []
        begun.append(rest)
    if last := b"".join(begun):
        yield last.decode()


def _client(
    url: str, key: str, timeout_s: float, transport: httpx.AsyncBaseTransport | None
) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
    return httpx.AsyncClient(
        base_url=url, headers=headers, timeout=timeout, transport=transport, **httpx_options(url)
    )


@contextmanager
def _reached(where: str) -> Iterator[None]:
    """Raises FrontUnreachable."""
    try:
        yield
    except httpx.HTTPError as error:
        raise FrontUnreachable(where, str(error) or type(error).__name__) from error
