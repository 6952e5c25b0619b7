"""Where the point is Serve: replicas that come and go with the arbiter's word, and its controller
killed.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.config import AutoscalingPolicy

from arbiter.protocol import ray_internals
from deployments.replica.residency import Residency
from tests.support.live_arbiter import LiveArbiter, capability, gone, live_arbiter, model
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster", "serving")


@serve.deployment
class Chat:
    def __init__(self) -> None:
        replica = serve.get_replica_context().replica_id.unique_id
        self.residency = Residency.start("chat", holder=f"chat#{replica}")

    async def ask(self, name: str) -> int:
        async with self.residency.use(name) as engine:
            parts = [p async for p in engine.stream("POST", "/v1/chat/completions", {}, b"{}")]
        return int(parts[0].status)

    async def stream(self, name: str) -> AsyncIterator[int]:
        body = b'{"stream": true}'
        async with self.residency.use(name) as engine:
            async for part in engine.stream("POST", "/v1/chat/completions", {}, body):
                yield len(part) if isinstance(part, bytes) else part.status

    async def pid(self) -> int:
        return os.getpid()

    async def __del__(self) -> None:
        await self.residency.close()


@contextlib.asynccontextmanager
async def graph(table: dict[str, Any], **arbiter: Any) -> AsyncIterator[tuple[LiveArbiter, Any]]:
    """An arbiter, and a chat application that has no replica until asked."""
    async with live_arbiter(table, **arbiter) as d:
        app = Chat.options(
            name="chat",
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=30,
            graceful_shutdown_wait_loop_s=0.05,
            autoscaling_config={
                "min_replicas": 0,
                "initial_replicas": 0,
                "max_replicas": 1,
                "metrics_interval_s": 0.1,
                "look_back_period_s": 0.5,
                "upscale_delay_s": 0,
                "downscale_delay_s": 0,
                "policy": AutoscalingPolicy(
                    policy_function="tests.support.scaling:one_deployment",
                ),
            },
        ).bind()
        handle = await asyncio.to_thread(serve.run, app, name="chat", route_prefix=None)
        try:
            yield d, handle
        finally:
            await asyncio.to_thread(serve.delete, "chat")


async def replicas(count: int, within_s: float = 90.0) -> None:
    async def as_many() -> bool:
        return await running() == count

    await eventually(as_many, within_s)


async def running() -> int:
    status = await asyncio.to_thread(serve.status)
    deployment = status.applications["chat"].deployments["chat"]
    return sum(deployment.replica_states.values())


def table(**arguments: Any) -> dict[str, Any]:
    return {
        "chat": capability(a=model(200, **arguments)) | {"downscale_to_zero_s": 0.5},
        "other": capability(b=model(200)),
    }


@pytest.mark.spec("H0", "A1")
async def test_request_is_answered_from_zero_replicas_and_zero_engines() -> None:
    async with graph(table(keep_warm_s=0.5)) as (d, handle):
        await replicas(0)
        assert await asyncio.wait_for(handle.ask.remote("a"), 60) == 200
        await d.until(lambda s: not s["tickets"])
        await replicas(0)
        assert await d.engines() == {}
        assert await asyncio.wait_for(handle.ask.remote("a"), 60) == 200
        await d.books_are_true()


def interval_s(controller: Any) -> float:
    """Runs in Serve's controller: its wait between two looks."""
    return float(sys.modules["ray.serve._private.controller"].CONTROL_LOOP_INTERVAL_S)


@pytest.mark.spec("H0")
async def test_controller_looks_sooner_while_a_request_waits_for_a_replica() -> None:
    async with graph(table(keep_warm_s=0.5)):
        await replicas(0)
        controller = ray_internals.serve_controller()
        rest_s = await controller.__ray_call__.remote(interval_s)
        handle = serve.get_deployment_handle("chat", app_name="chat").options(stream=False)
        ray_internals.quiet_when_idle(handle)
        answer = handle.ask.remote("a")

        async def waits(seconds: float) -> bool:
            return bool(await controller.__ray_call__.remote(interval_s) == seconds)

        await eventually(lambda: waits(ray_internals.SOON_S))
        assert await asyncio.wait_for(answer, 60) == 200
        assert rest_s > ray_internals.SOON_S
        await eventually(lambda: waits(rest_s))


@pytest.mark.spec("A9")
async def test_a_deployment_deleted_during_a_revoke_gives_everything_back() -> None:
    slow = table(chunks=30, chunk_seconds=0.1)
    async with graph(slow, barrier_s=30) as (d, handle):
        other = d.holder("other")
        whole = [size async for size in handle.options(stream=True).stream.remote("a")]
        stream = handle.options(stream=True).stream.remote("a")
        assert await anext(stream) == 200
        asked = other.ask.remote("b")
        await d.until(lambda s: any(t["state"] == "draining" for t in s["tickets"]))
        await asyncio.to_thread(serve.delete, "chat", False)
        rest = [size async for size in stream]
        # The replica finished what it had before it went; a busy machine joins pieces.
        assert sum(rest) == sum(whole[1:])
        assert await asyncio.wait_for(asked, 60) == 200
        await d.until(lambda s: [t["model"] for t in s["tickets"]] == ["b"])
        await d.books_are_true()


@pytest.mark.spec("A19")
async def test_a_killed_controller_disturbs_no_request() -> None:
    async with graph(table()) as (d, handle):
        assert await asyncio.wait_for(handle.ask.remote("a"), 60) == 200
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        pid = ray.get(controller.get_pid.remote())
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        assert await asyncio.wait_for(handle.ask.remote("a"), 60) == 200
        await d.books_are_true()


@pytest.mark.spec("A19", "H0")
async def test_a_killed_replica_is_replaced_and_its_engine_does_not_stay() -> None:
    async with graph(table()) as (d, handle):
        assert await asyncio.wait_for(handle.ask.remote("a"), 60) == 200
        (engine,) = (await d.engines()).values()
        pid = await handle.pid.remote()
        os.kill(pid, signal.SIGKILL)
        await gone(engine[0])
        assert await asyncio.wait_for(handle.ask.remote("a"), 60) == 200
        await d.books_are_true()
