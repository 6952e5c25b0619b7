"""Seconds to the first token from each state of rest, against a bare `vllm serve` (SPEC N3).

    python -m benchmarks.first_token --model tiny-chat --rounds 5

States: zero replicas and no engine; replica up and engine gone; asleep. The bare start is measured
in the same run, cold process, warm page cache, from exec to the first token of its first answer.
"""

import argparse
import asyncio
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import aiohttp

from benchmarks import load, report, servers
from benchmarks.throughput import ENGINE_ARGS, graph_config
from deployments import plan

EMBED = "all-minilm-l6-v2"


def trading_config(model: str, port: int) -> dict[str, Any]:
    """Chat and embeddings in a budget that cannot hold both, keep-warm as told."""
    config = graph_config(model, port)
    chat = config["applications"][0]["deployments"][0]["user_config"]["capabilities"]["chat"]
    chat["keep_warm_s"], chat["downscale_to_zero_s"] = 3, 1_000
    return config


def ask(url: str, model: str) -> float:
    """TTFT of one short streamed answer, as the client sees it."""

    async def one() -> load.Answer:
        async with aiohttp.ClientSession() as http:
            return await load.ask(http, url, model, "who holds the memory", 4)

    return asyncio.run(one()).ttft_s


def state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/arbiter/state", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.05)


def engine_gone(url: str, model: str, rounds: int) -> list[float]:
    """Replica up, keep-warm over, no engine."""
    found = []
    for _ in range(rounds + 1):
        until(lambda: not state(url)["tickets"], 60, "the engine is gone")
        found.append(ask(url, model))
    return found[1:]


def zero_replicas(url: str, model: str, rounds: int) -> list[float]:
    """Serve lists no replica."""
    found = []
    for _ in range(rounds + 1):
        until(lambda: not state(url)["holders"], 120, "no holder is left")
        found.append(ask(url, model))
    return found[1:]


def bare(path: str, model: str, rounds: int) -> list[float]:
    """exec of `vllm serve` to the first token."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        with servers.bare_vllm(path, model, ENGINE_ARGS, 18_411) as url:
            ready_s = time.perf_counter() - start
            found.append(ready_s + ask(url, model))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    figures: dict[str, Any] = {"model": args.model}
    config = trading_config(args.model, 18_410)
    chat = config["applications"][0]["deployments"][0]["user_config"]["capabilities"]["chat"]
    with servers.our_graph(config, "default") as url:
        ask(url, args.model)
        figures["engine_gone_s"] = report.Sample(tuple(engine_gone(url, args.model, args.rounds)))
    chat["downscale_to_zero_s"] = 1
    with servers.our_graph(config, "default") as url:
        ask(url, args.model)
        figures["zero_replicas_s"] = report.Sample(
            tuple(zero_replicas(url, args.model, args.rounds))
        )
    path = plan.resolve(f"made:{args.model}")
    figures["bare_vllm_s"] = report.Sample(tuple(bare(path, args.model, args.rounds)))
    for name in ("engine_gone_s", "zero_replicas_s"):
        ratio = figures[name].median / figures["bare_vllm_s"].median
        figures[name.removesuffix("_s") + "_ratio"] = ratio
        print(f"{name}: {figures[name]} s, {ratio:.3f} of bare vllm serve")
    print(f"bare_vllm_s: {figures['bare_vllm_s']} s")
    report.write("first_token", figures, label=args.model)


if __name__ == "__main__":
    main()
