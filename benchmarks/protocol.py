"""What the ticket protocol costs, on a real cluster with real child processes.

    python -m benchmarks.protocol

Warm use: nanoseconds and messages. Load: milliseconds beyond a bare start of the same engine
process by the same zygote, measured right before it; with eviction: beyond a bare kill and a bare
start, when an idle model of another holder goes for it. Recovery: from the arbiter's death until a
cold request has loaded.
"""

import argparse
import asyncio
import json
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import ray

from arbiter.client.admin import call_arbiter
from arbiter.node.zygote_client import Zygote
from arbiter.protocol import ray_internals
from arbiter.protocol.messages import SpawnSpec
from arbiter.units import TicketId
from benchmarks import report
from benchmarks.report import Sample
from tests.conftest import ENVIRONMENT
from tests.support.live_arbiter import ENGINE, LiveArbiter, capability, kill, live_arbiter, model

MIB_EACH = 60
WARM_USES = 20_000
WARM_UP = 3  # pairs not counted: first calls between two processes, first forks
LIMITS = {"warm_use_ns": 5_000, "load_added_ms": 5.0, "evict_added_ms": 10.0}  # N2


@ray.remote(num_cpus=0, max_concurrency=100)
class Bare:
    """What anybody would do without tickets: fork from the zygote, wait until it is ready."""

    async def start(self, zygote: str, number: int) -> tuple[float, float]:
        """Milliseconds to start, and to kill and see dead."""
        path = Path(zygote).with_name(f"bare-{number}.sock")
        wire = Zygote(Path(zygote))
        config = {"engine_args": {"bytes": MIB_EACH << 20}}
        began = time.perf_counter()
        pid = await wire.spawn(TicketId(f"bare-{number}"), SpawnSpec(ENGINE, config), path)
        connector = aiohttp.UnixConnector(path=str(path))
        async with aiohttp.ClientSession("http://engine", connector=connector) as session:
            async with session.get("/control/lifeline"):
                async with session.get("/control/ready") as answer:
                    assert answer.status == 200
                took = time.perf_counter() - began
                began = time.perf_counter()
                fd = os.pidfd_open(pid)
                kill(pid)
                select.select([fd], [], [])
                died = time.perf_counter() - began
                os.close(fd)
        wire.close()
        return took * 1e3, died * 1e3


@dataclass
class Loads:
    """Milliseconds, pair by pair."""

    bare_ms: list[float]
    free_ms: list[float]
    swap_ms: list[float]  # a bare kill and a bare start
    evict_ms: list[float]


async def unload_all(d: LiveArbiter) -> None:
    state = await d.until(lambda s: all(t["idle_s"] is not None for t in s["tickets"]))
    for ticket in state["tickets"]:
        await call_arbiter("unload", TicketId(ticket["ticket"]))
    await d.until(lambda s: not s["tickets"])


async def loads(pairs: int) -> Loads:
    """Interleaved, so that a machine whose speed drifts changes all three alike."""
    samples = Loads([], [], [], [])
    names = {"a": model(MIB_EACH, can_sleep=False), "b": model(MIB_EACH, can_sleep=False)}
    table = {"chat": capability(a=names["a"]), "other": capability(b=names["b"])}
    async with live_arbiter(table, mib=130) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await asyncio.gather(chat.pid.remote(), other.pid.remote())
        bare = Bare.remote()  # type: ignore[attr-defined]
        for number in range(pairs + WARM_UP):
            start_ms, _ = await bare.start.remote(zygote_socket(), number)
            samples.bare_ms.append(start_ms)
            samples.free_ms.append(await chat.load_ms.remote("a"))
            await unload_all(d)
        ray.kill(bare)
    async with live_arbiter(table, mib=100) as d:  # now only one of them fits
        chat, other = d.holder("chat"), d.holder("other")
        bare = Bare.remote()  # type: ignore[attr-defined]
        await chat.load_ms.remote("a")
        for number in range(pairs + WARM_UP):
            holder, name = ((other, "b"), (chat, "a"))[number % 2]
            await d.until(lambda s: s["tickets"] and s["tickets"][0]["in_state_s"] > 1.2)
            samples.swap_ms.append(sum(await bare.start.remote(zygote_socket(), number)))
            samples.evict_ms.append(await holder.load_ms.remote(name))
        ray.kill(bare)
    for values in vars(samples).values():
        del values[:WARM_UP]
    return samples


def zygote_socket() -> str:
    return str(Path(f"/tmp/arbiter-{os.getuid()}") / ray_internals.own_node() / "zygote.sock")


async def warm() -> dict[str, Any]:
    async with live_arbiter() as d:
        h = d.holder()
        await h.ask.remote("a")
        before = await h.calls.remote()
        runs = [await h.warm_ns.remote("a", WARM_USES) for _ in range(10)]
        return {"use_ns": Sample(tuple(runs)), "messages": await h.calls.remote() - before}


async def recovery(times: int) -> dict[str, Any]:
    waits, slowest_warm = [], 0.0
    table = {"chat": capability(a=model(20), b=model(20, keep_warm_s=0))}
    async with live_arbiter(table) as d:
        h = d.holder()
        await h.ask.remote("a")
        for _ in range(times):
            await d.until(lambda s: [t["model"] for t in s["tickets"]] == ["a"])
            kill(await d.arbiter_pid())
            began = time.perf_counter()
            cold = h.load_ms.remote("b")
            while not ray.wait([cold], timeout=0)[0]:
                asked = time.perf_counter()
                assert await h.ask.remote("a") == 200
                slowest_warm = max(slowest_warm, time.perf_counter() - asked)
            await cold
            waits.append(time.perf_counter() - began)
    return {"granted_and_loaded_s": Sample(tuple(waits)), "slowest_warm_ms": slowest_warm * 1e3}


def added(ours_ms: list[float], bare_ms: list[float]) -> Sample:
    """Pair by pair, with and without tickets."""
    return Sample(tuple(a - b for a, b in zip(ours_ms, bare_ms, strict=True)))


async def measure(pairs: int) -> dict[str, Any]:
    warm_figures = await warm()
    samples = await loads(pairs)
    return {
        "warm": warm_figures,
        "bare_start_ms": Sample(tuple(samples.bare_ms)),
        "load_ms": Sample(tuple(samples.free_ms)),
        "load_added_ms": added(samples.free_ms, samples.bare_ms),
        "load_ratio": report.paired_ratio(samples.free_ms, samples.bare_ms),
        "bare_kill_and_start_ms": Sample(tuple(samples.swap_ms)),
        "load_with_eviction_ms": Sample(tuple(samples.evict_ms)),
        "evict_added_ms": added(samples.evict_ms, samples.swap_ms),
        "recovery": await recovery(5),
        "limits": LIMITS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        figures = asyncio.run(measure(args.pairs))
    finally:
        ray.shutdown()
    report.write("protocol", figures)
    warm_ns = figures["warm"]["use_ns"]
    print(f"warm use {warm_ns} ns, {figures['warm']['messages']} messages; limit 5000 ns, 0")
    print(f"bare start of the engine process {figures['bare_start_ms']} ms")
    print(f"load, with room: ratio {figures['load_ratio']}, added {figures['load_added_ms']} ms")
    print(f"load, evicting an idle model elsewhere: added {figures['evict_added_ms']} ms")
    print(f"after an arbiter kill: loaded after {figures['recovery']['granted_and_loaded_s']} s")
    print(f"slowest warm request meanwhile {figures['recovery']['slowest_warm_ms']:.1f} ms")
    print(json.dumps(LIMITS))


if __name__ == "__main__":
    main()
