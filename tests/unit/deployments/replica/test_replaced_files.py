"""A model whose files are replaced while it loads, wakes, drains or serves (D5), on one holder."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import Reason, Tier
from arbiter.errors import FILES_REPLACED, LoadFailed
from arbiter.protocol import messages
from arbiter.units import TicketId
from deployments.config import load_plan
from deployments.config.schema import ConfigError
from deployments.replica import residency as residency_module
from deployments.replica.held_model import HolderState
from tests.support.scripted_holder import MODEL, TABLE, holder, revoke, until, use


def with_source(folder: Path) -> messages.ConfigChanged:
    row = TABLE["capabilities"]["c"] | {"models": {"a": MODEL | {"source": str(folder)}}}
    return messages.ConfigChanged({"capabilities": {"c": row}})


@pytest.mark.spec("D5")
async def test_files_replaced_during_a_load_or_wake_are_loaded_anew_before_any_answer(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"old")
    async with holder(loaded=False) as (residency, arbiter, engine):
        residency._on_command(with_source(tmp_path))
        waiting = asyncio.ensure_future(use(residency))
        await until(lambda: engine.asked_if_ready)
        weights.write_bytes(b"newer")
        engine.loaded.set()
        served = await waiting
        first, second = arbiter.asked
        assert served == second and ev.LoadBroke(first, FILES_REPLACED, False) in arbiter.told
        loads = [event.ticket for event in arbiter.told if isinstance(event, ev.Loaded)]
        assert loads == [second], "what was read half old and half new never serves"
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        engine.on_wake = lambda: weights.write_bytes(b"newest")
        third = await use(residency)
        assert third not in (first, second) and ev.Released(second, "replaced") in arbiter.told
        assert engine.acts == ["/control/sleep", "/control/wake"]


@pytest.mark.spec("D5", "A12")
async def test_files_that_go_on_changing_fail_the_second_load(tmp_path: Path) -> None:
    """And the model cools down: it is not loaded again and again while they are written."""
    weights = tmp_path / "weights"
    weights.write_bytes(b"")
    async with holder() as (residency, arbiter, _):
        residency._on_command(with_source(tmp_path))
        spawn = arbiter.spawn

        async def and_write(ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
            with weights.open("ab") as stream:
                stream.write(b"more")
            return await spawn(ticket, spec)

        arbiter.spawn = and_write  # type: ignore[method-assign]
        with pytest.raises(LoadFailed, match="replaced"):
            await use(residency)
        assert [ev.LoadBroke(t, FILES_REPLACED, False) in arbiter.told for t in arbiter.asked] == [
            True,
            True,
        ]


@pytest.mark.spec("D5", "A12")
async def test_model_that_is_brought_back_without_a_request_is_loaded_from_replaced_files(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"old")
    async with holder() as (residency, arbiter, _):
        residency._on_command(with_source(tmp_path))
        first = await use(residency)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        weights.write_bytes(b"newer")
        residency._on_command(messages.ReloadCommand("a"))
        await until(lambda: len(arbiter.asked) > 1 and "a" in residency.models)
        await until(lambda: residency.models["a"].state is HolderState.RESIDENT)
        assert residency.models["a"].ticket != first


@pytest.mark.spec("D5", "A9")
async def test_files_replaced_while_it_drained_are_loaded_for_those_who_waited(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"old")
    async with holder() as (residency, arbiter, _):
        residency._on_command(with_source(tmp_path))
        async with residency.use("a"):
            revoke(residency, Reason.SWAP, barrier_s=0.05)
            waiting = asyncio.ensure_future(use(residency))
            weights.write_bytes(b"newer")
            second = await waiting
            first = arbiter.asked[0]
            assert ev.BarrierDropped(first, 1) in arbiter.told and second != first
            assert ev.Released(first, "replaced") not in arbiter.told, "one request goes on with it"
        await until(lambda: ev.Released(first, "replaced") in arbiter.told)
        assert await use(residency) == second


@pytest.mark.spec("D5", "C8")
async def test_pinned_model_without_a_plan_for_a_moment_is_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while its folder is removed and copied anew."""
    make, failures = load_plan.plan, [ConfigError("half a header")]

    def planned(*args: Any, **more: Any) -> load_plan.ModelPlan:
        if failures:
            raise failures.pop()
        return make(*args, **more)

    monkeypatch.setattr(load_plan, "plan", planned)
    monkeypatch.setattr(residency_module, "RETRY_PLAN_S", 0.01)
    monkeypatch.setattr(LoadFailed, "retry_after_s", 0.0)
    async with holder() as (residency, arbiter, _):
        row = TABLE["capabilities"]["c"] | {"models": {"a": MODEL | {"pin": True}}}
        residency._on_command(messages.ConfigChanged({"capabilities": {"c": row}}))
        await until(lambda: "Loaded" in arbiter.kinds())
        assert not failures
