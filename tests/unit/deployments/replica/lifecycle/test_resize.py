"""A model grows on its holder: granted, then drained, then another process under its ticket."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason
from arbiter.core.settings import Timeouts
from arbiter.errors import ArbiterUnavailable, GrowthRefused, LoadFailed, TicketClosed
from arbiter.protocol import messages
from arbiter.units import Bytes, Span, TicketId, seconds
from deployments.config.boot import configuration
from deployments.config.load_plan import ModelPlan, plan
from deployments.config.schema import ConfigError, parse_table
from deployments.replica.held_model import HeldModel, HolderState, RequestsInFlight
from deployments.replica.lifecycle import resize
from tests.support.scripted_growth import GROWN, MODEL, TABLE, resident
from tests.support.scripted_holder import ON, revoke, until, use

pytestmark = pytest.mark.spec("A14")


async def test_growing_model_serves_until_granted_then_requests_await_the_new_process() -> None:
    async with resident() as (residency, growth, _):
        held = residency.models["a"]
        growth.may_start.clear()
        async with residency.use("a"):
            growings = [asyncio.ensure_future(resize.grow(residency, "a")) for _ in range(2)]
            await until(lambda: held.state is HolderState.DRAINING)
            waiting = asyncio.ensure_future(use(residency))
        await until(lambda: growth.spawned)
        [told] = residency.held_tickets()
        assert (told.phase, told.inflight, told.devices) == (types.Phase.RESIDENT, 1, GROWN)
        revoke(residency, Reason.SWAP)
        assert growth.arbiter.kinds()[-1] == "Busy" and not waiting.done()
        growth.may_start.set()
        await asyncio.gather(*growings)
        assert await waiting == held.ticket and held.state is HolderState.RESIDENT
        assert growth.asked == [7] and growth.spawned == [{"kv_cache_memory_bytes": 7}]
        await resize.grow(residency, "a")  # it has it already
        assert growth.asked == [7]


async def test_shrunk_model_reports_its_bytes_once_the_smaller_process_runs() -> None:
    async with resident() as (residency, growth, _):
        await resize.grow(residency, "a")
        await resize.give_back(residency, "a")
        assert growth.spawned == [{"kv_cache_memory_bytes": 7}, {}]
        assert growth.arbiter.told[-1] == ev.GaveBack(residency.models["a"].ticket, ON)
        assert residency.held_tickets()[0].devices == ON
        await resize.give_back(residency, "a")
        assert len(growth.spawned) == 2


async def test_model_grows_and_shrinks_by_hand_and_goes_on_when_refused() -> None:
    async with resident() as (residency, growth, _):
        residency._on_command(messages.Resize("a", messages.ModelSize.GROWN))
        await until(lambda: residency.models["a"].growth.before)
        residency._on_command(messages.Resize("a", messages.ModelSize.FIRST))
        await until(lambda: residency.models["a"].growth.before is None)
        assert growth.spawned == [{"kv_cache_memory_bytes": 7}, {}]
        growth.error = GrowthRefused(residency.models["a"].ticket, Bytes(7), "full")
        residency._on_command(messages.Resize("a", messages.ModelSize.GROWN))
        residency._on_command(messages.Resize("no-such-model", messages.ModelSize.GROWN))
        await until(lambda: len(growth.asked) == 2 and not residency.background.running)
        assert await use(residency) and len(growth.spawned) == 2


def with_drafter(held: HeldModel) -> HeldModel:
    """Its drafter takes two bytes."""
    alone = {**held.plan.config, "engine_args": {"alone": True}}
    held.plan = replace(
        held.plan,
        need=replace(held.plan.need, drafter_bytes=Bytes(2)),
        without_drafter=replace(held.plan, grown=None, config=alone),
    )
    return held


@pytest.mark.spec("F9")
async def test_drafter_leaves_in_place_while_a_request_is_in_flight() -> None:
    async with resident() as (residency, growth, engine):
        held, engine.drops_drafter = with_drafter(residency.models["a"]), True
        async with residency.use("a"):
            await resize.drop_drafter(residency, "a")
            assert held.state is HolderState.RESIDENT and not growth.spawned
        less = (replace(ON[0], size_bytes=Bytes(ON[0].size_bytes - 2)),)
        assert growth.arbiter.told[-1] == ev.GaveBack(held.ticket, less)
        assert residency.held_tickets()[0].devices == less
        assert await use(residency) == held.ticket
        await resize.drop_drafter(residency, "a")  # it has none
        assert engine.acts.count("/control/drop_drafter") == 1


@pytest.mark.spec("F9", "A9")
async def test_model_revoked_while_its_drafter_leaves_that_keeps_its_place_gives_it_back() -> None:
    async with resident() as (residency, growth, engine):
        held, engine.drops_drafter = with_drafter(residency.models["a"]), True
        link: Any = held.link
        drop = link.drop_drafter

        async def and_revoke() -> bool:
            dropped: bool = await drop()
            revoke(residency, Reason.SWAP, barrier_s=0.01)
            return dropped

        link.drop_drafter = and_revoke
        async with residency.use("a"):  # which outlives the barrier
            await resize.drop_drafter(residency, "a")
        less = (replace(ON[0], size_bytes=Bytes(ON[0].size_bytes - 2)),)
        assert growth.arbiter.kinds()[-2:] == ["BarrierDropped", "GaveBack"]
        assert growth.arbiter.told[-1] == ev.GaveBack(held.ticket, less)
        assert residency.held_tickets()[0].devices == less and not growth.spawned


@pytest.mark.spec("F9")
async def test_engine_that_fails_over_its_drafter_is_not_restarted_and_keeps_its_bytes() -> None:
    async with resident() as (residency, growth, engine):
        held, engine.drops_drafter = with_drafter(residency.models["a"]), None
        with pytest.raises(TicketClosed):
            await resize.drop_drafter(residency, "a")
        assert not growth.spawned and held.devices == ON
        assert not any(isinstance(event, ev.GaveBack) for event in growth.arbiter.told)


@pytest.mark.spec("F9")
async def test_model_goes_on_without_its_drafter_under_its_ticket() -> None:
    async with resident() as (residency, growth, _):
        held = with_drafter(residency.models["a"])
        residency._on_command(messages.Resize("a", messages.ModelSize.WITHOUT_DRAFTER))
        await until(lambda: growth.spawned and not residency.background.running)
        less = (replace(ON[0], size_bytes=Bytes(ON[0].size_bytes - 2)),)
        assert growth.spawned == [{"alone": True}]
        assert growth.arbiter.told[-1] == ev.GaveBack(held.ticket, less)
        assert residency.held_tickets()[0].devices == less
        assert await use(residency) == held.ticket
        residency._on_command(
            messages.Resize("a", messages.ModelSize.WITHOUT_DRAFTER)
        )  # it has none
        residency._on_command(messages.Resize("a", messages.ModelSize.FIRST))  # as it was loaded
        await until(lambda: not residency.background.running)
        assert len(growth.spawned) == 1


async def test_grown_model_gives_back_after_a_long_idle_time() -> None:
    async with resident({**MODEL, "stays_grown_s": 0.01}) as (residency, growth, _):
        held = residency.models["a"]
        async with residency.use("a"):
            growings = asyncio.ensure_future(resize.grow(residency, "a"))
            await until(lambda: held.state is HolderState.DRAINING)
        await growings
        await until(lambda: len(growth.spawned) == 2)
        await until(lambda: ev.GaveBack(held.ticket, ON) in growth.arbiter.told)
        assert growth.spawned[-1] == {} and held.state is HolderState.RESIDENT
        assert await use(residency) == held.ticket


async def test_grown_model_in_use_stays_grown() -> None:
    async with resident({**MODEL, "stays_grown_s": 0.01}) as (residency, growth, _):
        await resize.grow(residency, "a")
        held = residency.models["a"]
        async with residency.use("a"):
            resize._give_back_once_idle(residency, held, seconds(0.01))
            assert held.growth.work is None and len(growth.spawned) == 1
        await until(lambda: len(growth.spawned) == 2)


async def test_growth_requested_while_giving_back_follows_it() -> None:
    async with resident() as (residency, growth, _):
        await resize.grow(residency, "a")
        growth.may_start.clear()
        giving = asyncio.ensure_future(resize.give_back(residency, "a"))
        await until(lambda: len(growth.spawned) == 2)
        again = asyncio.ensure_future(resize.grow(residency, "a"))
        await asyncio.sleep(0)
        growth.may_start.set()
        await asyncio.gather(giving, again)
        larger = {"kv_cache_memory_bytes": 7}
        assert growth.spawned == [larger, {}, larger]
        assert residency.held_tickets()[0].devices == GROWN


async def test_model_refused_growth_goes_on_with_its_bytes() -> None:
    async with resident() as (residency, growth, _):
        growth.error = GrowthRefused(residency.models["a"].ticket, Bytes(7), "full")
        with pytest.raises(GrowthRefused):
            await resize.grow(residency, "a")
        assert not growth.spawned and await use(residency)


async def test_growth_is_refused_rather_than_cutting_off_long_requests() -> None:
    async with resident() as (residency, growth, _):
        growth.arbiter.timeouts = Timeouts(barrier=seconds(0.01))
        async with residency.use("a"):
            with pytest.raises(GrowthRefused, match="in flight"):
                await resize.grow(residency, "a")
            assert await use(residency)  # the barrier is down again
        assert growth.arbiter.told[-1] == ev.GaveBack(residency.models["a"].ticket, ON)
        assert not growth.spawned and residency.held_tickets()[0].devices == ON


async def test_model_revoked_as_its_growth_is_granted_gives_it_back_and_goes_on() -> None:
    async with resident() as (residency, growth, _):
        held, grant = residency.models["a"], growth.grow

        async def and_revoke(ticket: TicketId, more: Bytes, within: Span) -> messages.Granted:
            granted = await grant(ticket, more, within)
            revoke(residency, Reason.SWAP, barrier_s=0.01)
            return granted

        growth.arbiter.grow = and_revoke
        async with residency.use("a"):  # which outlives the barrier
            with pytest.raises(TicketClosed):
                await resize.grow(residency, "a")
            assert await use(residency) == held.ticket
        assert ev.GaveBack(held.ticket, ON) in growth.arbiter.told
        assert not growth.spawned and residency.held_tickets()[0].devices == ON


async def test_model_grown_again_has_one_timer_for_giving_back() -> None:
    async with resident() as (residency, _, _engine):
        held, clocks = residency.models["a"], []
        for change in (resize.grow, resize.give_back, resize.grow):
            await change(residency, "a")
            clocks.append(held.growth.look)
        first, _, second = clocks
        assert first is not None and first.cancelled()
        assert second is not None and not second.cancelled()


async def test_a_restart_that_fails_ends_the_ticket_and_the_next_load_is_as_the_first() -> None:
    async with resident() as (residency, growth, _):
        first = residency.models["a"].ticket

        async def broken(ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
            raise TicketClosed(ticket)

        growth.arbiter.respawn = broken
        with pytest.raises(LoadFailed):
            await resize.grow(residency, "a")
        assert await use(residency) != first
        assert residency.models["a"].plan.grown is not None


@pytest.mark.spec("D5")
async def test_files_replaced_while_a_model_grows_are_loaded_anew_before_any_answer(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").write_bytes(b"old")
    async with resident() as (residency, growth, _):
        held = residency.models["a"]
        held.plan = replace(held.plan, grown=with_folder(held.plan.grown, tmp_path))
        growth.may_start.clear()
        growing = asyncio.ensure_future(resize.grow(residency, "a"))
        await until(lambda: growth.spawned)
        waiting = asyncio.ensure_future(use(residency))
        (tmp_path / "weights").write_bytes(b"newer")
        growth.may_start.set()
        with pytest.raises(TicketClosed):
            await growing
        assert await waiting != held.ticket and held.state is HolderState.CLOSED


@pytest.mark.spec("D5")
async def test_files_of_which_the_kernel_does_not_tell_are_looked_at_also_after_a_growth() -> None:
    async with resident() as (residency, _, _):
        held = residency.models["a"]
        held.files.is_unwatched = True  # there was no room for another watch
        await resize.grow(residency, "a")
        assert held.files.is_unwatched


def with_folder(plan: ModelPlan | None, folder: Path) -> ModelPlan:
    assert plan is not None
    return replace(plan, config={**plan.config, "model": str(folder)})


@pytest.mark.spec("A18")
async def test_model_that_would_give_back_without_an_arbiter_goes_on_grown() -> None:
    async with resident() as (residency, growth, _):
        await resize.grow(residency, "a")
        held = residency.models["a"]
        growth.arbiter.unreachable_s = 7.0
        with pytest.raises(ArbiterUnavailable):
            await resize.give_back(residency, "a")
        assert await use(residency) == held.ticket and len(growth.spawned) == 1
        growth.arbiter.unreachable_s = 0.0
        await resize.give_back(residency, "a")
        assert len(growth.spawned) == 2 and residency.held_tickets()[0].devices == ON


@pytest.mark.spec("A18")
@pytest.mark.parametrize("change", ["grow", "give_back"])
async def test_model_whose_new_process_no_arbiter_confirms_keeps_the_old_one(change: str) -> None:
    async with resident() as (residency, growth, _):
        held, respawn = residency.models["a"], growth.arbiter.respawn
        if change == "give_back":
            await resize.grow(residency, "a")
        plan, devices, files = held.plan, held.devices, held.files

        async def unconfirmed(*_: object) -> str:
            raise ArbiterUnavailable(10.0)

        growth.arbiter.respawn = unconfirmed
        with pytest.raises(ArbiterUnavailable):
            await getattr(resize, change)(residency, "a")
        assert await use(residency) == held.ticket
        assert (held.plan, held.devices) == (plan, devices)
        assert held.files is files  # those that the process which goes on has read
        growth.arbiter.respawn = respawn
        await getattr(resize, change)(residency, "a")
        assert await use(residency) == held.ticket and held.devices != devices


@pytest.mark.spec("A18")
async def test_model_whose_process_died_unconfirmed_ends() -> None:
    async with resident() as (residency, growth, engine):
        held, link = residency.models["a"], residency.models["a"].link

        async def unconfirmed(*_: object) -> str:
            engine.dead.set()
            await until(lambda: not link.is_alive)
            raise ArbiterUnavailable(10.0)

        growth.arbiter.respawn = unconfirmed
        with pytest.raises(LoadFailed):
            await resize.grow(residency, "a")
        assert held.state is HolderState.CLOSED


async def test_an_engine_that_ends_while_its_growth_waits_ends_the_growth() -> None:
    async with resident() as (residency, growth, engine):
        never: asyncio.Future[messages.Granted] = asyncio.get_running_loop().create_future()

        async def grow(*_: object) -> messages.Granted:
            return await never

        growth.arbiter.grow = grow
        task = asyncio.ensure_future(resize.grow(residency, "a"))
        await until(lambda: residency.models["a"].growth.work)
        engine.dead.set()
        with pytest.raises(TicketClosed):
            await task


def test_grown_plan_must_need_more_memory() -> None:
    table = parse_table(TABLE)
    made = plan("a", table.capabilities["c"])
    assert made.grown is not None
    assert made.grown.need.device_bytes - made.need.device_bytes == 7
    assert made.config["grows_to"] == {"kv_cache_memory_bytes": 7}
    assert made.grown.settings_key != made.settings_key and made.grown.grown is None
    same: Any = {**MODEL, "grow_to": {"max_num_seqs": 7}}
    less = {"capabilities": {"c": {**TABLE["capabilities"]["c"], "models": {"a": same}}}}
    with pytest.raises(ConfigError, match="no more memory"):
        plan("a", parse_table(less).capabilities["c"])


async def test_growth_waits_at_the_barrier_that_a_person_set_as_a_swap_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_to_a_minute = configuration(parse_table({"arbiter": {"barrier_s": 60}, **TABLE}))
    waited, ended_within = [], RequestsInFlight.ended_within

    async def and_note(requests: RequestsInFlight, within: Span) -> bool:
        waited.append(within)
        return await ended_within(requests, within)

    monkeypatch.setattr(RequestsInFlight, "ended_within", and_note)
    async with resident() as (residency, growth, _):
        growth.arbiter.timeouts = set_to_a_minute.settings.timeouts
        await resize.grow(residency, "a")
        await resize.give_back(residency, "a")
        revoke(residency, Reason.SWAP, barrier_s=60)  # as the core says it, of its settings
        await until(lambda: not residency.models)
    assert waited == [seconds(60)] * 3


async def test_growth_waits_for_room_as_long_as_three_barriers() -> None:
    async with resident() as (residency, growth, _):
        growth.arbiter.timeouts = Timeouts(barrier=seconds(60))
        within: list[Span] = []
        grant = growth.grow

        async def and_note(ticket: TicketId, more: Bytes, room: Span) -> messages.Granted:
            within.append(room)
            return await grant(ticket, more, room)

        growth.arbiter.grow = and_note
        await resize.grow(residency, "a")
        assert within == [seconds(180)]
