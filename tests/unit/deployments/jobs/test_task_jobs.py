"""Batches and jobs that name a task: a rung of this machine is chosen when each is run."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.core.types import Priority
from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments.config.schema import Table, parse_table
from deployments.jobs import batch_runner, calls, runner
from deployments.jobs.service import JobsService
from deployments.jobs.store import JobState, NewJob
from deployments.tasks import climb
from tests.support.jobs import CHAT, Capability, begin, chat, ended, jobs_service, line, results
from tests.support.task_front import COLD, ScriptedArbiter
from tests.support.waits import eventually
from tests.unit.deployments.remotes.conftest import section

pytestmark = pytest.mark.spec("J4", "J5")


def table(**tasks: Any) -> Table:
    models = {name: {"source": "x", "need": {"weights": "1 MiB"}} for name in ("one", "two")}
    return parse_table(
        {
            "capabilities": {"chat": {"role": "text", "engine": "vllm", "models": models}},
            "remotes": section("http://127.0.0.1:1/v1").model_dump(mode="json"),
            "tasks": tasks,
        }
    )


LADDERS = {
    "sum": {"ladder": ["one", "two"], "budget_s": 0.001},
    "far": {"ladder": ["far-chat", "two"]},
    "away": {"ladder": ["far-chat"]},
}


@pytest.fixture
def capability() -> Capability:
    return Capability()


@pytest.fixture
def arbiter() -> ScriptedArbiter:
    return ScriptedArbiter(resident=("two",), plans={"one": COLD})


@pytest.fixture
async def service(
    tmp_path: Path,
    capability: Capability,
    arbiter: ScriptedArbiter,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[JobsService]:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    monkeypatch.setattr(batch_runner, "Forecasts", arbiter.forecasts)
    monkeypatch.setattr(runner, "Forecasts", arbiter.forecasts)
    made = jobs_service(tmp_path, capability, table(**LADDERS))
    yield made
    await made.close()


async def test_lines_of_a_task_go_to_the_rung_that_is_warm_and_never_to_a_remote(
    service: JobsService, capability: Capability
) -> None:
    lines = [line(f"r{n}", ("task:sum", "task:far")[n % 2]) for n in range(20)]
    await begin(service, lines)
    batch = await ended(service)
    assert batch.plain["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    found = await results(service, batch.plain["output_file_id"])
    assert {row["response"]["body"]["model"] for row in found} == {"two"}
    assert {call.priority for call in capability.calls} == {Priority.BATCH}
    assert {json.loads(call.body)["model"] for call in capability.calls} == {"two"}


async def test_line_of_a_task_is_run_once_though_its_first_rung_fails(
    service: JobsService, capability: Capability
) -> None:
    capability.refusals = [EngineLost("two", TicketId("t"))] * 3  # as often as a call is sent
    await begin(service, [line("r", "task:sum")])
    assert (await ended(service)).plain["request_counts"]["completed"] == 1
    assert capability.order == ["two", "two", "two", "one"]


async def test_line_waits_for_its_rung_past_the_budget(
    service: JobsService,
    capability: Capability,
    arbiter: ScriptedArbiter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(climb, "LOOK_S", 0)
    arbiter.resident, arbiter.plans = (), {"one": COLD, "two": COLD}
    capability.gate.clear()
    await begin(service, [line("r", "task:sum")])

    async def is_waiting() -> bool:
        return capability.at_once == 1

    assert await eventually(is_waiting)
    arbiter.resident = ("two",)
    arbiter.now_s += 10
    for _ in range(500):  # passes of the event loop, in which a live request would have gone on
        await asyncio.sleep(0)
    capability.gate.set()
    assert (await ended(service)).plain["request_counts"]["completed"] == 1
    assert capability.order == ["one"]


@pytest.mark.parametrize(("task", "code"), [("summ", "model_not_found"), ("away", "scope_missing")])
async def test_batch_is_refused_by_the_line_whose_task_no_model_here_can_do(
    service: JobsService, capability: Capability, task: str, code: str
) -> None:
    await begin(service, [line("a"), line("b", f"task:{task}")])
    batch = await ended(service)
    [error] = batch.plain["errors"]["data"]
    assert (batch.plain["status"], error["line"], error["code"]) == ("failed", 2, code)
    assert capability.calls == []


async def test_job_of_a_task_is_answered_by_a_rung(
    service: JobsService, capability: Capability
) -> None:
    body = json.dumps(chat("later", "task:sum")).encode()
    await service.create(NewJob("job_a", "t", "async", CHAT, "task:sum"), body)

    async def is_over() -> bool:
        return (await service.get("t", "job_a")).state is JobState.COMPLETED

    assert await eventually(is_over)
    assert json.loads(await service.result("t", "job_a", 0))["model"] == "two"
    assert capability.calls[0].priority is Priority.BATCH
