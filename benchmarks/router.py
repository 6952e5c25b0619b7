"""What our request router costs: one order of replicas, and a call through a handle, against
Serve's own router in the same cluster.

    python -m benchmarks.router --samples 2000 --rounds 10
"""

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from benchmarks.report import Sample, paired_ratio, write
from deployments import messages
from deployments.app import ROUTER
from deployments.routing.pieces import KeptKv, SentTime, pieces_of, split
from deployments.routing.rank import ModelPresence, ReplicaState, RouteRequest, RoutingHistory, rank

CALL = messages.InferenceCall("/v1/x", b"{}", {}, "r", "m", key="conv:c", pieces=bytes(8 * 32))
PROMPT = {"messages": [{"role": "system", "content": "Be exact. " * 1_600}]}  # 16,000 characters


def choice_us(replicas: int, samples: int) -> float:
    """Median of one order: memory, what each replica knows of a prompt, price, sort; 16 adapters in
    the slots of each."""
    names, models = [f"m:a{i}" for i in range(16)], {"m": int(ModelPresence.RESIDENT)}
    memory, took = RoutingHistory(), []
    pieces = split(pieces_of(PROMPT, "t", "m"))
    for i in range(replicas):
        memory.seen.note(f"r{i}", "m", pieces, SentTime(0.0))
        memory.seen.update(f"r{i}", ["m"], {"m": KeptKv(-1.0, 1.0)})
    for number in range(samples):
        request = RouteRequest("m", f"m:a{number % 16}", f"t/{number % 100}", pieces)
        began_ns = time.perf_counter_ns()
        sticky, followed = memory.sticky(request, number), memory.followed("m", number)
        shares = [memory.share(request, f"r{i}", number) for i in range(replicas)]
        states = [
            ReplicaState(f"r{i}", i % 3, False, models, names, shares[i]) for i in range(replicas)
        ]
        memory.note_sent(
            request, rank(request, states, sticky=sticky, followed=followed)[0], number
        )
        took.append((time.perf_counter_ns() - began_ns) / 1e3)
    return statistics.median(took)


def pieces_us(samples: int) -> float:
    """Median of the hashes of one prompt."""
    took = []
    for _ in range(samples):
        began_ns = time.perf_counter_ns()
        pieces_of(PROMPT, "t", "m")
        took.append((time.perf_counter_ns() - began_ns) / 1e3)
    return statistics.median(took)


class Echo:
    def record_routing_stats(self) -> dict[str, Any]:
        return {"models": {"m": int(ModelPresence.RESIDENT)}, "adapters": []}

    async def handle(self, call: messages.InferenceCall) -> str:
        return call.model


def deployed(name: str, **options: Any) -> Any:
    made = serve.deployment(
        Echo, name=name, num_replicas=2, ray_actor_options={"num_cpus": 0}, **options
    )
    return serve.run(made.bind(), name=name, route_prefix=None)


async def call_ms(handle: Any, samples: int) -> float:
    """Median of calls one after the other."""
    took = []
    for _ in range(samples):
        began_ns = time.perf_counter_ns()
        await handle.handle.remote(CALL)
        took.append((time.perf_counter_ns() - began_ns) / 1e6)
    return statistics.median(took)


async def pairs(samples: int, rounds: int) -> tuple[list[float], list[float]]:
    ours = await asyncio.to_thread(deployed, "ours", request_router_config=ROUTER)
    theirs = await asyncio.to_thread(deployed, "theirs")
    for handle in (ours, theirs):
        await call_ms(handle, 50)  # the first calls learn where the replicas are
    mine, stock = [], []
    for _ in range(rounds):
        mine.append(await call_ms(ours, samples // rounds))
        stock.append(await call_ms(theirs, samples // rounds))
    return mine, stock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    figures: dict[str, Any] = {
        f"choice_us_{n}_replicas": Sample(tuple(choice_us(n, args.samples) for _ in range(10)))
        for n in (1, 2, 8, 64)
    }
    figures["pieces_us"] = Sample(tuple(pieces_us(args.samples) for _ in range(10)))
    os.environ["PYTHONPATH"] = os.getcwd()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled", logging_config=LoggingConfig(enable_access_log=False))
    mine, stock = asyncio.run(pairs(args.samples, args.rounds))
    figures["call_ms"] = Sample(tuple(mine))
    figures["call_ms_stock"] = Sample(tuple(stock))
    figures["ratio"] = paired_ratio(mine, stock)
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    write("router", figures)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
