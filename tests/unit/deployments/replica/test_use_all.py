"""Several models used at once on their holder: asked for together, held only when all serve."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason
from arbiter.errors import ENGINE_DIED, DeadlineUnmet, NeverFits
from arbiter.protocol import messages
from arbiter.units import Bytes, Span, TicketId, seconds
from deployments.replica.engine_client import LoadRefused
from deployments.replica.held_model import HeldModel
from deployments.replica.use_all import use_all
from tests.support import scripted_holder
from tests.support.scripted_holder import ScriptedClient, revoke, until, use

pytestmark = pytest.mark.spec("A13")
MODELS = {name: {"source": "x", "need": {"weights": 5, "host": 5}} for name in "abd"}
TABLE: Any = {"capabilities": {"c": {"role": "text", "engine": "m:f", "models": MODELS}}}


@asynccontextmanager
async def holder() -> AsyncIterator[tuple[Any, ScriptedClient]]:
    async with scripted_holder.holder() as (residency, plain, _):
        residency._client = arbiter = ScriptedClient(plain.path, grants_at_once=False)
        residency._on_command(messages.ConfigChanged(TABLE))
        yield residency, arbiter


async def see(residency: Any, **how: Any) -> list[TicketId]:
    async with use_all(residency, ("a", "b"), **how) as uses:
        assert all(residency.models[model].requests.inflight for model in "ab")
        return [use.ticket for use in uses]


async def asked(arbiter: ScriptedClient, *models: str) -> None:
    await until(lambda: [r.model for r in arbiter.requests] == list(models))


def withdrawn(arbiter: ScriptedClient) -> set[TicketId]:
    return {event.ticket for event in arbiter.told if isinstance(event, ev.Withdrawn)}


async def test_models_used_together_are_requested_as_a_gang_and_in_use_once_all_serve() -> None:
    async with holder() as (residency, arbiter):
        seen = asyncio.ensure_future(see(residency, deadline_s=60, priority=types.Priority.HIGH))
        await asked(arbiter, "a", "b")
        first, second = arbiter.requests
        assert first.gang == second.gang == (first.ticket, second.ticket)
        assert {r.priority for r in arbiter.requests} == {types.Priority.HIGH}
        assert all(r.deadline and r.deadline > seconds(50) for r in arbiter.requests)
        arbiter.says("a")
        arbiter.says("b")
        assert await asyncio.wait_for(seen, 60) == [first.ticket, second.ticket]
        assert [residency.models[model].requests.inflight for model in "ab"] == [0, 0]


async def test_refused_gang_member_takes_the_others_out_of_the_queue() -> None:
    async with holder() as (residency, arbiter):
        seen = asyncio.ensure_future(see(residency))
        await asked(arbiter, "a", "b")
        arbiter.says("b", NeverFits(TicketId("b"), Bytes(9), Bytes(5)))
        with pytest.raises(NeverFits):
            await asyncio.wait_for(seen, 60)
        await until(lambda: ev.Withdrawn(arbiter.requests[0].ticket) in arbiter.told)
        assert not residency.models and residency.held_tickets() == ()


async def test_gang_member_stays_in_the_queue_when_a_load_without_a_request_is_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with holder() as (residency, arbiter):
        begin_load = residency.begin_load

        def withdrawn_at_once(held: HeldModel) -> HeldModel:
            """The command arrives before the request that began the load waits for it."""
            asyncio.get_running_loop().call_soon(
                residency._on_command, messages.WithdrawCommand(held.model)
            )
            return begin_load(held)  # type: ignore[no-any-return]

        monkeypatch.setattr(residency, "begin_load", withdrawn_at_once)
        seen = asyncio.ensure_future(see(residency))
        await asked(arbiter, "a", "b")
        assert all(len(request.gang) == 2 for request in arbiter.requests)
        arbiter.says("a")
        arbiter.says("b")
        assert len(set(await asyncio.wait_for(seen, 60))) == 2


async def test_cancelled_or_late_gang_request_withdraws_all_members() -> None:
    async with holder() as (residency, arbiter):
        seen = asyncio.ensure_future(see(residency))
        await asked(arbiter, "a", "b")
        seen.cancel()
        await until(lambda: len(withdrawn(arbiter)) == 2)
        assert not residency.models
        with pytest.raises(DeadlineUnmet):
            await see(residency, deadline_s=0.05)
        await until(lambda: len(withdrawn(arbiter)) == 4)
        assert not residency.models


async def test_resident_gang_member_is_not_held_while_another_is_queued() -> None:
    async with holder() as (residency, arbiter):
        alone = asyncio.ensure_future(use(residency))
        await asked(arbiter, "a")
        arbiter.says("a")
        await alone
        seen = asyncio.ensure_future(see(residency))
        await asked(arbiter, "a", "b")
        assert residency.models["a"].requests.inflight == 0 and arbiter.requests[1].gang == ()
        revoke(residency, Reason.SWAP)
        await until(lambda: "a" not in residency.models)
        arbiter.says("b")
        await asked(arbiter, "a", "b", "a")  # it had to go meanwhile
        assert residency.models["b"].requests.inflight == 0
        arbiter.says("a")
        assert len(set(await asyncio.wait_for(seen, 60))) == 2


async def test_other_user_of_a_gang_member_gets_it_when_the_gang_is_given_up() -> None:
    async with holder() as (residency, arbiter):
        seen = asyncio.ensure_future(see(residency))
        await asked(arbiter, "a", "b")

        async def urgent() -> TicketId:
            async with residency.use("a", priority=types.Priority.URGENT) as engine:
                return TicketId(engine.ticket)

        alone = asyncio.ensure_future(urgent())
        await until(lambda: len(residency.models["a"].demand.waiters) == 2)
        [told] = arbiter.told  # that it is more urgent; it is still of the gang
        assert (told.priority, told.gang) == (types.Priority.URGENT, arbiter.requests[0].gang)
        arbiter.says("a")
        await until(lambda: residency.models["a"].gang.grant_epochs)
        seen.cancel()
        assert await asyncio.wait_for(alone, 60) == arbiter.requests[0].ticket
        assert "b" not in residency.models


async def test_gang_member_that_is_retried_is_requested_by_itself() -> None:
    async with holder() as (residency, arbiter):

        async def first_dies(ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
            if ticket == arbiter.requests[0].ticket:
                raise LoadRefused(ENGINE_DIED, out_of_memory=False)
            return messages.Spawned(arbiter.path, Span(0))

        arbiter.spawn = first_dies  # type: ignore[method-assign]
        seen = asyncio.ensure_future(see(residency))
        await asked(arbiter, "a", "b")
        arbiter.says("a")
        arbiter.says("b")
        await asked(arbiter, "a", "b", "a")
        again = arbiter.requests[2]
        assert (again.attempt, again.gang) == (2, ())
        arbiter.says("a")
        assert again.ticket in await asyncio.wait_for(seen, 60)
