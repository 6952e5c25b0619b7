"""The node agent of a real cluster spawns engines of granted tickets, and of no others."""

import os
import signal

import pytest

from arbiter.errors import TicketNotGranted
from arbiter.protocol import ray_internals, rpc
from arbiter.protocol.messages import SpawnSpec
from arbiter.units import MIB, TicketId
from tests.support.live_arbiter import (
    ENGINE,
    LiveArbiter,
    capability,
    gone,
    kill,
    live_arbiter,
    model,
)

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A3")]
FORGED = TicketId("forged")


async def agent_socket(d: LiveArbiter) -> rpc.Peer:
    handle = await d.agent()
    address = await handle.rpc_address.remote()
    return await rpc.connect_to_socket(handle, address, ray_internals.own_node())


async def assert_refused(d: LiveArbiter, ticket: TicketId) -> None:
    spec = SpawnSpec(ENGINE, {"served_name": "m", "engine_args": {}})
    for peer in (await agent_socket(d), rpc.RayPeer(await d.agent())):
        for how in ("spawn", "respawn"):
            with pytest.raises(TicketNotGranted, match=ticket):
                await peer.call(how, ticket, spec)
        peer.close()


async def test_forged_spawn_is_refused_and_a_granted_one_works() -> None:
    grows = model(50, can_sleep=False) | {"grow_to": {"kv_cache_memory_bytes": 50 * MIB}}
    async with live_arbiter({"chat": capability(a=grows)}) as d:
        await assert_refused(d, FORGED)
        h = d.holder()
        assert await h.ask.remote("a") == 200
        before = await d.engines()
        await h.grow.remote("a")  # respawns under the ticket it has
        assert (await d.engines()).keys() == before.keys() and await d.engines() != before
        await assert_refused(d, FORGED)
        await d.books_are_true()


@pytest.mark.spec("A18")
async def test_spawn_under_a_grant_of_the_last_epoch_waits_for_its_confirmation() -> None:
    async with live_arbiter({"chat": capability(a=model(50))}) as d:
        h = d.holder()
        await h.pid.remote()
        arbiter, agent = await d.arbiter_pid(), (await d.pids())["agent"]
        os.kill(agent, signal.SIGSTOP)  # so that its question comes when there is no arbiter
        try:
            asked = h.ask.remote("a")
            await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["loading"])
            kill(arbiter)
            await gone(arbiter)
        finally:
            os.kill(agent, signal.SIGCONT)
        assert await asked == 200
        assert (await d.pids())["agent"] == agent
        await assert_refused(d, FORGED)
        await d.books_are_true()
