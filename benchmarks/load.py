"""A closed loop of streaming chat requests over HTTP, with what each client saw."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it."""

    ttft_s: float  # until the first non-empty token
    took_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One closed loop."""

    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(a.tokens for a in self.answers) / self.wall_s

    @property
    def ttft_s(self) -> float:
        ordered = sorted(a.ttft_s for a in self.answers)
        return ordered[len(ordered) // 2]


WORDS = "the arbiter holds a ticket for memory while one model sleeps and another wakes".split()


def prompt(dice: random.Random, words: int = 32) -> str:
    return " ".join(dice.choices(WORDS, k=words))


async def ask(http: aiohttp.ClientSession, url: str, model: str, text: str, tokens: int) -> Answer:
    """One streamed chat completion. Raises aiohttp.ClientError or RuntimeError."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, used = time.perf_counter(), 0.0, 0
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            if not first and any(c["delta"].get("content") for c in chunk["choices"]):
                first = time.perf_counter() - start
            used = (chunk.get("usage") or {}).get("completion_tokens", used)
    took = time.perf_counter() - start
    return Answer(first or took, took, used)


async def closed_loop(
    url: str, models: Sequence[str], *, streams: int, requests: int, tokens: int, seed: int
) -> Run:
    """`streams` clients, each sending its next request when its last is answered, to each of the
    models in turn. `url` may be `unix:PATH`, an engine's own socket."""
    dice = random.Random(seed)
    waiting = [(models[n % len(models)], prompt(dice)) for n in range(requests)]
    answers: list[Answer] = []
    connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=streams)
    if url.startswith("unix:"):
        connector = aiohttp.UnixConnector(path=url.removeprefix("unix:"), limit=streams)
        url = "http://engine"
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def client() -> None:
            while waiting:
                answers.append(await ask(http, url, *waiting.pop(), tokens))

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(client())
        return Run(tuple(answers), time.perf_counter() - start)
