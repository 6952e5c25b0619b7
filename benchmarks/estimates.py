"""How well bytes and seconds of a load are known before it begins (A17), on real engines.

    python -m benchmarks.estimates --loads 200

Three text models of different sizes are loaded by vLLM in an order drawn from a seed, each from
cold, through a real arbiter, which begins with an empty state file. Before each load it says how
many bytes and seconds it will take; afterwards the node agent says what the kernel measured. Beside
it a predictor that says one number for all: the best there is in hindsight. It must fail, or the
test of the other would show nothing.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray

from arbiter.client.admin import call_arbiter
from arbiter.units import MIB, in_seconds
from benchmarks import report
from tests.conftest import ENVIRONMENT
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model

BAR_FRACTION = 0.20  # A17
# Small, because a cache is filled by traffic, of which there is none: what is reserved for it would
# count as an error of the estimate.
KV_MIB = {"tiny-chat": 16, "medium-chat": 32, "mid-chat": 64}
WITHIN_S = 120.0  # for one load and its readings on a busy machine


@dataclass(frozen=True, slots=True)
class Load:
    """One load: said before, seen after."""

    model: str
    said_bytes: int
    seen_bytes: int
    said_s: float  # 0: nothing was known
    seen_s: float

    @property
    def bytes_error(self) -> float:
        return abs(self.said_bytes - self.seen_bytes) / self.seen_bytes

    @property
    def seconds_error(self) -> float:
        return abs(self.said_s - self.seen_s) / self.seen_s


def table() -> dict[str, Any]:
    models = {
        name: {
            "source": f"made:{name}",
            "can_sleep": False,
            "keep_warm_s": -1,
            "engine_args": {"max_model_len": 512, "kv_cache_memory_bytes": f"{kv_mib} MiB"},
        }
        for name, kv_mib in KV_MIB.items()
    }
    chat = {"role": "text", "engine": "vllm", "models": models}
    return {"chat": chat, "first": capability(nothing=model(1))}


async def event(kind: str, ticket: str) -> dict[str, Any] | None:
    lines = await call_arbiter("events", 0, 0.01)
    return next((e for e in lines if (e["kind"], e["ticket"]) == (kind, ticket)), None)


async def away(d: LiveArbiter, holder: Any, name: str) -> None:
    """Unloaded, and its bytes seen back."""
    await holder.end.remote(name)
    await d.until(lambda s: not s["tickets"], WITHIN_S)


async def one(d: LiveArbiter, holder: Any, agent: Any, name: str) -> Load:
    """From cold until it was read twice, and away again."""
    async with asyncio.timeout(WITHIN_S):
        await holder.load_ms.remote(name)
        ticket = (await d.state())["tickets"][0]["ticket"]
        while (seen := await event("estimate_error", ticket)) is None:
            await agent.probe.remote()
            await asyncio.sleep(0.1)
        loaded = await event("model_load", ticket)
        await away(d, holder, name)
    assert loaded is not None
    said_bytes = seen["size_bytes"] - seen["error_bytes"]
    said_s = in_seconds(loaded["predicted_ns"])
    return Load(name, said_bytes, seen["size_bytes"], said_s, loaded["took_s"])


async def run(count: int, seed: int, for_s: float) -> list[Load]:
    """As many as fit into the time."""
    dice = random.Random(seed)
    loads: list[Load] = []
    until_s = time.monotonic() + for_s
    async with live_arbiter(table(), mib=3_000) as d:
        holder, agent = d.holder("chat"), await d.agent()
        first = d.holder("first")
        await first.ask.remote("nothing")  # the zygote has its imports done
        await away(d, first, "nothing")
        while len(loads) < count and time.monotonic() < until_s:
            loads.append(await one(d, holder, agent, dice.choice(sorted(KV_MIB))))
            print(len(loads), loads[-1], flush=True)
    return loads


def figures(loads: list[Load]) -> dict[str, Any]:
    """Of its `rows` alone, so they can be computed anew from a report."""
    best_bytes = round(best_constant([load.seen_bytes for load in loads]))
    best_s = best_constant([load.seen_s for load in loads])
    constant = [Load(x.model, best_bytes, x.seen_bytes, best_s, x.seen_s) for x in loads]
    first = {x.model: x for x in reversed(loads)}
    return {
        "loads": len(loads),
        "bar_fraction": BAR_FRACTION,
        "estimates": errors(loads),
        "constant": errors(constant),
        "first_of_each": {
            m: {"bytes": x.bytes_error, "seconds": x.seconds_error} for m, x in first.items()
        },
        "seen": {
            m: {
                "mib": statistics.median(x.seen_bytes for x in loads if x.model == m) / MIB,
                "seconds": statistics.median(x.seen_s for x in loads if x.model == m),
            }
            for m in first
        },
        "rows": [asdict(x) for x in loads],
    }


def best_constant(seen: Sequence[float]) -> float:
    """The one number whose median error is the least, as a share of what was `seen`. Between two
    numbers at which errors of two values meet, or of one is nothing, that median moves in a
    straight line, so it is least at one of these: errors of a and b meet at their harmonic mean."""
    meets = sorted({2 * a * b / (a + b) for a in seen for b in seen})
    return min(meets, key=lambda c: statistics.median(abs(c - x) / x for x in seen))


def errors(loads: list[Load]) -> dict[str, float]:
    return {
        "bytes": statistics.median(x.bytes_error for x in loads),
        "seconds": statistics.median(x.seconds_error for x in loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--for-s", type=float, default=500.0, help="stop earlier than that")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    summary = figures(asyncio.run(run(args.loads, args.seed, args.for_s)))
    for who in ("estimates", "constant"):
        print(who, {what: f"{error:.1%}" for what, error in summary[who].items()})
    print("of each first load", summary["first_of_each"])
    print(report.write("estimates", summary, seed=args.seed))


if __name__ == "__main__":
    main()
