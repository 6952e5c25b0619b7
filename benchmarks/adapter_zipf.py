"""A Zipf load over many adapters: where their requests found them, and tokens a second (E7, F3).

    python -m benchmarks.adapter_zipf --adapters 1000 --requests 2000

Engine children alone, no Ray; the slab is this process's, as it is the node agent's. Three loads
with as many requests each. new: nothing is known of any adapter. next: the engine was killed, and
the one in its place has the slab. slots: as many adapters as there are slots.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbiter.units import GIB, Bytes, Content
from benchmarks import load, report
from deployments.config import load_plan
from deployments.config.safetensors_header import linear_shapes
from tests.support.adapters import write
from tests.support.engine_host import Child, killed, zygote
from tests.support.slabs import lent_slab, path_of

ENTRY = "deployments.engines.vllm.engine:build"
SLOTS, STREAMS, TOKENS, RANK = 8, 16, 4, 8
SLAB_BYTES = Bytes(2 * GIB)  # room for 1,000 images; only what they take is allocated
HIT_BAR = 0.9


def make_adapters(folder: Path, model: Path, count: int) -> list[str]:
    """Adapters that share one file of weights on disk and have a scale of their own, so that each
    has its own content."""
    shapes = {name: s for name, s in linear_shapes(model).items() if "_proj" in name}
    first = write(folder / "z0", shapes, RANK, lora_alpha=1)
    config = json.loads((first / "adapter_config.json").read_text())
    for number in range(1, count):
        path = folder / f"z{number}"
        path.mkdir()
        os.link(first / "adapter_model.safetensors", path / "adapter_model.safetensors")
        own = config | {"lora_alpha": 1 + number / count}
        (path / "adapter_config.json").write_text(json.dumps(own))
    return [f"z{number}" for number in range(count)]


def zipf(names: Sequence[str], requests: int, seed: int) -> list[str]:
    """The n-th adapter is asked for with a weight of 1 / n."""
    weights = [1 / (place + 1) for place in range(len(names))]
    return random.Random(seed).choices(names, weights, k=requests)


def config(model: Path, folder: Path, fd: int) -> dict[str, Any]:
    """Of an engine that serves the adapters in `folder/in`."""
    folders = {"folder": str(folder / "in"), "store": str(folder / "store")}
    return {
        "model": str(model),
        "served_name": "base",
        "adapters": {**folders, "max_rank": RANK, "slots": SLOTS, "wait_s": 300.0},
        "engine_args": {
            "max_model_len": 512,
            "max_num_seqs": STREAMS,
            "kv_cache_memory_bytes": 64 << 20,
        },
        "slabs": {Content.ADAPTER.value: {"path": path_of(fd)}},
    }


@dataclass(frozen=True, slots=True)
class Served:
    """One load."""

    tokens_per_s: float
    first_token_s: float  # median
    requests: dict[str, int]  # by the tier in which they found their adapter
    staged_ahead: int
    adapters: dict[str, int]  # by tier, at the end

    @property
    def hit_rate(self) -> float:
        return 1 - self.requests["cold"] / max(1, sum(self.requests.values()))

    def as_dict(self) -> dict[str, Any]:
        rates = {"hit_rate": round(self.hit_rate, 3), "first_token_s": round(self.first_token_s, 3)}
        speed = {"tokens_per_s": round(self.tokens_per_s, 1), "staged_ahead": self.staged_ahead}
        return {**rates, **speed, "requests": self.requests, "adapters": self.adapters}


async def serve(child: Child, names: Sequence[str], seed: int, tokens: int = TOKENS) -> Served:
    before = _tiers(child)["requests"]
    url = f"unix:{child.path}"
    run = await load.closed_loop(
        url, names, streams=STREAMS, requests=len(names), tokens=tokens, seed=seed
    )
    after = _tiers(child)
    by_tier = {tier: after["requests"][tier] - before[tier] for tier in before}
    return Served(run.tokens_per_s, run.ttft_s, by_tier, after["staged_ahead"], after["adapters"])


def _tiers(child: Child) -> dict[str, Any]:
    tiers: dict[str, Any] = child.call("GET", "/adapters")[1]["tiers"]
    return tiers


async def loads(count: int, requests: int, seed: int) -> dict[str, Served]:
    """By name, as the head of this file says."""
    model = Path(load_plan.resolve("made:tiny-chat"))
    with (
        tempfile.TemporaryDirectory() as made,
        lent_slab(SLAB_BYTES) as fd,
        zygote("deployments.engines.vllm.preload") as running,
    ):
        folder = Path(made)
        names = make_adapters(folder / "in", model, count)
        given = config(model, folder, fd)
        with killed(running, "zipf-new", ENTRY, given) as child:
            by_round = {"new": await serve(child, zipf(names, requests, seed), seed)}
        with killed(running, "zipf-next", ENTRY, given) as child:
            by_round["next"] = await serve(child, zipf(names, requests, seed + 1), seed)
            few = random.Random(seed).choices(names[:SLOTS], k=requests)
            by_round["slots"] = await serve(child, few, seed)
    return by_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    by_round = asyncio.run(loads(args.adapters, args.requests, args.seed))
    figures: dict[str, Any] = {name: served.as_dict() for name, served in by_round.items()}
    figures["next"]["meets_bar"] = by_round["next"].hit_rate > HIT_BAR
    for name, figure in figures.items():
        print(name, figure)
    report.write("adapter_zipf", figures, seed=args.seed)


if __name__ == "__main__":
    main()
