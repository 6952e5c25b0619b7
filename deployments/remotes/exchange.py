"""One request to a remote and its answer: bounded in bytes and seconds, checked before it goes on.

    exchange = Exchange(row, call)
    async with aclosing(exchange.parts()) as parts: ...     # as a capability's
    exchange.prompt_tokens, exchange.answer_tokens                   # also where it broke off

The answer's head is made here, and of an event stream only `data:` lines with JSON go on, so that
nothing else of the remote's reaches a client. The first part comes with the first whole event:
until then another model can take over, and after it none can.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import aiohttp

from deployments import messages
from deployments.config.checked_sockets import AddressRefused
from deployments.config.remotes_section import RemoteConfig
from deployments.remotes import connect
from deployments.remotes.answer_forms import WrongForm, check_event, check_whole
from deployments.remotes.body import BYTES_PER_TOKEN
from deployments.remotes.breaker import Failure
from deployments.remotes.offers import SERVED_BY, RemoteCall

logger = logging.getLogger("ray.serve")

SSE, JSON = "text/event-stream", "application/json"
EVENT_MOST_BYTES = 1 << 20  # of one event: a picture in it does not come by these paths
DONE = b"[DONE]"
# Nothing has left when a connection could not be made, so it is tried a second time.
CONNECT_TRIES = 2
_MOST_TOKENS = 1 << 40  # that a remote may say it has counted


class Failed(Exception):
    """The remote's answer is none. `why` has no word of the remote's own."""

    def __init__(self, failure: Failure, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(failure, why)
        self.failure, self.why, self.retry_after_s = failure, why, retry_after_s


class Refused(Exception):
    """The remote is well, and refuses this request."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Exchange:
    """One use of a remote: iterate `parts` once, then read what it cost. `resolver`: of host names,
    in place of the system's."""

    def __init__(
        self,
        row: RemoteConfig,
        call: RemoteCall,
        resolver: aiohttp.abc.AbstractResolver | None = None,
    ) -> None:
        self._row, self._call, self._resolver = row, call, resolver
        self._model = row.models[call.model]
        self.is_whole = False  # the whole answer has come
        # The remote may bill the request: it was sent, and no status says that it failed.
        self._is_billed = False
        self.answer_bytes = 0
        self._usage: dict[str, int] = {}
        self._counted_bytes = 0  # of the answer, to estimate its tokens where it has no usage

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the remote counted them, else estimated; 0 where it bills
        nothing."""
        if not self._is_billed:
            return 0
        return self._usage.get("prompt_tokens", self._call.prompt_tokens)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer as the remote counted them, else estimated. Of a broken answer, or
        where the client left, as many as it might have had: the remote may have billed them all."""
        if not self._is_billed:
            return 0
        about = -(-self._counted_bytes // BYTES_PER_TOKEN)
        unsaid = about if self.is_whole else self._call.answer_tokens
        return self._usage.get("completion_tokens", unsaid)

    async def parts(self) -> AsyncGenerator[messages.Part, None]:
        """Raises Failed, Refused. Closing it closes the connection."""
        async with _translated(), connect.session(self._row, self._resolver) as session:
            response = await self._sent(session)
            try:
                self._check_head(response)
                if self._is_stream(response):
                    async for part in self._events(response):
                        yield part
                else:
                    yield await self._whole(response)
            finally:
                response.close()

    async def _sent(self, session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
        """Sends the request, and returns the response once its head has come."""
        url = self._row.endpoint(self._call.path)
        headers = connect.headers(self._row, is_stream=self._call.is_stream)
        for number in range(1, CONNECT_TRIES + 1):
            self._is_billed = True
            try:
                async with asyncio.timeout(self._row.bounds.head_s):
                    return await session.post(
                        url, data=self._call.body, headers=headers, allow_redirects=False
                    )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                self._is_billed = False
                if number == CONNECT_TRIES:
                    raise
        raise AssertionError("the last try returns or raises")

    def _check_head(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        self._is_billed = status < 400
        if status == 429:
            after_s = _seconds(response.headers.get("retry-after", ""))
            raise Failed(Failure.LIMITED, "it has too many requests (429)", after_s)
        if status == 401:
            raise Failed(Failure.KEY, "it does not take our key (401)")
        if status == 403:
            raise Failed(Failure.FORBIDDEN, "it forbids this request, or our key (403)")
        if status >= 500:
            raise Failed(Failure.SERVER, f"its status is {status}")
        if status >= 400:
            raise Refused(status)
        if status != 200:
            raise Failed(Failure.PROTOCOL, f"its status is {status}, and no redirect is followed")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise Failed(Failure.PROTOCOL, "it answers compressed, which was not asked for")

    def _is_stream(self, response: aiohttp.ClientResponse) -> bool:
        media_type = SSE if self._call.is_stream else JSON
        if response.content_type != media_type:
            raise Failed(Failure.PROTOCOL, f"its answer is not {media_type}")
        return self._call.is_stream

    async def _whole(self, response: aiohttp.ClientResponse) -> messages.FullResponse:
        raw = b"".join([piece async for piece in self._pieces(response)])
        answer = _object(raw)
        self._note_usage(answer)
        self._counted_bytes = len(raw)
        self.is_whole = True
        if _has_error(answer):
            raise Failed(Failure.SERVER, "its answer is an error of status 200")
        with _in_form():
            check_whole(self._call.path, answer)
        return messages.FullResponse(self._head(JSON), raw)

    async def _events(
        self, response: aiohttp.ClientResponse
    ) -> AsyncGenerator[messages.Part, None]:
        has_begun = False
        async for data in _data_lines(self._pieces(response)):
            if data != DONE and not self._goes_on(_object(data)):
                continue
            if not has_begun:
                has_begun = True
                yield self._head(SSE, is_chunked=True)
            self.is_whole = data == DONE
            yield b"data: " + data + b"\n\n"
            if self.is_whole:
                return
        raise Failed(Failure.BROKEN, "its stream ended without [DONE]")

    def _goes_on(self, event: dict[str, Any]) -> bool:
        """Whether an event goes on to the client: all do but one with the usage, where the client
        did not ask for it. Raises Failed for an event with an error."""
        if _has_error(event):
            raise Failed(Failure.SERVER, "it broke off with an error in its stream")
        with _in_form():
            check_event(event)
        self._note_usage(event)
        choices = event.get("choices")
        if choices:
            self._counted_bytes += len(json.dumps(choices))
        return bool(choices) or self._call.tells_usage or not isinstance(event.get("usage"), dict)

    def _note_usage(self, answer: dict[str, Any]) -> None:
        usage = answer.get("usage")
        for name in ("prompt_tokens", "completion_tokens"):
            count = usage.get(name) if isinstance(usage, dict) else None
            if type(count) is int and 0 <= count <= _MOST_TOKENS:
                self._usage[name] = count

    def _head(self, kind: str, *, is_chunked: bool = False) -> messages.ResponseHead:
        served_by = f"{self._call.remote}/{self._model.name}"
        return messages.ResponseHead(
            200, {"content-type": kind, SERVED_BY: served_by}, is_chunked=is_chunked
        )

    async def _pieces(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        bounds = self._row.bounds
        while True:
            left_bytes = bounds.answer_bytes - self.answer_bytes
            async with asyncio.timeout(bounds.idle_s):
                # One byte more than may come shows that the answer is too large.
                piece = await response.content.read(left_bytes + 1)
            if not piece:
                return
            self.answer_bytes += len(piece)
            if self.answer_bytes > bounds.answer_bytes:
                why = f"its answer is larger than {bounds.answer_bytes} bytes; ask for less of it"
                raise Failed(Failure.SIZE, why)
            yield piece


async def _data_lines(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The data of each event; one line each, as all servers of this API write them."""
    rest = b""
    async with aclosing(pieces):
        async for piece in pieces:
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > EVENT_MOST_BYTES:
                raise Failed(Failure.SIZE, f"one of its events is over {EVENT_MOST_BYTES} bytes")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line.removeprefix(b"data:").strip()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise Failed(Failure.PROTOCOL, "its answer is no JSON object")
    return parsed


def _refuse_constant(word: str) -> None:
    """Raises Failed: Python reads and writes NaN and Infinity, and a client's JSON has neither."""
    raise Failed(Failure.FORM, f"a number of its answer is {word}, which is not JSON")


@contextmanager
def _in_form() -> Iterator[None]:
    """Raises Failed where the answer has another form than its path has."""
    try:
        yield
    except WrongForm as error:
        why = f"`{error.place}` of its answer is missing, or of another type"
        raise Failed(Failure.FORM, why) from error


def _has_error(answer: dict[str, Any]) -> bool:
    """Whether an answer is an error, which some servers send with the status 200. Others write
    `"error": null` into each answer."""
    return answer.get("error") is not None


def _seconds(text: str) -> float | None:
    return float(text) if text.isdecimal() and len(text) <= 6 else None


# What an exchange may raise, each subclass before its bases, with the failure and the text for it.
# The errors' own texts are not used, because they may repeat what the remote sent.
_MEANINGS: tuple[tuple[type[Exception], Failure, str], ...] = (
    (connect.KeyUnusable, Failure.KEY, "the key that the table names cannot be used"),
    (
        aiohttp.ClientConnectorCertificateError,
        Failure.CERTIFICATE,
        "its certificate is not valid for its name",
    ),
    (aiohttp.ClientSSLError, Failure.CERTIFICATE, "it speaks no TLS that this machine takes"),
    (aiohttp.ClientConnectorDNSError, Failure.CONNECT, "its name has no address"),
    (aiohttp.ClientConnectorError, Failure.CONNECT, "no connection could be made"),
    (aiohttp.ConnectionTimeoutError, Failure.CONNECT, "no connection was made in time"),
    (TimeoutError, Failure.TIMEOUT, "it took longer than its bounds allow"),
    (aiohttp.ClientResponseError, Failure.PROTOCOL, "its answer is no HTTP that is taken"),
    (aiohttp.http.HttpProcessingError, Failure.PROTOCOL, "its answer is no HTTP that is taken"),
    (aiohttp.ClientError, Failure.BROKEN, "the connection broke off"),
    (OSError, Failure.BROKEN, "the connection broke off"),
)
_KINDS = tuple(kind for kind, _, _ in _MEANINGS)


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """Turns the errors of _MEANINGS into Failed."""
    try:
        yield
    except _KINDS as error:
        logger.warning("a remote did not answer: %s: %s", type(error).__name__, error)
        failure, why = next((f, w) for kind, f, w in _MEANINGS if isinstance(error, kind))
        cause = getattr(error, "os_error", None)
        if isinstance(cause, AddressRefused):
            why = "its name has an address that is not allowed"
        raise Failed(failure, why) from error
