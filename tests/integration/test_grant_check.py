"""The node agent of a real cluster spawns engines of granted tickets, and of no others."""

import asyncio
import os
import signal
from typing import Any

import pytest

from arbiter import leases
from arbiter.errors import TicketNotGranted
from arbiter.node import reports
from arbiter.protocol import ray_internals, rpc
from arbiter.protocol.messages import SpawnSpec, lease_ticket
from arbiter.units import MIB, TicketId
from tests.support import message_counter
from tests.support.live_arbiter import (
    CONTEXT,
    ENGINE,
    LiveArbiter,
    capability,
    gone,
    kill,
    live_arbiter,
    model,
    two,
)
from tests.support.waits import WITHIN_S

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


async def test_spawn_under_a_queued_ticket_or_a_lease_is_refused() -> None:
    async with live_arbiter(two(), barrier_s=60, lease_tenant="1 GiB") as d:
        lease = leases.ask(20 / 1024, way=leases.RayTransport(), name="train")
        await asyncio.to_thread(lease.acquire, 60)
        await assert_refused(d, lease_ticket("default", lease.id))
        chat, other = d.holder("chat"), d.holder("other")
        kept = await chat.keep.remote("a")
        waiting = other.ask.remote("b")
        [queued] = (await d.until(lambda s: s["queue"]))["queue"]
        before = await d.engines()
        await assert_refused(d, TicketId(queued["ticket"]))
        assert await d.engines() == before and kept in before
        await chat.let_go.remote("a")
        assert await asyncio.wait_for(waiting, 90) == 200
        assert queued["ticket"] in await d.engines()  # once it was granted
        await asyncio.to_thread(lease.release)


async def test_ticket_is_charged_weights_working_scratch_and_context_and_names_its_holder() -> None:
    parts = {"weights": 50, "working": 30, "scratch": 20, "context": CONTEXT // MIB}
    a = model(50, can_sleep=False) | {"need": {k: f"{mib} MiB" for k, mib in parts.items()}}
    async with live_arbiter({"chat": capability(a=a)}) as d:
        first, second = d.holder(), d.holder()
        for h in (first, second):
            assert await h.ask.remote("a") == 200
        tickets = (await d.state())["tickets"]
        names = [await message_counter.ask(h, own_name) for h in (first, second)]
        assert sorted(t["holder"] for t in tickets) == sorted(names) and names[0] != names[1]
        for ticket in tickets:
            assert sum(ticket["charged_bytes"].values()) == 100 * MIB + CONTEXT
            assert (ticket["capability"], ticket["model"]) == ("chat", "a")
        await d.books_are_true()


def own_name(holder: Any) -> str:
    return str(holder.residency.holder)


@pytest.mark.spec("A18")
async def test_spawn_under_a_grant_of_the_last_epoch_waits_for_its_confirmation() -> None:
    def waits_for_any_restart(_agent: object) -> None:
        reports.CONFIRM_S = WITHIN_S  # its own is less than a restart takes on a busy machine

    async with live_arbiter({"chat": capability(a=model(50))}) as d:
        await message_counter.ask(await d.agent(), waits_for_any_restart)
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
