"""Whose request this is, how urgent, and until when it must have begun: what the front and the
replica say in its headers, kept from the route that reads them to where it waits: for the turn of
its pictures, and in `generate`.

A client cannot say any of it, because the front passes none of a client's own headers of these
names on.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sized
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from typing import Any

from arbiter.core.types import Priority
from arbiter.errors import RequestError
from deployments import messages
from deployments.engines import asgi
from deployments.engines.protocol import Scope, Send
from deployments.engines.vllm.batching.batch_admission import WaitingRequest
from deployments.engines.vllm.batching.batch_gate import BatchGate


@dataclass(slots=True)
class Caller:
    """The sender of one request, and the error that ended its wait."""

    tenant: str = ""
    priority: int = Priority.NORMAL
    expires_s: float = inf  # on the monotonic clock
    is_prewarm: bool = False  # its tokens are charged to no tenant, and it is no use of an adapter
    refused: RequestError | None = None


# The caller of requests that the engine makes itself, as after a wake: they wait for nothing.
_OURS = Caller(priority=Priority.URGENT)
_CALLER: ContextVar[Caller] = ContextVar("caller", default=_OURS)


def current() -> Caller:
    """The caller of the request that this task answers."""
    return _CALLER.get()


def begin(scope: Scope) -> Caller:
    """Reads the caller from a request's headers. From here on it is `current` in this task and in
    those that it starts."""
    headers = dict(scope["headers"])

    def header(name: str) -> str:
        value: bytes = headers.get(name.encode(), b"")
        return value.decode("latin-1")

    caller = Caller(
        header(messages.TENANT_HEADER),
        int(header(messages.PRIORITY_HEADER) or Priority.NORMAL),
        time.monotonic() + float(header(messages.DEADLINE_HEADER) or inf),
    )
    _CALLER.set(caller)
    return caller


@asynccontextmanager
async def place(
    gate: BatchGate, adapter: str, name: str, tokens: int
) -> AsyncIterator[WaitingRequest]:
    """The current request's place in the batch. Raises what `gate.enter` raises."""
    caller = current()
    request = await gate.enter(
        adapter,
        name,
        tenant=caller.tenant,
        priority=caller.priority,
        tokens=0 if caller.is_prewarm else tokens,
        expires_s=caller.expires_s,
    )
    try:
        yield request
    finally:
        gate.leave(request)


def note_refusal(error: RequestError) -> RequestError:
    """Notes for HeldHead the error that ends a wait within `generate`, where vLLM would answer with
    a status of its own. Returns the error, to be raised."""
    current().refused = error
    return error


class HeldHead:
    """Keeps the head back until the first bytes, so that a request that `generate` refuses gets its
    own status although vLLM has begun a stream."""

    def __init__(self, caller: Caller, send: Send) -> None:
        self._caller, self._send = caller, send
        self._head: Any = None
        self.has_begun = False  # the client has a head

    async def __call__(self, message: Any) -> None:
        if self.has_begun:
            return await self._send(message)
        if message["type"] == "http.response.start":
            self._head = message
        elif refused := self._caller.refused:
            if self._head is not None:
                self._head = None
                await asgi.refuse_request(self._send, refused)
        elif self._head is not None:
            self.has_begun = True
            if self._head["status"] == 400 and not message.get("more_body"):
                self._head, message = with_field(self._head, message)
            await self._send(self._head)
            await self._send(message)


# Fields that vLLM's refusals begin with and do not name as `param` (vllm/sampling_params.py).
_UNNAMED = frozenset(
    "n presence_penalty frequency_penalty repetition_penalty top_k min_p min_tokens stop "
    "stop_token_ids bad_words".split()
)


def with_field(head: Any, message: Any) -> tuple[Any, Any]:
    """Returns the head and body of a refusal, with the field at fault as `param` where vLLM says it
    in its text alone."""
    try:
        plain = json.loads(message["body"])
        text, param = plain["error"]["message"], plain["error"]["param"]
        field = text.split(maxsplit=1)[0]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return head, message  # another form of error, as Anthropic's
    if param is not None or field not in _UNNAMED:
        return head, message
    plain["error"]["param"] = field
    body = json.dumps(plain).encode()
    others = [(name, value) for name, value in head["headers"] if name != b"content-length"]
    headers = [*others, (b"content-length", b"%d" % len(body))]
    return head | {"headers": headers}, message | {"body": body}


def prompt_tokens(prompt: object) -> int:
    """The number of tokens in a prompt as vLLM's routes render it; 1 for a prompt that has no list
    of tokens, as embeddings have none."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    return max(1, len(ids)) if isinstance(ids, Sized) else 1


class AnswerTokens:
    """Counts what each part of an answer adds, whether parts carry what is new or all so far."""

    def __init__(self, params: Any) -> None:
        self._deltas = params.output_kind.name == "DELTA"
        self._seen: dict[int, int] = {}  # by choice

    def added(self, output: Any) -> int:
        """The tokens that this part adds, over all choices."""
        total = 0
        for choice in output.outputs:
            count = len(choice.token_ids)
            total += count if self._deltas else count - self._seen.get(choice.index, 0)
            self._seen[choice.index] = count
        return total
