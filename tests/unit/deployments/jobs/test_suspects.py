"""Calls under which the engine dies: of jobs and of lines, on an engine that ends all its calls."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments import messages
from deployments.front.inference.service import TRIES
from deployments.jobs import calls
from deployments.jobs.service import JobsService
from deployments.jobs.store import Job, JobState, NewJob
from deployments.jobs.suspects import DEATHS_MOST, Suspects
from tests.support.jobs import (
    CHAT,
    Capability,
    begin,
    chat,
    ended,
    jobs_service,
    line,
    results,
    text_of,
)
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("J4", "L1")
POISON = "poison"
ATTEMPTS = DEATHS_MOST // TRIES
LOST = EngineLost("one", TicketId("t"))


class Engine(Capability):
    """A call with the text POISON ends the engine, once `victims` other calls are in flight in its
    first attempt, and all calls that the engine has with it."""

    def __init__(self) -> None:
        super().__init__()
        self.victims = 0
        self.beside: list[int] = []  # by death: the calls that ended with the poison's
        self.alive: set[asyncio.Event] = set()  # of each call in flight: what ends it

    def send(self, call: messages.InferenceCall) -> Any:
        self.calls.append(call)
        self.by_text[text_of(call)] += 1
        return _Response(self, call)


class _Response:
    def __init__(self, engine: Engine, call: messages.InferenceCall) -> None:
        self._engine, self._text = engine, text_of(call)

    async def __aiter__(self) -> AsyncGenerator[messages.Part, None]:
        engine = self._engine
        if self._text == POISON:
            if engine.by_text[POISON] <= TRIES:
                await eventually(lambda: len(engine.alive) == engine.victims)
            engine.beside.append(len(engine.alive))
            while engine.alive:
                engine.alive.pop().set()
            raise LOST
        if engine.refusals:
            raise engine.refusals.pop(0)
        engine.alive.add(death := asyncio.Event())
        ends = [asyncio.ensure_future(one.wait()) for one in (death, engine.gate)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            engine.alive.discard(death)
            for end in ends:
                end.cancel()
        if death.is_set():
            raise LOST
        head = messages.ResponseHead(200, {"content-type": "application/json"})
        yield messages.FullResponse(head, json.dumps({"said": self._text}).encode())

    def cancel(self) -> None:
        self._engine.cancelled_count += 1


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def service(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobsService]:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    monkeypatch.setattr(calls, "AGAIN_MOST_S", 0.01)
    made = jobs_service(tmp_path, engine)
    yield made
    await made.close()


async def create(service: JobsService, job_id: str, model: str = "one") -> Job:
    new = NewJob(job_id, "t", "async", CHAT, model)
    return await service.create(new, json.dumps(chat(job_id, model)).encode())


async def finished(service: JobsService, job_id: str) -> Job:
    async def look() -> Job | None:
        job = await service.get("t", job_id)
        return job if job.state.is_finished else None

    found: Job | None = await eventually(look)
    assert found is not None
    return found


async def open_after_first_attempt(engine: Engine) -> None:
    await eventually(lambda: len(engine.beside) == TRIES)
    engine.gate.set()


async def test_line_that_ends_its_engine_each_time_fails_and_the_others_complete(
    service: JobsService, engine: Engine
) -> None:
    in_flight = service.config.in_flight
    engine.gate.clear()
    engine.victims = in_flight - 1
    victims = [f"v{n}" for n in range(engine.victims)]
    later = [f"l{n}" for n in range(20)]
    await begin(service, [line(name) for name in (*victims, POISON, *later)])
    await open_after_first_attempt(engine)
    batch = await ended(service)
    assert (batch.completed, batch.failed) == (len(victims) + len(later), 1)
    [row] = await results(service, batch.error_file)
    assert (row["custom_id"], row["response"]["status_code"]) == (POISON, 502)
    assert row["response"]["body"]["error"]["code"] == "engine_lost"
    alone = [0] * TRIES * (ATTEMPTS - 1)
    assert engine.beside == [*[engine.victims] * TRIES, *alone]
    again = [text_of(call) for call in engine.calls][-len(victims) - len(alone) :]
    assert set(again) == {*victims, POISON}, "behind the other lines"


async def test_job_that_ends_its_engine_each_time_fails_and_the_others_complete(
    service: JobsService, engine: Engine
) -> None:
    engine.gate.clear()
    engine.victims = 3
    for name in ("a", "b", "c", POISON):
        await create(service, name)
    await open_after_first_attempt(engine)
    job = await finished(service, POISON)
    assert (job.state, job.status, job.attempts) == (JobState.FAILED, 502, ATTEMPTS)
    assert job.error is not None and job.error["code"] == "engine_lost"
    for name in "abc":
        assert (await finished(service, name)).state == JobState.COMPLETED
    assert engine.beside == [*[3] * TRIES, *[0] * TRIES * (ATTEMPTS - 1)]


async def test_job_that_ends_its_engine_does_so_beside_no_line_twice(
    service: JobsService, engine: Engine
) -> None:
    engine.gate.clear()
    engine.victims = 4
    await begin(service, [line(f"v{n}") for n in range(4)])
    await create(service, POISON)
    await open_after_first_attempt(engine)
    assert (await finished(service, POISON)).state == JobState.FAILED
    batch = await ended(service)
    assert (batch.completed, batch.failed) == (4, 0)
    assert engine.beside == [*[4] * TRIES, *[0] * TRIES * (ATTEMPTS - 1)]


async def test_deaths_up_to_the_last_attempt_fail_no_call(
    service: JobsService, engine: Engine
) -> None:
    engine.refusals = [LOST] * (DEATHS_MOST - 1)
    await begin(service, [line("a")])
    assert (await ended(service)).completed == 1
    engine.refusals = [LOST] * (DEATHS_MOST - 1)
    await create(service, "b")
    assert (await finished(service, "b")).state == JobState.COMPLETED
    assert not engine.refusals


async def test_model_that_left_before_each_entry_fails_no_call(
    service: JobsService, engine: Engine
) -> None:
    engine.refusals = [EngineLost("one") for _ in range(DEATHS_MOST)]
    await begin(service, [line("a")])
    assert (await ended(service)).completed == 1


async def test_next_process_goes_on_counting(
    tmp_path: Path, service: JobsService, engine: Engine
) -> None:
    engine.refusals = [LOST] * TRIES * (ATTEMPTS - 1)
    engine.gate.clear()
    await begin(service, [line("a")])
    await eventually(lambda: engine.alive)
    engine.refusals = [LOST] * TRIES * (ATTEMPTS - 1)
    await create(service, "b", "two")
    await eventually(lambda: len(engine.alive) == 2)
    await service.close()
    heir = jobs_service(tmp_path, other := Engine())
    other.refusals = [LOST] * TRIES * 2
    assert (await ended(heir)).failed == 1
    assert (await finished(heir, "b")).state == JobState.FAILED
    assert other.by_text == {"a": TRIES, "b": TRIES}
    await heir.close()


async def test_suspect_waits_for_the_calls_of_its_model_alone() -> None:
    suspects, entered = Suspects(), list[str]()

    async def call(name: str, model: str, losses: int, until: asyncio.Event) -> None:
        async with suspects.call(model, losses):
            entered.append(name)
            await until.wait()

    first, last = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for name, model, losses, until in (
            *(("plain", "one", 0, first), ("suspect", "one", 1, last)),
            *(("other", "two", 1, last), ("another", "two", 2, last)),
        ):
            group.create_task(call(name, model, losses, until))
        await eventually(lambda: len(entered) == 2)
        assert entered == ["plain", "other"] and suspects.models == {"one", "two"}
        first.set()
        await eventually(lambda: "suspect" in entered)
        group.create_task(call("late", "one", 0, last))
        await asyncio.sleep(0)
        assert "late" not in entered
        last.set()
    assert entered[-2:] == ["another", "late"] or entered[-2:] == ["late", "another"]
    assert not suspects.models
