"""The series of Ray's own exporter stay as many over restarts of models and replicas (K2). Run by
test_ray_exporter in a process of its own, because the cluster of other tests exports nothing.
Prints `ok`.
"""

import asyncio
import os
import urllib.request
from typing import Any

import ray
from prometheus_client.parser import text_string_to_metric_families as families_of

from tests.conftest import ENVIRONMENT, NOT_EXPORTED
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model
from tests.support.waits import eventually

REPORTED_WITHIN_S = 60.0  # Ray reports each 10 s, and is told each 5 s, where it is not held up
LEAST_COUNT = 50  # series; a page may be read while it has only some of them
LIVES = 5


async def main() -> None:
    async with live_arbiter({"chat": capability(a=model(20, can_sleep=False))}) as d:
        for _ in range(2):  # the first restart brings series of its own, of what has ended
            await live_once(d)
        before = await exported(d, loads=4)
        for _ in range(LIVES):
            await live_once(d)
        after = await exported(d, loads=4 + 2 * LIVES)
        assert after == before, after ^ before


async def live_once(d: LiveArbiter) -> None:
    """A replica loads a model, loses it, loads it again and ends with it."""
    holder = d.holder()
    assert await holder.ask.remote("a") == 200
    await d.unload("a")
    assert await holder.ask.remote("a") == 200
    ray.kill(holder)
    d.holders.remove(holder)
    await d.until(lambda s: not s["tickets"])


async def exported(d: LiveArbiter, loads: int) -> set[tuple[str, Any]]:
    """Name and labels of each series of the arbiter, once it has reported so many loads."""

    async def reported() -> set[tuple[str, Any]]:
        found = await asyncio.to_thread(samples)
        counted = [s.value for s in found if s.name == "ray_arbiter_load_seconds_count"]
        if counted != [loads] or len(found) <= LEAST_COUNT:
            return set()
        return {(s.name, tuple(sorted(s.labels.items()))) for s in found}

    return await eventually(reported, REPORTED_WITHIN_S)


def samples() -> list[Any]:
    """Of the arbiter, from the page that a Prometheus is told to scrape."""
    [node] = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=60) as answer:
        text = answer.read().decode()
    found = [sample for family in families_of(text) for sample in family.samples]
    return [sample for sample in found if sample.name.startswith("ray_arbiter_")]


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    for name in NOT_EXPORTED:
        del os.environ[name]
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    asyncio.run(main())
    print("ok")
