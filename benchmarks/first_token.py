"""Seconds to the first token from each state of rest, against a bare `vllm serve` (N3).

    python -m benchmarks.first_token --model small-chat --rounds 5

States: asleep (the embedding model took the device); replica up and engine gone; zero replicas. The
bare start is measured in the same run, from exec to the first token of its first answer, with the
page cache warm.
"""

import argparse
import asyncio
import copy
import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks import load, owned, report, servers
from deployments.config import load_plan

ROOT = Path(__file__).resolve().parents[1]
EMBED = "all-minilm-l6-v2"
PORT = 18_410
MIN_RESIDENCY_S = 5.0  # several loads of the embedding model; see Settings.min_residency_loads
QUIET_WITHIN_S = 20.0  # of a graph left alone it takes two; a machine others use never does


def shipped(keep_warm_s: float, downscale_s: float) -> dict[str, Any]:
    """The shipped configuration, whose budget holds one model, with other times."""
    config: dict[str, Any] = copy.deepcopy(yaml.safe_load((ROOT / "serve_config.yaml").read_text()))
    config["http_options"]["port"] = PORT
    for capability in table_of(config)["capabilities"].values():
        capability["keep_warm_s"], capability["downscale_to_zero_s"] = keep_warm_s, downscale_s
    return config


def table_of(config: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = config["applications"][0]["deployments"][0]["user_config"]
    return table


def ask(url: str, model: str) -> float:
    """TTFT of one short streamed answer, as the client sees it."""

    async def one() -> load.Answer:
        async with aiohttp.ClientSession() as http:
            return await load.ask(http, url, model, "who holds the memory", 4)

    return asyncio.run(one()).ttft_s


def state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/arbiter/state", timeout=10) as answer:
        body: dict[str, Any] = json.load(answer)
        return body


def until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.05)


def embed(url: str) -> None:
    body = json.dumps({"model": EMBED, "input": "a ticket"}).encode()
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/embeddings", body, head)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def chat_states(url: str) -> list[str]:
    return [t["state"] for t in state(url)["tickets"] if t["capability"] == "chat"]


def asleep(url: str, model: str) -> float:
    """The device was taken by the embedding model, long enough ago for it to give way at once."""
    embed(url)
    until(lambda: chat_states(url) == ["asleep"], 30, f"{model} is asleep")
    time.sleep(MIN_RESIDENCY_S)
    return ask(url, model)


def no_engine_left(url: str) -> None:
    """Keep-warm is over."""
    until(lambda: not state(url)["tickets"], 120, "the engines are gone")


def engine_gone(url: str, model: str) -> float:
    """Replica up."""
    no_engine_left(url)
    return ask(url, model)


def no_replica_left(url: str) -> None:
    """The arbiter knows no holder, and the last replica's process has ended."""
    until(lambda: not state(url)["holders"] and not owned.has_replica(), 120, "no replica is left")


def at_rest(url: str) -> None:
    """No replica: what the last one's end took of the machine is no part of a start, and the spare
    worker that it took has been replaced."""
    no_replica_left(url)
    until(owned.has_spare, 60, "a spare worker is at hand")
    if not owned.wait_for_quiet(QUIET_WITHIN_S):
        print("the machine is at other work; this round is an upper bound", flush=True)


def zero_replicas(url: str, model: str) -> float:
    at_rest(url)
    return ask(url, model)


def measured(
    rest: Callable[[str, str], float], model: str, rounds: int, config: dict[str, Any]
) -> report.Sample:
    """The first answer, which waits for the zygote's imports, is not counted."""
    with servers.our_graph(config, "default") as url:
        ask(url, model)
        return report.Sample(tuple(rest(url, model) for _ in range(rounds)))


def bare(model: str, engine_args: dict[str, Any], rounds: int) -> report.Sample:
    """exec of a bare server to the first token."""
    seconds = []
    args = {k: load_plan.plain(k, v) for k, v in engine_args.items()} | {"enforce_eager": True}
    for _ in range(rounds):
        start = time.perf_counter()
        with servers.bare_vllm(load_plan.resolve(f"made:{model}"), model, args, PORT + 1) as url:
            ready_s = time.perf_counter() - start
            seconds.append(ready_s + ask(url, model))
    return report.Sample(tuple(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = table_of(shipped(2, 1))["capabilities"]["chat"]["models"]
    parser.add_argument("--model", default="small-chat", choices=sorted(models))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    states: list[tuple[str, Callable[[str, str], float], dict[str, Any]]] = [
        ("engine_gone", engine_gone, shipped(2, 1_000)),
        ("zero_replicas", zero_replicas, shipped(2, 1)),
    ]
    chat = models[args.model]
    if chat.get("can_sleep", True):
        states.insert(0, ("asleep", asleep, shipped(300, 1_000)))
    figures: dict[str, Any] = {"model": args.model}
    for name, rest, config in states:
        figures[f"{name}_s"] = measured(rest, args.model, args.rounds, config)
        print(f"{name}: {figures[f'{name}_s']} s", flush=True)
    figures["bare_vllm_s"] = bare(args.model, chat["engine_args"], args.rounds)
    print(f"bare_vllm: {figures['bare_vllm_s']} s")
    for name, _, _ in states:
        ratio = figures[f"{name}_s"].median / figures["bare_vllm_s"].median
        figures[f"{name}_ratio"] = ratio
        print(f"{name}: {ratio:.3f} of a bare start")
    report.write("first_token", figures, label=args.model)


if __name__ == "__main__":
    main()
