"""Remotes to ask in tests, over real sockets of loopback: a good remote, OpenAI's API under
uvicorn, and a hostile remote, which sends the bytes that a test gives it.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from arbiter.errors import RemoteBudgetSpent
from arbiter.protocol.messages import DaySpent, Egress, EgressEnd

WORDS = ("Here", " is", " elsewhere", ".")
USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Seen:
    """What a remote was sent."""

    headers: list[tuple[str, str]]
    body: dict[str, Any]
    path: str


@dataclass
class GoodRemote:
    """Answers chats with WORDS. `status`: refuses with it instead."""

    port: int = 0
    status: int = 200
    seen: list[Seen] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client left a stream
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)  # a stream waits for it
    waits_after: int | None = None  # words of a stream

    def __post_init__(self) -> None:
        self.goes_on.set()

    def headers_of(self, body: dict[str, Any], key: str) -> dict[str, str]:
        """All that a whole chat with this body may be sent with."""
        return {
            "host": f"127.0.0.1:{self.port}",
            "content-type": "application/json",
            "content-length": str(len(json.dumps(body))),
            "connection": "close",
            "accept": "application/json",
            "accept-encoding": "identity",
            "user-agent": "serve-arbiter",
            "authorization": f"Bearer {key}",
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def app(self) -> FastAPI:
        made = FastAPI()
        made.post("/v1/chat/completions")(self._chat)
        made.post("/v1/embeddings")(self._embed)
        return made

    async def _take(self, request: Request) -> dict[str, Any]:
        body = json.loads(await request.body())
        self.seen.append(Seen(list(request.headers.items()), body, request.url.path))
        return dict(body)

    async def _embed(self, request: Request) -> Response:
        await self._take(request)
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]
        return JSONResponse({"object": "list", "data": data, "usage": {"prompt_tokens": 3}})

    async def _chat(self, request: Request) -> Response:
        body = await self._take(request)
        if self.status != 200:
            key = request.headers.get("authorization")
            return JSONResponse({"error": {"message": f"no: {key}, {body}"}}, self.status)
        if body.get("stream"):
            return StreamingResponse(self._words(body), media_type="text/event-stream")
        message = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        whole = {"id": "there", "object": "chat.completion", "model": body["model"]}
        answer = JSONResponse(whole | {"choices": [choice], "usage": USAGE})
        answer.headers["set-cookie"] = "them=1"
        answer.headers["x-served-elsewhere"] = "yes"
        return answer

    async def _words(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            for number, word in enumerate(WORDS):
                if number == self.waits_after:
                    await self.goes_on.wait()
                choice = {"index": 0, "delta": {"content": word}}
                chunk = {"id": "there", "object": "chat.completion.chunk", "choices": [choice]}
                yield b"event: odd\nid: 7\ndata: " + json.dumps(chunk).encode() + b"\n\n"
            if body.get("stream_options", {}).get("include_usage"):
                yield b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


@contextlib.asynccontextmanager
async def good_remote() -> AsyncIterator[GoodRemote]:
    """One under uvicorn, on a free port of loopback."""
    remote = GoodRemote()
    config = uvicorn.Config(
        remote.app(), host="127.0.0.1", port=0, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    listening = config.bind_socket()
    remote.port = listening.getsockname()[1]
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield remote
    finally:
        remote.goes_on.set()
        server.should_exit = server.force_exit = True
        await running


@contextlib.asynccontextmanager
async def raw_remote(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a server that reads a request's head and then does what `answer` does."""
    running: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass
class CountingBook:
    """An arbiter's side of the budgets, in memory."""

    left_for: list[Egress] = field(default_factory=list)
    ends: list[EgressEnd] = field(default_factory=list)
    error: Exception | None = None
    unsettled: list[Exception] = field(default_factory=list)  # of the next ends, one each

    async def reserve(self, egress: Egress) -> DaySpent:
        if self.error is not None:
            raise self.error
        self.left_for.append(egress)
        return DaySpent(egress.tokens_count, egress.money_micros)

    async def settle(self, end: EgressEnd) -> DaySpent:
        if self.unsettled:
            raise self.unsettled.pop(0)
        self.ends.append(end)
        tokens = sum(e.prompt_tokens_count + e.answer_tokens_count for e in self.ends)
        return DaySpent(tokens, sum(e.money_micros for e in self.ends))


SPENT = RemoteBudgetSpent("cloud", "default", 1, 2, 2, "tokens", 60.0)
