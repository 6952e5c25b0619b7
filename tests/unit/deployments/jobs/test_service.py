"""JobsService: jobs run by the front's own service, without Ray; restarts, refusals, events."""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.core.types import Priority
from arbiter.errors import DeadlineUnmet, ModelCoolingDown
from arbiter.units import TicketId
from deployments.jobs import calls, runner, store
from deployments.jobs import service as service_module
from deployments.jobs.errors import NotFound, Superseded, TenantLimitReached
from deployments.jobs.file_store import NewFile
from deployments.jobs.service import JobsService
from deployments.jobs.store import Job, JobState, NewJob
from tests.support.jobs import CHAT, WAIT_S, Capability, chat, jobs_service
from tests.support.waits import eventually


@pytest.fixture
def capability() -> Capability:
    return Capability()


@pytest.fixture
async def service(tmp_path: Path, capability: Capability) -> AsyncIterator[JobsService]:
    made = jobs_service(tmp_path, capability)
    yield made
    await made.close()


async def create(service: JobsService, job_id: str = "a", **fields: object) -> Job:
    new = NewJob(job_id, "t", "async", CHAT, "one")
    return await service.create(new, json.dumps(chat(job_id) | fields).encode())


async def finished(service: JobsService, job_id: str = "a") -> Job:
    """Waits as a client does: by the long poll of its events."""
    async with asyncio.timeout(WAIT_S):
        after = 0
        while True:
            page = await service.events("t", job_id, after, 5.0)
            if page.job.state.is_finished:
                return page.job
            after = page.events[-1][0] if page.events else after


@pytest.mark.spec("J4")
async def test_job_is_run_as_its_tenant_with_priority_batch(
    service: JobsService, capability: Capability
) -> None:
    await create(service, x_priority="urgent")
    job = await finished(service)
    assert (job.state, job.status, job.attempts) == (JobState.COMPLETED, 200, 1)
    assert json.loads(await service.result("t", "a"))["said"] == "a"
    [call] = capability.calls
    assert (call.priority, call.tenant) == (Priority.BATCH, "t")


@pytest.mark.spec("J4")
async def test_oldest_results_are_forgotten_when_a_job_ends(
    service: JobsService, capability: Capability
) -> None:
    capability.gate.clear()
    bounds = {"tenant_results": 2, "in_flight": 1}
    service.config = service.config.model_copy(update=bounds)
    for name in "abcd":
        await create(service, name)
    capability.gate.set()
    await finished(service, "d")

    async def kept() -> list[str]:
        return [job.id for job in await service.page("t")]

    async def is_trimmed() -> bool:
        return sorted(await kept()) == ["c", "d"]

    await eventually(is_trimmed)


@pytest.mark.spec("J4", "L3")
async def test_wrong_body_fails_with_the_field_named(
    service: JobsService, capability: Capability
) -> None:
    await create(service, messages="no list")
    job = await finished(service)
    assert job.state == JobState.FAILED
    assert job.error is not None and job.error["param"] == "messages"
    assert not capability.calls


@pytest.mark.spec("J4")
async def test_transient_refusal_is_tried_again(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    capability.refusals = [ModelCoolingDown("one", "no memory", 0.01)] * 2
    await create(service)
    job = await finished(service)
    assert (job.state, job.attempts) == (JobState.COMPLETED, 3)


@pytest.mark.spec("J4", "J8")
async def test_jobs_that_wait_for_another_try_hide_no_later_ones(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "QUEUED_MOST", 4)
    capability.refusals = [ModelCoolingDown("one", "no memory", 30.0) for _ in range(9)]
    waiting = [f"a{number}" for number in range(9)]
    for name in waiting:
        await create(service, name)
    await eventually(lambda: len(service._runner._not_before) == 9)
    await create(service, "b")
    assert (await finished(service, "b")).state == JobState.COMPLETED
    assert {(await service.get("t", name)).state for name in waiting} == {JobState.QUEUED}
    service._runner._not_before.clear()
    service._runner.wake()
    assert {(await finished(service, name)).attempts for name in waiting} == {2}


@pytest.mark.spec("J4", "J8")
@pytest.mark.parametrize("places", [1, 8])
async def test_jobs_whose_model_waits_for_a_turn_make_room_for_those_of_others(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(calls, "AGAIN_MOST_S", 0.5)
    service.config = service.config.model_copy(update={"in_flight": places})
    capability.memory["one"] = asyncio.Event()
    waiting = [f"a{number}" for number in range(9)]
    for name in waiting:
        await create(service, name)
    await eventually(lambda: capability.at_once == places)
    service.config = service.config.model_copy(update={"turn_s": 0.0})
    new = NewJob("b", "t", "async", CHAT, "two")
    await service.create(new, json.dumps(chat("b", "two")).encode())
    assert (await finished(service, "b")).state == JobState.COMPLETED
    assert capability.most_at_once <= places
    assert places == 1 or capability.at_once >= 1, "one job of the model keeps its place"
    capability.memory["one"].set()
    for name in waiting:
        assert (await finished(service, name)).state == JobState.COMPLETED


@pytest.mark.spec("J4")
async def test_job_whose_model_serves_waits_for_nothing_more(
    service: JobsService, capability: Capability
) -> None:
    memory = capability.memory["one"] = asyncio.Event()
    capability.gate.clear()
    await create(service, "a")

    async def is_queued() -> bool:
        progress = (await service.get("t", "a")).progress
        return progress is not None and progress["phase"] == "queued"

    await eventually(is_queued)
    memory.set()
    await eventually(lambda: capability.at_gate == 1)
    assert (await service.get("t", "a")).progress is None
    capability.gate.set()
    assert (await finished(service, "a")).state == JobState.COMPLETED


@pytest.mark.spec("J2", "J4")
async def test_deadline_of_a_job_counts_from_its_making_and_ends_it(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.06)
    capability.refusals = [DeadlineUnmet(TicketId("one"), 0.05, 0.01) for _ in range(9)]
    await create(service, x_deadline_s=0.05)
    job = await finished(service)
    assert (job.state, job.status) == (JobState.FAILED, 503)
    assert job.error is not None and job.error["code"] == "deadline_unmet"
    assert job.attempts <= 2 and len(capability.calls) <= 1


@pytest.mark.spec("J4")
async def test_events_of_a_stream_are_read_while_it_runs(
    service: JobsService, capability: Capability
) -> None:
    capability.stream = [b"event: x\nda", b"ta: 1\n\n: comment\n\ndata: 2\n\n"]
    capability.gate.clear()
    await create(service, stream=True)
    seen: list[tuple[int, str]] = []
    async with asyncio.timeout(WAIT_S):
        while len(seen) < 2:
            page = await service.events("t", "a", len(seen), 5.0)
            seen += page.events
            assert page.job.state != JobState.COMPLETED
    assert seen == [(1, "event: x\ndata: 1"), (2, "data: 2")]
    capability.gate.set()
    assert (await finished(service)).state == JobState.COMPLETED


@pytest.mark.spec("J4")
async def test_cancelled_job_ends_its_call_down_to_the_engine(
    service: JobsService, capability: Capability
) -> None:
    capability.gate.clear()
    await create(service)
    await eventually(lambda: capability.at_once)
    assert (await service.cancel("t", "a")).state == JobState.CANCELLING
    assert (await finished(service)).state == JobState.CANCELLED
    assert capability.cancelled_count == 1


@pytest.mark.spec("J4")
async def test_job_that_is_cancelled_before_its_first_step_keeps_no_place(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_task, cancelled = asyncio.create_task, []

    def first_is_cancelled(work: Any, **named: Any) -> Any:
        task = create_task(work, **named)
        if work.__name__ == "_carry" and not cancelled:
            cancelled.append(task.cancel())
        return task

    monkeypatch.setattr(asyncio, "create_task", first_is_cancelled)
    await create(service)
    job = await finished(service)
    assert (cancelled, job.state, job.attempts) == ([True], JobState.COMPLETED, 2)
    assert len(capability.calls) == 1


@pytest.mark.spec("J4", "L3")
async def test_job_whose_call_a_bug_ends_is_tried_again_but_not_at_once(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    async def fails_twice(*said: Any, **named: Any) -> Any:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise ValueError("a bug")
        return await calls.attempt(*said, **named)

    monkeypatch.setattr(runner, "attempt", fails_twice)
    monkeypatch.setattr(runner, "AGAIN_MOST_S", 0.2)
    await create(service)
    job = await finished(service)
    assert (job.state, job.attempts) == (JobState.COMPLETED, 3)
    assert tries[-1] - tries[0] >= 0.4


@pytest.mark.spec("J4")
async def test_next_process_goes_on_with_what_the_former_had_begun(
    tmp_path: Path, service: JobsService, capability: Capability
) -> None:
    capability.gate.clear()
    await create(service, "a")
    await create(service, "b")
    await eventually(lambda: capability.at_once == 2)
    heir = jobs_service(tmp_path, other := Capability())  # as after kill -9: nothing was closed
    for name in "ab":
        job = await finished(heir, name)
        assert (job.state, job.attempts) == (JobState.COMPLETED, 2)
    capability.gate.set()
    await eventually(lambda: not capability.at_once)
    assert other.by_text == {"a": 1, "b": 1}
    await heir.close()


@pytest.mark.spec("J4")
async def test_no_more_calls_at_once_than_the_table_says(
    service: JobsService, capability: Capability
) -> None:
    service.config = service.config.model_copy(update={"in_flight": 2})
    capability.gate.clear()
    for name in "abcd":
        await create(service, name)
    await eventually(lambda: capability.at_once == 2)
    assert (await service.get("t", "d")).position == 1
    capability.gate.set()
    for name in "abcd":
        await finished(service, name)
    assert capability.most_at_once == 2


@pytest.mark.spec("J4", "C10")
async def test_urgent_jobs_go_first_and_tenants_take_turns(
    service: JobsService, capability: Capability
) -> None:
    service.config = service.config.model_copy(update={"in_flight": 2})
    capability.gate.clear()
    queued = [("t", f"a{number}", "BATCH") for number in range(20)]
    queued += [("u", "small", "BATCH"), ("v", "urgent", "URGENT")]
    for tenant, name, priority in queued:
        new = NewJob(name, tenant, "async", CHAT, "one", meta={"priority": priority})
        await service.create(new, json.dumps(chat(name)).encode())
    await eventually(lambda: capability.at_once == 2)
    assert (await service.get("v", "urgent")).position == 0
    service.config = service.config.model_copy(update={"in_flight": 4})
    service._runner.wake()
    await eventually(lambda: capability.at_once == 4)
    assert list(capability.by_text) == ["a0", "a1", "urgent", "small"]
    capability.gate.set()
    for number in range(20):
        await finished(service, f"a{number}")
    await eventually(lambda: not +service._runner._tenants)


@pytest.mark.spec("J4", "L1")
async def test_polls_of_another_tenant_find_nothing_and_no_poll_calls_a_model(
    service: JobsService, capability: Capability
) -> None:
    for ask in (service.get, service.events, service.result, service.cancel):
        with pytest.raises(NotFound):
            await ask("t", "a")
    assert await service.page("t") == []
    assert not capability.calls


@pytest.mark.spec("J4", "A18")
async def test_superseded_process_is_unhealthy_and_its_heir_is_not(
    tmp_path: Path, service: JobsService, capability: Capability
) -> None:
    await service.check_health()
    heir = jobs_service(tmp_path, capability)
    with pytest.raises(Superseded):
        await create(service)
    service._runner.wake()
    service._batch_runner.wake()

    def is_noticed() -> bool:
        return any(task.done() for task in service._tasks)

    await eventually(is_noticed)
    with pytest.raises(Superseded):
        await service.check_health()
    await heir.check_health()
    await heir.close()


@pytest.mark.spec("J4", "J8")
async def test_job_beyond_the_bytes_of_its_tenant_is_refused(
    service: JobsService, capability: Capability
) -> None:
    capability.gate.clear()
    await create(service, "a")
    service.config = service.config.model_copy(update={"tenant_job_bytes": 100})
    with pytest.raises(TenantLimitReached):
        await create(service, "b")
    capability.gate.set()
    await finished(service, "a")
    await create(service, "b")


@pytest.mark.spec("J4")
async def test_what_has_expired_leaves_however_much_it_is(
    tmp_path: Path, service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "REMOVE_EVERY_S", 0.01)
    for number in range(1_001):  # more than leave in one look
        await service.begin_file(NewFile(f"file-{number}", "t", "x", "batch", 0, -1.0))
    heir = jobs_service(tmp_path, capability)

    async def have_left() -> bool:
        with sqlite3.connect(tmp_path / "arbiter.sqlite") as db:
            return db.execute("SELECT count(*) FROM job_files").fetchone() == (0,)

    await eventually(have_left)
    await heir.close()
