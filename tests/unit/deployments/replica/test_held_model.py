"""The states of a model on its holder: every arrow of the table is walked, and no other."""

from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from arbiter.core.decisions import Reason, Tier
from arbiter.core.types import Need
from arbiter.errors import LoadFailed, NeverFits
from arbiter.protocol import messages
from arbiter.units import Bytes, TicketId
from deployments.config.load_plan import ModelPlan
from deployments.replica.engine_client import LoadRefused
from deployments.replica.held_model import TRANSITIONS, HeldModel, HolderState
from deployments.replica.lifecycle import resize, unloading
from tests.support import scripted_growth as growing
from tests.support import scripted_holder as base

Q, L, R, D, U, A, C = (
    HolderState.QUEUED,
    HolderState.LOADING,
    HolderState.RESIDENT,
    HolderState.DRAINING,
    HolderState.UNLOADING,
    HolderState.ASLEEP,
    HolderState.CLOSED,
)
TOO_LARGE = NeverFits(TicketId("a"), Bytes(9), Bytes(5))


async def reaches(residency: Any, held: HeldModel, state: HolderState) -> None:
    await base.until(lambda: held.state is state)


async def falls_asleep(residency: Any) -> HeldModel:
    await base.use(residency)
    held: HeldModel = residency.models["a"]
    base.revoke(residency, Reason.SWAP, Tier.ASLEEP)
    await reaches(residency, held, A)
    return held


async def is_swapped_out(residency: Any, arbiter: Any, engine: Any) -> None:
    await base.use(residency)
    base.revoke(residency, Reason.SWAP)
    await base.until(lambda: not residency.models)


async def sleeps_wakes_and_dies_asleep(residency: Any, arbiter: Any, engine: Any) -> None:
    await falls_asleep(residency)
    held = await falls_asleep(residency)
    engine.dead.set()
    await reaches(residency, held, C)


async def outlives_the_barrier(residency: Any, arbiter: Any, engine: Any) -> None:
    async with residency.use("a"):
        base.revoke(residency, Reason.SWAP, barrier_s=0.01)
        await reaches(residency, residency.models["a"], R)


async def loads_at_the_second_try(residency: Any, arbiter: Any, engine: Any) -> None:
    base.breaking(arbiter, LoadRefused("no room", out_of_memory=True))
    await base.use(residency)


async def fails_to_load(residency: Any, arbiter: Any, engine: Any) -> None:
    base.breaking(arbiter, LoadRefused("no such file", out_of_memory=False))
    with pytest.raises(LoadFailed):
        await base.use(residency)


async def is_refused(residency: Any, arbiter: Any, engine: Any) -> None:
    async def refuse(_: object) -> messages.Granted:
        raise TOO_LARGE

    arbiter.acquire = refuse
    with pytest.raises(NeverFits):
        await base.use(residency)


async def is_refused_its_wake(residency: Any, arbiter: Any, engine: Any) -> None:
    await falls_asleep(residency)
    await is_refused(residency, arbiter, engine)


async def grows(residency: Any, arbiter: Any, engine: Any) -> None:
    residency._on_command(messages.ConfigChanged(growing.TABLE))
    growing.ScriptedGrowth(arbiter)
    await base.use(residency)
    await resize.grow(residency, "a")


async def is_replaced_on_disk(residency: Any, arbiter: Any, engine: Any) -> None:
    async with residency.use("a"):
        held = residency.models["a"]
        unloading.outdate(residency, held)
        assert not residency.models
    unloading.end(residency, held, Reason.MANUAL)


async def loses_its_engine(residency: Any, arbiter: Any, engine: Any) -> None:
    await base.use(residency)
    held = residency.models["a"]
    engine.dead.set()
    await reaches(residency, held, C)


Scenario = Callable[[Any, Any, Any], Awaitable[None]]
WALKS: dict[Scenario, list[HolderState]] = {
    is_swapped_out: [Q, L, R, D, U, C],
    sleeps_wakes_and_dies_asleep: [Q, L, R, D, U, A, Q, L, R, D, U, A, C],
    outlives_the_barrier: [Q, L, R, D, R],
    loads_at_the_second_try: [Q, L, Q, L, R],
    fails_to_load: [Q, L, C],
    is_refused: [Q, C],
    is_refused_its_wake: [Q, L, R, D, U, A, Q, A],
    grows: [Q, L, R, D, L, R],
    is_replaced_on_disk: [Q, L, R, D, C],
    loses_its_engine: [Q, L, R, C],
}


@pytest.mark.parametrize("scenario", WALKS, ids=lambda scenario: scenario.__name__)
async def test_model_walks_the_arrows_of_the_table(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, move = [Q], HeldModel.move

    def and_note(held: HeldModel, to: HolderState) -> None:
        move(held, to)
        walk.append(to)

    monkeypatch.setattr(HeldModel, "move", and_note)
    async with base.holder() as (residency, arbiter, engine):
        await scenario(residency, arbiter, engine)
        assert walk == WALKS[scenario]


@pytest.mark.spec("A18", "D1")
async def test_heartbeat_says_that_a_model_has_slept_also_once_it_serves_again() -> None:
    async with base.holder() as (residency, _, _):
        await base.use(residency)
        held = residency.models["a"]
        assert not held.heartbeat_entry().has_slept
        assert await falls_asleep(residency) is held and held.heartbeat_entry().has_slept
        await base.use(residency)
        assert held.state is R and held.heartbeat_entry().has_slept


def test_every_arrow_of_the_table_is_walked() -> None:
    walked = {arrow for walk in WALKS.values() for arrow in pairwise(walk)}
    assert walked == {(state, to) for state, targets in TRANSITIONS.items() for to in targets}


UNLAWFUL = [(s, to) for s in HolderState for to in HolderState if to not in TRANSITIONS[s]]


@pytest.mark.parametrize(("state", "to"), UNLAWFUL, ids=lambda state: state.value)
def test_move_that_is_not_in_the_table_is_a_bug(state: HolderState, to: HolderState) -> None:
    plan = ModelPlan("a", "m:f", {}, Need(Bytes(1)), True, "key")
    held = HeldModel(plan, TicketId("a-1"), state)
    with pytest.raises(AssertionError, match="no way"):
        held.move(to)
    assert held.state is state
