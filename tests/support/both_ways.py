"""A driver of a running cluster that makes each call of the Python client over HTTP and by handle,
and prints what came. Started by tests/graph/test_python.py:

    python -m tests.support.both_ways
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import ray

from arbiter.errors import RequestError, TicketClosed
from deployments.client import AsyncClient, Audio, Delta
from deployments.client.handle import front_handle
from deployments.client.media import Picture
from tests.support.drawings import drawing
from tests.support.waits import eventually

CHAT, LEFT, RERANK = "tiny-chat", "left-chat", "minilm-reranker"
TEXT = "Who holds the memory?"
DOCUMENTS = ["Paris is the capital of France.", "Unload the model to release GPU memory."]
FOX = "The quick brown fox jumps over the lazy dog."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
# Half a minute of work on two cores, unless it is stopped.
LONG: dict[str, Any] = {"max_tokens": 1_900, "n": 16, "extra_body": {"ignore_eos": True}}

Call = Callable[[AsyncClient, Audio], Awaitable[Any]]


async def listed(parts: AsyncGenerator[Any]) -> list[Any]:
    return [part async for part in parts]


async def joined(parts: AsyncGenerator[Delta]) -> list[str | bool]:
    """The text, and whether it came in pieces, of which there are more or fewer by the clock."""
    pieces = [part.text async for part in parts]
    return ["".join(pieces), len(pieces) > 2]


ANSWERED: dict[str, Call] = {
    "chat": lambda c, _: c.chat(TEXT, model=CHAT, **GREEDY),
    "stream_chat": lambda c, _: joined(c.stream_chat(TEXT, model=CHAT, **GREEDY)),
    "complete": lambda c, _: c.complete(TEXT, model=CHAT, **GREEDY),
    "stream_complete": lambda c, _: joined(c.stream_complete(TEXT, model=CHAT, **GREEDY)),
    "embed": lambda c, _: c.embed([TEXT, FOX], model="all-minilm-l6-v2"),
    "rerank": lambda c, _: c.rerank("How do I free memory?", DOCUMENTS, model=RERANK),
    "request": lambda c, _: c.request(
        "/v1/score", {"text_1": TEXT, "text_2": DOCUMENTS[1]}, model=RERANK
    ),
    "describe": lambda c, _: c.describe(
        Picture.of(drawing(8)), model="tiny-describe", **GREEDY
    ),
    "images": lambda c, _: c.images("a red circle on blue", model="tiny-draw", x_seed=3),
    "stream_images": lambda c, _: listed(
        c.stream_images("a red circle on blue", model="tiny-draw", x_seed=3, previews=1)
    ),
    "speak": lambda c, _: c.speak(FOX, model="joe"),
    "vad": lambda c, fox: c.vad(fox, model="silero-vad"),
    "transcribe": lambda c, fox: c.transcribe(fox, model="tiny.en", with_words=True),
    "stream_transcribe": lambda c, fox: listed(c.stream_transcribe(fox, model="tiny.en")),
    "models": lambda c, _: c.models(),
}  # fmt: skip
REFUSED: dict[str, Call] = {
    "no such model": lambda c, _: c.chat(TEXT, model="none"),
    "another capability's model": lambda c, _: c.chat(TEXT, model=RERANK),
    "a wrong field": lambda c, _: c.chat(TEXT, model=CHAT, temperature=-1.0),
    "no sound": lambda c, _: c.transcribe(Audio(b"x" * 1_000), model="tiny.en"),
    "too late": lambda c, _: c.chat(TEXT, model="growing-chat", x_deadline_s=0.001),
    "more than there is": lambda c, _: c.plan("none"),
}


async def main() -> None:
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    async with (
        AsyncClient(os.environ["ARBITER_URL"]) as http,
        AsyncClient(handle=front_handle()) as handle,
        AsyncClient(handle=front_handle(), key="arb-wrong") as stranger,
    ):
        began_s = time.monotonic()
        fox = await http.speak(FOX, model="joe")
        said: dict[str, Any] = {}
        for name, call in ANSWERED.items():
            print(f"{time.monotonic() - began_s:.1f} s: {name}", file=sys.stderr)
            said[name] = [shown(await call(client, fox)) for client in (http, handle)]
        for name, call in REFUSED.items():
            said[name] = [await refusal(call(client, fox)) for client in (http, handle)]
        said["a wrong key"] = await refusal(leased(stranger))
        for done, act in ACTS.items():  # its models are loaded once for both
            print(f"{time.monotonic() - began_s:.1f} s: {done}", file=sys.stderr)
            for name, client in {"http": http, "handle": handle}.items():
                said[f"{done} by {name}"] = await act(client)
    print(f"{time.monotonic() - began_s:.1f} s: the end", file=sys.stderr)
    print(json.dumps(said))


def shown(value: Any) -> Any:
    """As JSON; of a file its hash and size."""
    if isinstance(value, bytes):
        return [len(value), hashlib.sha256(value).hexdigest()]
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items() if name not in ("id", "created")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return shown({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return value


async def refusal(call: Awaitable[Any]) -> Any:
    """Its class and what it says for itself."""
    try:
        return f"answered: {shown(await call)}"
    except RequestError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return [
            kinds[:3],
            error.status_code,
            error.code,
            error.param,
            error.retry_after_s,
            str(error),
        ]


async def in_flight(client: AsyncClient, model: str) -> int:
    return sum(ticket.inflight for ticket in (await client.status()).of_model(model))


async def comes_to(client: AsyncClient, model: str, count: int, within_s: float = 60.0) -> int:
    """So many requests are in flight. Raises TimeoutError."""

    async def look() -> bool:
        return await in_flight(client, model) == count

    is_reached: bool = await eventually(look, within_s)
    assert is_reached
    return count


async def left_early(client: AsyncClient) -> list[int]:
    """Requests in flight during a stream, and after its reader has left it."""
    async for _ in client.stream_chat(TEXT, model=LEFT, **LONG):
        during = await comes_to(client, LEFT, 1)
        break
    return [during, await comes_to(client, LEFT, 0, 10.0)]  # a third of the time it would take


async def acquired(client: AsyncClient) -> list[Any]:
    """Uses of a model that is held and answers, and when it was released."""
    async with client.acquire(CHAT, term_s=60.0) as held:
        await comes_to(client, CHAT, 1)
        [ticket] = (await client.status()).of_model(CHAT)
        text = (await held.chat(TEXT, **GREEDY)).text
        await comes_to(client, CHAT, 1)
    await comes_to(client, CHAT, 0)
    try:
        await held.chat(TEXT)
    except TicketClosed as error:
        return [ticket.ticket == held.ticket, bool(text), type(error).__name__]
    return ["it was answered after its release"]


async def heard(client: AsyncClient) -> list[str]:
    """The models of the requests that ended while a subscriber listened, up to one of CHAT."""
    since = (await client.status()).sequence
    await client.chat(TEXT, model=CHAT, max_tokens=1)
    kinds = []
    async with asyncio.timeout(60):
        async for event in client.subscribe(after=since):
            kinds.append(event.kind)
            if event.fields.get("model") == CHAT:
                break
    return [*kinds[-1:], "in order" if event.sequence > since else "out of order"]


async def leased(client: AsyncClient) -> list[Any]:
    """The state of a lease, and how many there are; returns when its bytes are back."""

    async def count() -> int:
        rows = (await client.status()).plain["tickets"]
        return sum(row["lease"] is not None for row in rows)

    async def none_is_left() -> bool:
        return not await count()

    async with client.lease(0.05, name="python") as held:
        found = [held.state, await count()]
    is_back: bool = await eventually(none_is_left)
    assert is_back
    return found


async def submitted(client: AsyncClient) -> list[Any]:
    """Whether a call that was kept has the answer of the same call made live, by its object and by
    its id; the state of its job, a refusal, and a job that is cancelled."""
    job = await client.submit(client.chat, TEXT, model=CHAT, **GREEDY)
    known = client.job(job.id)
    kept, fields = await job.result(), await known.result()
    live = await client.chat(TEXT, model=CHAT, **GREEDY)
    assert isinstance(fields, dict)
    by_id = fields["choices"][0]["message"]["content"]
    drawn = await client.submit(client.images, "a red circle", model="tiny-draw", x_seed=3)
    [picture] = await drawn.result()
    refused = await refusal(client.submit(client.chat, TEXT, model="none"))
    left = await client.submit(client.chat, TEXT, model=CHAT, **LONG)
    cancelled = await left.cancel()
    return [
        [kept.text == live.text, by_id == live.text, picture.size],
        (await known.status()).state,
        refused[0][0],
        [cancelled.state, (await refusal(left.result()))[2]],
    ]


async def batched(client: AsyncClient) -> list[Any]:
    """Whether each line of a batch of two models has the answer of its call made live; its state,
    and the refusal of a batch with a wrong line."""
    models = (CHAT, "plain-chat")
    lines = [await client.line(name, client.chat, TEXT, model=name, **GREEDY) for name in models]
    batch = await client.submit_batch(lines, completion_window="1h")
    batched = {result.custom_id: result.answer.text async for result in batch.results()}
    live = {name: (await client.chat(TEXT, model=name, **GREEDY)).text for name in models}
    wrong = await client.line("wrong", client.chat, TEXT, model="none")
    refused = await refusal(listed((await client.submit_batch([wrong])).results()))
    return [batched == live, (await batch.status()).state, refused[0][0]]


ACTS: dict[str, Callable[[AsyncClient], Awaitable[Any]]] = {
    "left": left_early,
    "acquired": acquired,
    "heard": heard,
    "leased": leased,
    "submitted": submitted,
    "batched": batched,
}


if __name__ == "__main__":
    asyncio.run(main())
