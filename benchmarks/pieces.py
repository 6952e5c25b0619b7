"""Pieces of many streams a second: through the graph against reading the engine's own socket.

    python -m benchmarks.pieces --pieces-per-s 10000 --streams 256 --pairs 10

The engine is a stand-in that computes nothing: each of its streams sends a piece, as long as one of
vLLM's chat chunks, at every tick of a clock, and at once where it is late. So what is lost is lost
between the engine and the client. Where even its own socket does not carry the rate, the ratio is
to what that carries.
"""

import argparse
import asyncio
import copy
import json
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from benchmarks import report, servers
from deployments.engines.protocol import Config, Receive, Scope, Send
from tests.support.engine_host import zygote
from tests.support.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[1]
ENGINE = "benchmarks.pieces:build"
SOURCE = str(ROOT / "benchmarks" / "one_card")  # not read: a small folder that is there
MODEL = "pieces"
SSE = [(b"content-type", b"text/event-stream")]
DELTA = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
CHUNK = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1_700_000_000,
    "model": MODEL,
    "choices": [DELTA],
}
PIECE = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
LAST = b"data: [DONE]\n\n"
MARK = b'"chat.completion.chunk"'


class Metronome(FakeEngine):
    """`max_tokens` pieces, one each `interval_s` of `engine_args`."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body += message.get("body", b"")
            is_more = message.get("more_body", False)
        loop = asyncio.get_running_loop()
        interval_s, due_s = float(self.args["interval_s"]), loop.time()
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for _ in range(json.loads(body)["max_tokens"]):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            due_s += interval_s
            if (early_s := due_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
        await send({"type": "http.response.body", "body": LAST})


def build(config: Config) -> FakeEngine:
    return Metronome(config)


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    return {"interval_s": args.streams / args.pieces_per_s}


def graph_config(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """The shipped configuration with the stand-in alone, which stays loaded."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config = copy.deepcopy(config)
    config["http_options"]["port"] = port
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["arbiter"] |= {"pipelines": []}
    model = {"source": SOURCE, "need": {"weights": "1 MiB"}, "engine_args": engine_args(args)}
    chat = {"role": "text", "engine": ENGINE, "keep_warm_s": -1, "downscale_to_zero_s": 3600}
    chat |= {"models": {MODEL: model}}
    table["capabilities"] = {"chat": chat}
    return config


@dataclass(slots=True)
class Arrivals:
    """Of one stream: how many pieces had come at which moment."""

    moments_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def note(self, more: int) -> None:
        self.moments_s.append(time.perf_counter())
        self.counts.append((self.counts[-1] if self.counts else 0) + more)

    def by(self, moment_s: float) -> int:
        before = bisect_right(self.moments_s, moment_s)
        return self.counts[before - 1] if before else 0


async def answer(url: str, count: int) -> Arrivals:
    """One stream, read as bytes and nothing more; a client that parses would be what is measured.
    Raises OSError, and RuntimeError where a piece is missing."""
    body = {"model": MODEL, "stream": True, "max_tokens": count}
    sent = json.dumps(body | {"messages": [{"role": "user", "content": "Count."}]}).encode()
    if url.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix:"))
    else:
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    came, tail = Arrivals(), b""
    while part := await reader.read(1 << 16):
        if not came.counts and not part.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{url}: {part[:300]!r}")
        # The end of a part may be half a mark, so that much of it is looked at again.
        looked = tail + part
        came.note(looked.count(MARK))
        tail = looked[looked.rfind(MARK) + len(MARK) :] if MARK in looked else looked
        tail = tail[-len(MARK) + 1 :]
    writer.close()
    if came.counts[-1] != count:
        raise RuntimeError(f"{url}: {came.counts[-1]} of {count} pieces")
    return came


async def pieces_per_s(url: str, streams: int, count: int) -> float:
    """While all streams run: from the first piece of the last to the end of the first. Raises what
    `answer` raises."""
    all_came = await asyncio.gather(*(answer(url, count) for _ in range(streams)))
    first_s = max(came.moments_s[0] for came in all_came)
    last_s = min(came.moments_s[-1] for came in all_came)
    if last_s <= first_s:
        raise RuntimeError(f"{url}: streams of {count} pieces end before all have begun")
    pieces = sum(came.by(last_s) - came.by(first_s) for came in all_came)
    return pieces / (last_s - first_s)


async def pairs(ours: str, engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """Interleaved runs."""
    rates: dict[str, list[float]] = {ours: [], engine: []}
    count = round(args.seconds * args.pieces_per_s / args.streams)
    for number in range(args.pairs + 1):
        for url in (ours, engine) if number % 2 else (engine, ours):
            rate = await pieces_per_s(url, args.streams, count)
            if number:  # the first pair warms both
                rates[url].append(rate)
    return {
        "pieces_per_s_ours": report.Sample(tuple(rates[ours])),
        "pieces_per_s_engine": report.Sample(tuple(rates[engine])),
        "ratio": report.paired_ratio(rates[ours], rates[engine]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces-per-s", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a run at that rate")
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    config = graph_config(18_407, args)
    with (
        zygote("tests.support.fake_engine") as running,
        servers.our_graph(config, "default") as url,
    ):
        asked = {"model": SOURCE, "served_name": MODEL, "engine_args": engine_args(args)}
        child = running.spawn("alone", ENGINE, asked).hold()
        status, body = child.ready()
        assert status == 200, body
        row = asyncio.run(pairs(url, f"unix:{child.path}", args))
        child.let_go()
    print(f"{args.streams} streams, {args.pieces_per_s} pieces a second asked for:")
    print(f"  {row['pieces_per_s_ours']}, {row['ratio']} of the engine's own socket", flush=True)
    report.write("pieces", {"asked": vars(args)} | row, 0)


if __name__ == "__main__":
    main()
