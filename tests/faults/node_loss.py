"""A cluster of two nodes, of which neither spawns an engine under a grant for the other (A3), loses
one (A19) and gets one back (M3). Run by test_node_loss in a process of its own, because a process
can be in one cluster only. Prints `ok`.
"""

import asyncio
import os
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from arbiter.errors import TicketNotGranted
from arbiter.node.procfs import process
from arbiter.protocol import messages, ray_internals, rpc
from arbiter.units import TicketId
from tests.conftest import ENVIRONMENT
from tests.support.live_arbiter import (
    ENGINE,
    Holder,
    LiveArbiter,
    capability,
    live_arbiter,
    model,
)

# Dead after three missed checks, a second apart; Ray's own defaults take half a minute.
QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


async def main(cluster: Cluster, worker: Any) -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(60))}) as d:
        await d.until(lambda s: len(s["devices"]) == 4)
        here, there = (
            Holder.options(scheduling_strategy=ray_internals.on_node(node)).remote("chat")
            for node in (ray_internals.head_node(), worker.node_id)
        )
        assert await asyncio.gather(here.ask.remote("a"), there.ask.remote("b")) == [200, 200]
        lost = messages.node_of(worker.node_id)
        state = await d.until(lambda s: all(t["measured_bytes"] for t in s["tickets"]))
        assert {t["node"] for t in state["tickets"]} == {lost, ray_internals.own_node()}
        agent = ray.get_actor(messages.agent_name(lost), namespace=messages.NAMESPACE)
        engines = [pid for pids in (await agent.engines.remote()).values() for pid in pids]
        await assert_refused_elsewhere(
            state, {lost: agent, ray_internals.own_node(): await d.agent()}
        )
        assert [p for pids in (await agent.engines.remote()).values() for p in pids] == engines
        await asyncio.to_thread(cluster.remove_node, worker, False)
        state = await d.until(lambda s: len(s["devices"]) == 2, 60)
        assert [t["model"] for t in state["tickets"]] == ["a"]
        assert len(state["holders"]) == 1
        assert await here.ask.remote("b") == 200
        await d.books_are_true()
        for pid in engines:  # their holder died with its node, and they with their holder
            assert (found := process(pid)) is None or not found.alive
        await a_node_that_is_back_serves(d, cluster)
        print("ok")


async def a_node_that_is_back_serves(d: LiveArbiter, cluster: Cluster) -> None:
    """Its devices are lent again, and each node has a model."""
    back = cluster.add_node(num_cpus=2)
    await d.until(lambda s: len(s["devices"]) == 4, 60)
    there = Holder.options(  # type: ignore[attr-defined]
        scheduling_strategy=ray_internals.on_node(back.node_id)
    ).remote("chat")
    assert await there.ask.remote("b") == 200
    nodes = {ray_internals.own_node(), messages.node_of(back.node_id)}
    await d.until(lambda s: {t["node"] for t in s["tickets"]} == nodes)


async def assert_refused_elsewhere(state: messages.Plain, agents: dict[str, Any]) -> None:
    """The agent of each node spawns nothing under a ticket that the other node was granted."""
    spec = messages.SpawnSpec(ENGINE, {"served_name": "m", "engine_args": {}})
    refused = 0
    for ticket in state["tickets"]:
        for node, agent in agents.items():
            if node != ticket["node"]:
                with pytest.raises(TicketNotGranted, match=ticket["ticket"]):
                    await rpc.RayPeer(agent).call("spawn", TicketId(ticket["ticket"]), spec)
                refused += 1
    assert refused == 2


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": QUICK},
    )
    ray.init(made.address, log_to_driver=False)
    second = made.add_node(num_cpus=2)
    made.wait_for_nodes()
    try:
        asyncio.run(main(made, second))
    finally:
        ray.shutdown()
        made.shutdown()
