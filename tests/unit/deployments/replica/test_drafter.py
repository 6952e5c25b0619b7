"""A target with its drafter, on its holder: asked for together, accounted for together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason
from arbiter.errors import NeverFits
from arbiter.protocol import messages
from arbiter.units import Bytes, DeviceId, Epoch, Span, TicketId, seconds
from deployments.config.load_plan import plan
from deployments.config.schema import CapabilityConfig, ConfigError, Table
from deployments.replica.engine_client import LoadRefused
from tests.unit.deployments.config.test_load_plan import safetensors
from tests.unit.deployments.replica import test_residency as base

pytestmark = pytest.mark.spec("A13")
ON_TOO = (types.DeviceBytes(DeviceId("n/cpu:0"), Bytes(2)),)


def models(folder: Path, **more: Any) -> dict[str, Any]:
    safetensors(folder, "a.safetensors", 100)
    return {
        "a": {"source": "x", "need": {"weights": 5}, "drafter": {"model": "b"}, **more},
        "b": {"source": str(folder), "need": {"weights": 3}},
    }


def table(folder: Path, engine: str = "vllm") -> Any:
    return {"capabilities": {"c": {"role": "text", "engine": engine, "models": models(folder)}}}


class GangRecorder:
    """The arbiter's part in it."""

    def __init__(self, arbiter: Any) -> None:
        self.arbiter, self.asked = arbiter, []  # type: ignore[var-annotated]
        self.error: Exception | None = None
        arbiter.acquire_all = self.acquire_all

    async def acquire_all(self, asked: tuple[ev.Requested, ...]) -> tuple[messages.Granted, ...]:
        self.asked.append(asked)
        if self.error:
            raise self.error
        sizes = (base.ON, ON_TOO)
        return tuple(
            messages.Granted(r.ticket, devices, seconds(5), Span(0), Epoch(1))
            for r, devices in zip(asked, sizes, strict=True)
        )


async def test_target_and_drafter_are_requested_together_and_are_in_each_heartbeat(
    tmp_path: Path,
) -> None:
    async with base.holder() as (residency, arbiter, _):
        gangs = GangRecorder(arbiter)
        residency._obey(messages.ConfigChanged(table(tmp_path)))
        async with residency.use("a") as engine:
            [(target, drafter)] = gangs.asked
            assert (target.model, target.shares_process_with) == ("a", None)
            assert (drafter.model, drafter.shares_process_with) == ("b", target.ticket)
            assert drafter.ticket != target.ticket and drafter.need.weights_bytes == 100
            own, companion = residency.account()
            assert (own.ticket, own.devices) == (TicketId(engine.ticket), base.ON)
            assert (companion.ticket, companion.devices) == (drafter.ticket, ON_TOO)
            assert (companion.shares_process_with, companion.phase) == (own.ticket, own.phase)
        base.revoke(residency, Reason.PRESSURE)
        await base.until(lambda: "a" not in residency.models)
        assert residency.account() == ()
        assert arbiter.told[-1] == ev.Released(target.ticket, "pressure")


async def test_refused_target_and_drafter_are_not_held(tmp_path: Path) -> None:
    async with base.holder() as (residency, arbiter, _):
        gangs = GangRecorder(arbiter)
        gangs.error = NeverFits(TicketId("x"), Bytes(9), Bytes(5))
        residency._obey(messages.ConfigChanged(table(tmp_path)))
        with pytest.raises(NeverFits):
            await base.use(residency)
        assert residency.account() == () and not residency.models
        assert arbiter.told == [ev.Withdrawn(gangs.asked[0][0].ticket)]  # had it been granted


async def test_later_request_for_a_queued_target_repeats_both_tickets_and_their_gang(
    tmp_path: Path,
) -> None:
    async with base.holder() as (residency, arbiter, _):
        gangs, grant, may_go_on = GangRecorder(arbiter), arbiter.acquire_all, asyncio.Event()

        async def granted(asked: tuple[ev.Requested, ...]) -> tuple[messages.Granted, ...]:
            await may_go_on.wait()
            return tuple(await grant(asked))

        arbiter.acquire_all = granted
        residency._obey(messages.ConfigChanged(table(tmp_path)))
        uses = [base.entered(residency, 30)]
        await base.until(lambda: residency.models)  # else the other may come first
        uses.append(base.entered(residency, None))
        await base.until(lambda: arbiter.told)
        said = tuple(arbiter.told)  # perhaps before they were asked for
        may_go_on.set()
        await asyncio.gather(*uses)
        [(target, drafter)] = gangs.asked
        assert [r.ticket for r in said] == [target.ticket, drafter.ticket]
        assert {r.gang for r in said} == {(target.ticket, drafter.ticket)}
        assert [r.shares_process_with for r in said] == [None, target.ticket]
        assert [r.deadline for r in said] == [None, None]


async def test_second_try_of_target_and_drafter_uses_two_new_tickets(tmp_path: Path) -> None:
    async with base.holder() as (residency, arbiter, _):
        gangs, spawn = GangRecorder(arbiter), arbiter.spawn

        async def out_of_memory_once(ticket: TicketId, spec: messages.SpawnSpec) -> str:
            arbiter.spawn = spawn
            raise LoadRefused("no room", out_of_memory=True)

        arbiter.spawn = out_of_memory_once
        residency._obey(messages.ConfigChanged(table(tmp_path)))
        await asyncio.wait_for(base.use(residency), 5)
        tickets = [r.ticket for asked in gangs.asked for r in asked]
        assert len(tickets) == len(set(tickets)) == 4


def test_a_drafter_is_another_model_of_an_engine_that_takes_one(tmp_path: Path) -> None:
    made = plan("a", _capability(tmp_path))
    assert made.config["drafter"]["tokens"] == 3 and made.config["can_sleep"] is False
    assert made.need.host_bytes == 0 and made.drafter is not None
    assert made.device_bytes == made.need.device_bytes + made.drafter.need.device_bytes
    assert made.drafter.settings_key != plan("b", _capability(tmp_path)).settings_key
    with pytest.raises(ConfigError, match="no `drafter`"):
        plan("a", _capability(tmp_path, engine="x:build"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"drafter": {"model": "a"}}, "no other model"),
        ({"drafter": {"model": "z"}}, "no other model"),
        ({"adapters": {"folder": "f"}}, "takes no `adapters`"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_when_the_table_is_read(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    wrong = table(tmp_path)
    wrong["capabilities"]["c"]["models"]["a"] |= more
    with pytest.raises(ValueError, match=words):
        Table.model_validate(wrong)


def _capability(folder: Path, engine: str = "vllm") -> CapabilityConfig:
    return Table.model_validate(table(folder, engine)).capabilities["c"]
