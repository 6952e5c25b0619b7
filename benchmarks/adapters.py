"""Many adapters in one batch: tokens a second by slots, and the first token by where an adapter is.

    python -m benchmarks.adapters --model mid-chat --rounds 3

An engine child alone, no Ray. Requests of a closed loop name one of N adapters in shuffled order;
the mean number of adapters and of requests in a step is the scheduler's own trace. First token: a
resident adapter, one that has its checked copy but no slot, and one seen for the first time (copy,
hash, checks, load).
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import load, report
from deployments import plan
from deployments.headers import linear_shapes
from tests.support.adapters import write
from tests.support.engine_host import Child, ZygoteUnderTest, zygote

ENTRY = "deployments.engines.vllm_engine:build"
STREAMS, TOKENS = 32, 32
# Slots and different adapters asked for; 0 is the base alone on the same engine.
CASES = ((8, 0), (8, 1), (8, 8), (4, 32), (32, 32))
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": STREAMS,
    "kv_cache_memory_bytes": 256 << 20,
    "dtype": "bfloat16",
}


def make_adapters(folder: Path, model: str, count: int) -> None:
    shapes = {name: s for name, s in linear_shapes(Path(model)).items() if "_proj" in name}
    for number in range(count):
        write(folder / f"m{number}", shapes, rank=16, lora_alpha=16 + number)


def started(running: ZygoteUnderTest, model: str, folder: Path, slots: int) -> Child:
    adapters = {"folder": str(folder / "in"), "store": str(folder / "store"), "max_rank": 16}
    config = {
        "model": model,
        "served_name": "base",
        "adapters": {**adapters, "slots": slots, "wait_s": 300.0},
        "engine_args": ENGINE_ARGS,
    }
    child = running.spawn(f"slots-{slots}-{time.monotonic_ns()}", ENTRY, config).hold()
    status, body = child.ready()
    assert status == 200, body
    return child


async def closed_loop(child: Child, names: Sequence[str], streams: int, seed: int) -> load.Run:
    dice = random.Random(seed)
    waiting = [(name, load.prompt(dice, 12)) for name in names]
    answers: list[load.Answer] = []
    connector = aiohttp.UnixConnector(path=child.path, limit=streams)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def client() -> None:
            while waiting:
                name, text = waiting.pop()
                answers.append(await load.ask(http, "http://engine", name, text, TOKENS))

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(client())
        return load.Run(tuple(answers), time.perf_counter() - start)


def throughput(child: Child, count: int, rounds: int) -> dict[str, Any]:
    names = [f"m{n % count}" if count else "base" for n in range(2 * STREAMS)]
    random.Random(count).shuffle(names)
    asyncio.run(closed_loop(child, names[:STREAMS], STREAMS, 0))
    before = child.call("GET", "/adapters")[1]["trace"]
    speeds = [
        asyncio.run(closed_loop(child, names, STREAMS, n + 1)).tokens_per_s for n in range(rounds)
    ]
    after = child.call("GET", "/adapters")[1]["trace"]
    return {
        "tokens_per_s": report.Sample(tuple(speeds)),
        "mean_adapters": _mean_since(before, after, "mean_adapters"),
        "mean_requests": _mean_since(before, after, "mean_requests"),
        "most_adapters": after["most_adapters"],
    }


def _mean_since(before: dict[str, float], after: dict[str, float], name: str) -> float:
    total = after[name] * after["steps"] - before[name] * before["steps"]
    return total / max(1.0, after["steps"] - before["steps"])


def first_tokens(child: Child, slots: int, count: int) -> dict[str, report.Sample]:
    """On an engine that has seen nothing: each adapter, then again when others had its slot."""

    def first(name: str) -> float:
        return asyncio.run(closed_loop(child, [name], 1, 0)).ttft_s

    first("base")
    unseen = [first(f"m{n}") for n in range(count)]
    without_slot = [first(f"m{n}") for n in range(count - 2 * slots)]
    resident = [first("m0") for _ in range(count)][1:]
    found = {"unseen": unseen, "without_slot": without_slot, "resident": resident}
    return {f"first_token_s_{name}": report.Sample(tuple(v)) for name, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    path = plan.resolve(f"made:{args.model}")
    figures: dict[str, Any] = {"model": args.model, "streams": STREAMS}
    with tempfile.TemporaryDirectory() as name, zygote("deployments.engines.vllm_preload") as up:
        folder = Path(name)
        make_adapters(folder / "in", path, 32)
        child = started(up, path, folder, 4)
        figures |= first_tokens(child, 4, 16)
        child.let_go()
        for slots, count in CASES:
            child = started(up, path, folder, slots)
            row = throughput(child, count, args.rounds)
            child.let_go()
            figures[f"slots_{slots}_adapters_{count}"] = row
            speed = statistics.median(row["tokens_per_s"].values)
            step = f"{row['mean_adapters']:.1f} adapters, {row['mean_requests']:.1f} requests"
            print(f"{count:>3} adapters, {slots:>2} slots: {speed:.0f} tokens/s, {step} a step")
    for key, sample in figures.items():
        if key.startswith("first_token"):
            print(f"{key}: {sample}")
    report.write("adapters", figures, label=args.model)


if __name__ == "__main__":
    main()
