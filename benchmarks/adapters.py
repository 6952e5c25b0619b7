"""Many adapters in one batch: the first token by where an adapter is, and tokens a second by slots.

    python -m benchmarks.adapters --model mid-chat

Engine children alone, no Ray. Requests of a closed loop name one of N adapters in shuffled order.

first: the first token of an adapter in a slot (resident), of an adapter with its checked copy and
neither slot nor place in vLLM's cache (staged), of a new adapter: copy, hash, checks, load (cold).
steps: tokens a second by slots; the mean number of adapters and of requests in a step is the
scheduler's own trace. What admission is worth against plain vLLM: benchmarks.admission.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import load, report
from deployments.config import load_plan
from deployments.config.safetensors_header import linear_shapes
from tests.support.adapters import write
from tests.support.engine_host import Child, ZygoteUnderTest, zygote

ENTRY = "deployments.engines.vllm.engine:build"
STREAMS, TOKENS, RANK = 32, 32, 16
MOST = 32  # adapters
# Slots and different adapters asked for; 0 is the base alone on the same engine.
STEPS = ((8, 0), (8, 1), (8, 8), (4, 32), (32, 32))
PARTS = ("first", "steps")
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": STREAMS,
    "kv_cache_memory_bytes": 256 << 20,
    "dtype": "bfloat16",
}


def make_adapters(folder: Path, model: str, count: int) -> None:
    shapes = {name: s for name, s in linear_shapes(Path(model)).items() if "_proj" in name}
    for number in range(count):
        write(folder / f"m{number}", shapes, rank=RANK, lora_alpha=RANK + number)


def plain_lora(folder: Path, slots: int, count: int) -> dict[str, Any]:
    """vLLM's own arguments for `count` of those that `make_adapters` made, named at its start."""
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": 2 * slots,
        "max_lora_rank": RANK,
        "lora_modules": [f"m{number}={folder}/m{number}" for number in range(count)],
    }


@dataclass(frozen=True, slots=True)
class Bench:
    """One model, its adapters, and what forks engines for it."""

    running: ZygoteUnderTest
    model: str
    folder: Path

    def ours(self, slots: int) -> contextlib.AbstractContextManager[Child]:
        """Admission on."""
        folders = {"folder": str(self.folder / "in"), "store": str(self.folder / "store")}
        adapters = {**folders, "max_rank": RANK, "slots": slots, "wait_s": 300.0}
        return self.started({"adapters": adapters, "engine_args": ENGINE_ARGS})

    @contextlib.contextmanager
    def started(self, more: dict[str, Any]) -> Iterator[Child]:
        config = {"model": self.model, "served_name": "base", **more}
        child = self.running.spawn(f"bench-{time.monotonic_ns()}", ENTRY, config).hold()
        try:
            status, body = child.ready()
            assert status == 200, body
            yield child
        finally:
            child.let_go()


def run(child: Child, names: Sequence[str], streams: int, seed: int) -> load.Run:
    loop = load.closed_loop(
        f"unix:{child.path}", names, streams=streams, requests=len(names), tokens=TOKENS, seed=seed
    )
    return asyncio.run(loop)


def shuffled(count: int) -> list[str]:
    """Of a run: two requests for each stream."""
    names = [f"m{n % count}" if count else "base" for n in range(2 * STREAMS)]
    random.Random(count).shuffle(names)
    return names


def first_tokens(bench: Bench, slots: int = 4, count: int = 16) -> dict[str, Any]:
    """On an engine that has seen nothing: each adapter, then, when others had its place, twice."""
    seconds: dict[str, list[float]] = {"cold": [], "staged": [], "resident": []}
    with bench.ours(slots) as child:
        run(child, ["base"], 1, 0)
        for n in range(count):
            seconds["cold"].append(run(child, [f"m{n}"], 1, 0).ttft_s)
        for n in range(count - 2 * slots):  # the rest are in vLLM's own cache still
            for state in ("staged", "resident"):
                seconds[state].append(run(child, [f"m{n}"], 1, 1).ttft_s)
    samples = {f"first_token_s_{name}": report.Sample(tuple(v)) for name, v in seconds.items()}
    for name, sample in samples.items():
        print(f"{name}: {sample}", flush=True)
    return samples


def steps(bench: Bench, slots: int, count: int, rounds: int) -> dict[str, Any]:
    with bench.ours(slots) as child:
        names = shuffled(count)
        run(child, names[:STREAMS], STREAMS, 0)
        before = child.call("GET", "/adapters")[1]["trace"]
        speeds = [run(child, names, STREAMS, n + 1).tokens_per_s for n in range(rounds)]
        after = child.call("GET", "/adapters")[1]["trace"]
    means = {name: _mean_since(before, after, name) for name in ("mean_adapters", "mean_requests")}
    step = f"{means['mean_adapters']:.1f} adapters, {means['mean_requests']:.1f} requests a step"
    speed = f"{statistics.median(speeds):.0f} tokens/s"
    print(f"{count:>3} adapters, {slots:>2} slots: {speed}, {step}", flush=True)
    speed_sample = report.Sample(tuple(speeds))
    return {"tokens_per_s": speed_sample, **means, "most_adapters": after["most_adapters"]}


def _mean_since(before: dict[str, float], after: dict[str, float], name: str) -> float:
    total = after[name] * after["steps"] - before[name] * before["steps"]
    return total / max(1.0, after["steps"] - before["steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="of steps")
    args = parser.parse_args()
    path = load_plan.resolve(f"made:{args.model}")
    figures: dict[str, Any] = {"model": args.model, "streams": STREAMS, "tokens": TOKENS}
    with tempfile.TemporaryDirectory() as name, zygote("deployments.engines.vllm.preload") as up:
        bench = Bench(up, path, Path(name))
        make_adapters(bench.folder / "in", path, MOST)
        if "first" in args.parts:
            figures |= first_tokens(bench)
        for slots, count in STEPS if "steps" in args.parts else ():
            row = steps(bench, slots, count, args.rounds)
            figures[f"steps_slots_{slots}_adapters_{count}"] = row
    parts = [] if len(args.parts) == len(PARTS) else list(args.parts)
    report.write("adapters", figures, label="_".join([args.model, *parts]))


if __name__ == "__main__":
    main()
