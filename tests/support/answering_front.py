"""The front's own application over a capability that answers as a test says, on a socket and by a
handle, without Ray."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from arbiter.errors import EngineLost, RequestError
from arbiter.units import TicketId
from deployments import messages
from deployments.client import AsyncClient
from deployments.config.schema import parse_table
from deployments.front import application, by_handle
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService, Send
from deployments.front.status.serve_status import Applications
from deployments.jobs.client import JobsClient
from deployments.jobs.service import JobsService

MODEL, OTHER = "model", "other"
SSE = messages.ResponseHead(200, {"content-type": "text/event-stream"}, is_chunked=True)
JSON = {"content-type": "application/json"}


def whole(value: object) -> messages.FullResponse:
    return messages.FullResponse(messages.ResponseHead(200, JSON), json.dumps(value).encode())


def events(*values: object, last: bytes = b"data: [DONE]\n\n") -> list[messages.Part]:
    said = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values]
    return [SSE, b": a comment\n\n", *said, last]


class Response:
    """Stands for Serve's response generator, of a capability or of the front."""

    def __init__(self, parts: AsyncGenerator[Any, None]) -> None:
        self._parts, self.was_cancelled = parts, threading.Event()

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._parts

    def __iter__(self) -> Iterator[Any]:
        """In a thread without a loop."""

        async def read() -> list[Any]:
            return [part async for part in self._parts]

        return iter(asyncio.run(read()))

    async def __anext__(self) -> Any:
        return await anext(self._parts)

    def cancel(self) -> None:
        self.was_cancelled.set()
        self._closing = asyncio.ensure_future(self._parts.aclose())


class AnsweringFront:
    """`answers`: parts, or an error, by path. `holds`: paths that stay open behind
    their parts; `breaks`: paths whose engine dies there."""

    def __init__(self, folder: Path) -> None:
        self.answers: dict[str, list[messages.Part] | RequestError] = {}
        self.holds: set[str] = set()
        self.breaks: set[str] = set()
        self.calls: list[messages.InferenceCall] = []
        self.responses: list[Response] = []
        file = folder / "keys.json"
        keys.ensure_first(file)
        self.key = keys.first_key_path(file).read_text().strip()
        models = {name: {"source": "x"} for name in (MODEL, OTHER)}
        # What paths a class of another package serves is known to its replica alone.
        chat = {"role": "text", "engine": "m:f", "class": "another:Class", "models": models}
        service = InferenceService(self._send_of)
        service.configure(parse_table({"capabilities": {"all": chat}}))
        auth = Authenticator(Keyring(file))
        self.state = FrontState(7, auth, service, Applications(dict))
        self.app = application.build(self.state)

    @contextlib.asynccontextmanager
    async def with_jobs(self, folder: Path) -> AsyncGenerator[None, None]:
        """A process of jobs on this loop, whichever loop the front is asked on."""
        loop = asyncio.get_running_loop()

        async def service() -> InferenceService:
            return self.state.service

        async def send(method: str, *args: Any) -> Any:
            work = getattr(jobs, method)(*args)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

        jobs = self.jobs = JobsService(folder / "arbiter.sqlite", service)
        jobs.start()
        self.state.jobs = JobsClient(send)
        try:
            yield
        finally:
            await jobs.close()

    def says(self, path: str, *parts: messages.Part) -> None:
        self.answers[path] = list(parts)

    @property
    def body(self) -> dict[str, Any]:
        """Of the last call."""
        body: dict[str, Any] = json.loads(self.calls[-1].body)
        return body

    def _send_of(self, capability: str) -> Send:
        return self._send

    def _send(self, call: messages.InferenceCall) -> Response:
        self.calls.append(call)
        self.responses.append(Response(self._answer(call)))
        return self.responses[-1]

    async def _answer(self, call: messages.InferenceCall) -> AsyncGenerator[messages.Part, None]:
        answer = self.answers[call.path]
        if isinstance(answer, RequestError):
            yield messages.FullResponse(*messages.refusal(answer))
            return
        for part in answer:
            yield part
        if call.path in self.breaks:
            raise EngineLost(call.model, TicketId("t"))
        if call.path in self.holds:
            await asyncio.Event().wait()

    # -- the two ways to it ----------------------------------------------------------------------

    def options(self, *, stream: bool) -> "AnsweringFront":
        """As a Serve handle has it; `handle.respond.remote(request)`."""
        assert stream
        return self

    @property
    def respond(self) -> "AnsweringFront":
        return self

    def remote(self, asked: by_handle.HandleRequest) -> Response:
        return Response(by_handle.respond(self.app, asked))

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address, for as long as it listens."""
        with socket.create_server(("127.0.0.1", 0)) as bound:
            server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, lifespan="off"))
            thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{bound.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join(60)


@contextlib.asynccontextmanager
async def both(front: AnsweringFront) -> AsyncGenerator[dict[str, AsyncClient], None]:
    """A client over HTTP and one by handle."""
    with front.serving() as url:
        async with (
            AsyncClient(url, key=front.key, model=MODEL) as over_http,
            AsyncClient(handle=front, key=front.key, model=MODEL) as by_handle_,
        ):
            yield {"http": over_http, "handle": by_handle_}
