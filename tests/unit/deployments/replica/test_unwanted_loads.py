"""Nothing is loaded or woken for requests whose clients have all left (A8, A21)."""

import asyncio

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import Reason, Tier
from arbiter.errors import DeadlineUnmet
from arbiter.protocol import messages
from arbiter.units import TicketId, seconds
from deployments.replica.engine_client import LoadRefused
from deployments.replica.held_model import HolderState
from deployments.replica.lifecycle import loading
from tests.support.scripted_holder import holder, revoke, until, use


@pytest.mark.spec("A21", "D1")
async def test_wait_estimate_of_a_refused_wake_does_not_refuse_the_next_request() -> None:
    async with holder() as (residency, arbiter, _):
        first = await use(residency)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        held, granted = residency.models["a"], arbiter.acquire

        async def refused(requested: ev.Requested) -> messages.Granted:
            residency._on_command(messages.WaitEstimate(requested.ticket, seconds(60)))
            raise DeadlineUnmet(requested.ticket, 0.0, 60.0, 60.0)

        arbiter.acquire = refused  # type: ignore[method-assign]
        with pytest.raises(DeadlineUnmet):
            async with residency.use("a", deadline_s=5):
                pass
        await until(lambda: held.state is HolderState.ASLEEP)
        arbiter.acquire = granted  # type: ignore[method-assign]
        async with residency.use("a", deadline_s=30) as woken:
            assert woken.ticket == first


@pytest.mark.spec("A8", "A21")
async def test_wake_is_withdrawn_when_the_only_request_is_refused_before_it_waits() -> None:
    async with holder() as (residency, arbiter, _):
        await use(residency)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        arbiter.grants_at_once = False
        held = residency.models["a"]
        held.demand.is_wanted = True  # a wake under way without a request
        residency.begin_work(held, loading.wake(residency, held))
        await until(lambda: "a" in arbiter.answers and len(arbiter.asked) == 2)
        held.demand.is_wanted = False
        residency._on_command(messages.WaitEstimate(held.ticket, seconds(60)))
        with pytest.raises(DeadlineUnmet):
            async with residency.use("a", deadline_s=30):
                pass
        await until(lambda: ev.Withdrawn(held.ticket) in arbiter.told)
        assert held.state is HolderState.ASLEEP


@pytest.mark.spec("A8", "A12")
async def test_load_that_all_have_left_is_not_tried_again_when_it_fails_for_memory() -> None:
    async with holder() as (residency, arbiter, _):
        spawn, reached, fails = arbiter.spawn, asyncio.Event(), asyncio.Event()

        async def full(ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
            arbiter.spawn = spawn  # type: ignore[method-assign]
            reached.set()
            await fails.wait()
            raise LoadRefused("no room", out_of_memory=True)

        arbiter.spawn = full  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(use(residency))
        await reached.wait()
        waiting.cancel()
        await asyncio.wait({waiting})
        fails.set()
        await until(lambda: "a" not in residency.models)
        assert len(arbiter.asked) == 1


@pytest.mark.spec("A8", "D1")
async def test_load_without_a_request_leaves_the_queue_once_its_floor_is_lowered() -> None:
    async with holder() as (residency, arbiter, _):
        arbiter.grants_at_once = False
        residency._on_command(messages.ReloadCommand("a"))
        await until(lambda: "a" in arbiter.answers)
        queued = residency.models["a"]
        await residency.background.done()
        residency._on_command(messages.WithdrawCommand("a"))
        await until(lambda: ev.Withdrawn(queued.ticket) in arbiter.told)
        assert "a" not in residency.models


@pytest.mark.spec("A8", "D1")
async def test_requests_wait_on_for_a_load_whose_floor_is_lowered_and_the_last_ends_it() -> None:
    async with holder() as (residency, arbiter, _):
        arbiter.grants_at_once = False
        residency._on_command(messages.ReloadCommand("a"))
        await until(lambda: "a" in arbiter.answers)
        queued = residency.models["a"]
        await residency.background.done()
        request = asyncio.ensure_future(use(residency))
        await until(lambda: bool(queued.demand.waiters))
        residency._on_command(messages.WithdrawCommand("a"))
        assert residency.models["a"] is queued and queued.state is HolderState.QUEUED
        request.cancel()
        await until(lambda: ev.Withdrawn(queued.ticket) in arbiter.told)


@pytest.mark.spec("D1")
async def test_load_that_is_being_planned_as_its_floor_is_lowered_asks_for_no_ticket() -> None:
    async with holder() as (residency, arbiter, _):
        residency._on_command(messages.ReloadCommand("a"))
        residency._on_command(messages.WithdrawCommand("a"))
        await residency.background.done()
        assert not arbiter.asked and not residency.models
        residency._on_command(messages.ReloadCommand("a"))
        await until(lambda: "a" in residency.models)
        await until(lambda: residency.models["a"].state is HolderState.RESIDENT)
