"""Batches in process: the front's service, a real state file and folder, scripted engines."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.core.types import Priority
from arbiter.errors import DeadlineUnmet, EngineLost, NeverFits
from arbiter.units import Bytes, TicketId
from deployments.adapters.safe_files import AdaptersAway
from deployments.front.inference.model_names import ModelNames, Target
from deployments.jobs import batch_runner, batch_store, calls, validation
from deployments.jobs.batch_store import Batch, NewBatch
from deployments.jobs.errors import Conflict, NotFound, Refused, TenantLimitReached
from deployments.jobs.file_store import NewFile
from deployments.jobs.line_queue import LineQueue
from deployments.jobs.service import JobsService
from tests.support.jobs import (
    CHAT,
    Capability,
    begin,
    ended,
    jobs_service,
    line,
    results,
    upload,
)
from tests.support.waits import eventually, wait_in_thread


@pytest.fixture
def capability() -> Capability:
    return Capability()


@pytest.fixture
async def service(
    tmp_path: Path, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobsService]:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    made = jobs_service(tmp_path, capability)
    yield made
    await made.close()


@pytest.mark.spec("J4")
async def test_batch_completes_with_one_result_for_each_line(
    service: JobsService, capability: Capability
) -> None:
    names = [f"r{number}" for number in range(50)]
    batch = await begin(service, [line(name) for name in names])
    assert batch.state == "validating"
    batch = await ended(service)
    plain = batch.plain
    assert plain["status"] == "completed"
    assert plain["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert plain["usage"]["input_tokens"] == 150 and plain["usage"]["total_tokens"] == 250
    assert plain["error_file_id"] is None and plain["model"] == "one"
    found = await results(service, plain["output_file_id"])
    assert sorted(row["custom_id"] for row in found) == sorted(names)
    assert all(row["response"]["body"]["said"] == row["custom_id"] for row in found)
    assert len({row["id"] for row in found}) == 50
    assert {call.priority for call in capability.calls} == {Priority.BATCH}
    assert capability.most_at_once <= service.config.in_flight


@pytest.mark.spec("J4", "C13")
async def test_lines_are_collated_by_model(service: JobsService, capability: Capability) -> None:
    models = ["one", "two", "three"]
    await begin(service, [line(f"r{n}", models[n % 3]) for n in range(60)])
    batch = await ended(service)
    assert batch.plain["model"] is None
    switches = sum(a != b for a, b in zip(capability.order, capability.order[1:], strict=False))
    assert switches == 2
    assert Counter(capability.order) == dict.fromkeys(models, 20)


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        ("{no json", "invalid_json_line", None),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line("b", "nothing"), "model_not_found", "body.model"),
        (line("b", messages="x"), "invalid_request", "body.messages"),
        (line("b", stream=True), "invalid_request", "body.stream"),
        (line("b") | {"url": "/v1/embeddings"}, "mismatched_url", "url"),
        (line("b") | {"method": "GET"}, "invalid_request", "method"),
        ({"custom_id": "b"}, "invalid_request", "method"),
        (line("") | {"extra": 1}, "invalid_request", "custom_id"),
        (line("b") | {"extra": 1, "more": 2}, "invalid_request", "extra"),
        ([1], "invalid_request", None),
    ],
)
async def test_one_wrong_line_fails_the_batch_and_is_named(
    service: JobsService, capability: Capability, wrong: Any, code: str, param: str | None
) -> None:
    await begin(service, [line("a"), "", wrong, line("z")])
    plain = (await ended(service)).plain
    assert plain["status"] == "failed"
    [error] = plain["errors"]["data"]
    assert (error["line"], error["code"], error["param"]) == (3, code, param)
    assert not capability.calls
    assert plain["request_counts"]["total"] == 0 and plain["output_file_id"] is None


@pytest.mark.spec("J4", "L3")
def test_many_unknown_fields_of_a_line_make_no_error_each() -> None:
    unknown = {str(number): number for number in range(1_000)}
    body = validation.LineBody.model_validate(line("a") | unknown)
    assert body.model_extra == unknown, "and the first of them is refused, above"


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize(
    ("bound", "most", "told"),
    [
        ("LINES_MOST", 1, "more than 1 requests; split the file into several batches"),
        ("LINE_MOST_BYTES", 10, "more than 10 bytes; shorten this request"),
        ("LINES_MOST", 9, "line 1 has the custom_id 'a' too; give each line its own"),
    ],
)
async def test_error_of_a_line_says_the_bound_and_what_to_do(
    service: JobsService, monkeypatch: pytest.MonkeyPatch, bound: str, most: int, told: str
) -> None:
    monkeypatch.setattr(validation, bound, most)
    await begin(service, [line("a"), line("a")])
    messages = {error["message"] for error in (await ended(service)).plain["errors"]["data"]}
    assert messages == {told}


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize(
    ("name", "value"),
    [("previous_response_id", "resp_1"), ("background", True)],
)
async def test_line_of_a_response_that_only_the_front_could_answer_is_named(
    service: JobsService, capability: Capability, name: str, value: object
) -> None:
    path = "/v1/responses"
    plain = {"model": "one", "input": "x"}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": path, "body": body}
        for number, body in enumerate((plain, plain | {name: value}))
    ]
    await upload(service, lines)
    new = NewBatch("batch_a", "t", path, "file-in", "1h", 3_600.0, "file-out", "file-err")
    await service.create_batch(new)
    [error] = (await ended(service)).plain["errors"]["data"]
    assert (error["line"], error["param"]) == (2, f"body.{name}")
    assert not capability.calls


@pytest.mark.spec("J4", "J8")
async def test_line_whose_adapters_cannot_be_read_now_is_not_wrong(
    service: JobsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = [AdaptersAway("one", "the folder was not read")]
    find = ModelNames.find
    monkeypatch.setattr(AdaptersAway, "retry_after_s", 0.01)

    async def found(names: ModelNames, name: str, tenant: str) -> Target:
        if away:
            raise away.pop()
        return await find(names, name, tenant)

    monkeypatch.setattr(ModelNames, "find", found)
    await begin(service, [line("a"), line("b")])
    assert (await ended(service)).plain["request_counts"]["completed"] == 2


@pytest.mark.spec("J4", "L2")
async def test_errors_repeat_a_part_of_what_is_long(service: JobsService) -> None:
    long = "x" * 100_000
    await begin(service, [line("a") | {"url": long}, line("b", long), line(long), line(long)])
    errors = (await ended(service)).plain["errors"]["data"]
    assert [error["line"] for error in errors] == [1, 2, 3, 4]
    assert len(json.dumps(errors)) < 3_000


@pytest.mark.spec("J4")
async def test_oldest_finished_batches_of_a_tenant_are_forgotten(
    service: JobsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "FINISHED_MOST", 2)
    for name in "abcd":
        await begin(service, [line("r")], f"batch_{name}")
        await ended(service, f"batch_{name}")
    found = await service.batches("t", "", 10)
    assert [batch.id for batch in found] == ["batch_d", "batch_c", "batch_b"]


@pytest.mark.spec("J4", "L3")
async def test_empty_file_and_a_file_of_another_purpose_are_refused(service: JobsService) -> None:
    await begin(service, ["", " "])
    [error] = (await ended(service)).plain["errors"]["data"]
    assert error["code"] == "empty_file"
    await upload(service, ["x"], "file-other", "user_data")
    for name in ("file-other", "file-nothing"):
        with pytest.raises(Refused) as caught:
            new = NewBatch("batch_b", "t", CHAT, name, "1h", 60.0, "file-o", "file-e")
            await service.create_batch(new)
        assert caught.value.param == "input_file_id"


@pytest.mark.spec("J4")
async def test_permanent_refusals_go_to_the_error_file_and_transient_ones_are_tried_again(
    service: JobsService, capability: Capability
) -> None:
    capability.refusals = [
        EngineLost("one", TicketId("t")),
        NeverFits(TicketId("t"), Bytes(9), Bytes(1)),
        *[EngineLost("one", TicketId("t"))] * 5,
    ]
    await begin(service, [line(f"r{n}") for n in range(10)])
    plain = (await ended(service)).plain
    assert plain["request_counts"] == {"total": 10, "completed": 9, "failed": 1}
    [error] = await results(service, plain["error_file_id"])
    assert error["response"]["status_code"] == 507
    assert error["response"]["body"]["error"]["code"] == "never_fits"
    done = await results(service, plain["output_file_id"])
    assert len({row["custom_id"] for row in [*done, error]}) == 10


@pytest.mark.spec("J4", "C13")
@pytest.mark.parametrize("places", [1, 8])
async def test_lines_of_a_model_that_waits_for_a_turn_make_room_for_those_of_others(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(calls, "AGAIN_MOST_S", 0.5)
    service.config = service.config.model_copy(update={"in_flight": places})
    capability.memory["one"] = asyncio.Event()
    await begin(service, [line(f"a{n}") for n in range(20)])
    await eventually(lambda: capability.at_once == places)
    service.config = service.config.model_copy(update={"turn_s": 0.0})
    await begin(service, [line(f"b{n}", "two") for n in range(20)], "batch_b")
    assert (await ended(service, "batch_b")).completed == 20
    assert (await service.batch("t", "batch_a")).completed == 0
    assert places == 1 or capability.at_once >= 1, "one line of the model keeps its place"
    assert capability.most_at_once <= places
    capability.memory["one"].set()
    assert (await ended(service)).completed == 20
    found = await results(service, "file-batch_a-out")
    assert len({row["custom_id"] for row in found}) == len(found) == 20


@pytest.mark.spec("J4")
async def test_lines_of_a_model_that_waits_keep_their_places_where_no_other_has_lines(
    service: JobsService, capability: Capability
) -> None:
    capability.memory["one"] = asyncio.Event()
    await begin(service, [line(f"a{n}") for n in range(8)])
    await eventually(lambda: capability.at_once == 8)
    service.config = service.config.model_copy(update={"turn_s": 0.0})
    await service._batch_runner._fill()
    capability.memory["one"].set()
    assert (await ended(service)).completed == 8
    assert set(capability.by_text.values()) == {1}


@pytest.mark.spec("J2", "J4")
async def test_deadline_of_a_line_counts_from_its_first_attempt_and_ends_its_tries(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmet = DeadlineUnmet(TicketId("one"), 0.05, 0.01)
    capability.refusals = [unmet, unmet]
    await begin(service, [line("a", x_deadline_s=60)])
    assert (await ended(service)).completed == 1
    first, second, third = (call.deadline_s or 0.0 for call in capability.calls)
    assert 60 >= first > second > third > 0
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.06)
    capability.refusals = [unmet] * 9
    await begin(service, [line("b", x_deadline_s=0.05)], "batch_b")
    plain = (await ended(service, "batch_b")).plain
    [row] = await results(service, plain["error_file_id"])
    assert row["response"]["body"]["error"]["code"] == "deadline_unmet"
    assert capability.by_text["b"] == 1 and not service._batch_runner._first_s


@pytest.mark.spec("J4")
async def test_cancelled_batch_keeps_the_results_it_has(
    service: JobsService, capability: Capability
) -> None:
    await begin(service, [line(f"r{n}") for n in range(4)] + [line("x", "two")])
    await ended(service)
    capability.calls.clear()
    service.config = service.config.model_copy(update={"in_flight": 1})
    await begin(service, [line(f"r{n}") for n in range(500)], "batch_b")
    await eventually(lambda: len(capability.calls) > 3)
    capability.gate.clear()
    await eventually(lambda: capability.at_gate == 1)  # and no call that was let through is left
    assert (await service.cancel_batch("t", "batch_b")).state == "cancelling"
    plain = (await ended(service, "batch_b")).plain
    assert plain["status"] == "cancelled" and plain["cancelling_at"] and plain["cancelled_at"]
    found = await results(service, plain["output_file_id"])
    assert len(found) == plain["request_counts"]["completed"] >= 2
    assert capability.cancelled_count == 1
    assert (await service.cancel_batch("t", "batch_b")).state == "cancelled"
    capability.gate.set()
    await begin(service, [line("a")], "batch_c")
    assert (await ended(service, "batch_c")).completed == 1, "the only place is free again"


@pytest.mark.spec("J4", "L1")
async def test_lines_that_end_while_their_batch_is_cancelled_leave_room_for_other_batches(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes after the batch was found to be cancelling and before its calls are ended:
    what the line's end has to do in the thread of the store is not done by then."""
    service.config = service.config.model_copy(update={"in_flight": 1})
    capability.gate.clear()
    await begin(service, [line("a"), line("b")])
    await eventually(lambda: capability.at_gate == 1)
    runner, loop = service._batch_runner, asyncio.get_running_loop()
    remove, end = LineQueue.remove, LineQueue.end

    def removed(queue: LineQueue, batch_id: str) -> None:
        loop.call_soon_threadsafe(capability.gate.set)
        wait_in_thread(lambda: runner._finished)
        remove(queue, batch_id)

    def ended_late(queue: LineQueue, batch: Batch) -> None:
        wait_in_thread(lambda: all(task.done() for task in list(runner._running.values())))
        end(queue, batch)

    monkeypatch.setattr(LineQueue, "remove", removed)
    monkeypatch.setattr(LineQueue, "end", ended_late)
    await service.cancel_batch("t", "batch_a")
    plain = (await ended(service)).plain
    assert (plain["status"], plain["request_counts"]["completed"]) == ("cancelled", 1)
    monkeypatch.undo()
    await begin(service, [line("c")], "batch_b")
    assert (await ended(service, "batch_b")).completed == 1
    await eventually(lambda: runner.in_flight == 0)
    assert not +runner._queue._in_flight and not +runner._queue._tenants


@pytest.mark.spec("J4", "L3")
async def test_line_whose_calls_a_bug_ends_is_tried_three_times_and_harms_no_other(
    service: JobsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, tries = batch_runner.attempt, []

    async def fails_for_one(service: Any, path: str, body: bytes, *rest: Any, **named: Any) -> Any:
        if b"poison" in body:
            tries.append(time.monotonic())
            raise ValueError("a bug")
        return await attempt(service, path, body, *rest, **named)

    monkeypatch.setattr(batch_runner, "attempt", fails_for_one)
    monkeypatch.setattr(batch_runner, "FAILED_AGAIN_S", 0.2)
    await begin(service, [line("a"), line("poison"), line("b")])
    plain = (await ended(service)).plain
    assert (plain["status"], plain["request_counts"]["completed"]) == ("completed", 2)
    [row] = await results(service, plain["error_file_id"])
    assert (row["custom_id"], row["error"]["code"]) == ("poison", "internal_error")
    assert len(tries) == batch_runner.FAILED_TRIES
    assert tries[-1] - tries[0] >= 0.4, "not at once"
    assert not service._batch_runner._failures


@pytest.mark.spec("J4")
async def test_expired_batch_has_its_results_and_tells_the_lines_that_were_not_run(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "SWEEP_S", 0.05)
    service.config = service.config.model_copy(update={"in_flight": 1})
    await begin(service, [line("a")], "batch_a", window_s=0.5)
    assert (await ended(service)).state == "completed"
    capability.gate.clear()
    await begin(service, [line(f"r{n}") for n in range(3)], "batch_b", window_s=0.3)
    plain = (await ended(service, "batch_b")).plain
    assert plain["status"] == "expired" and plain["expired_at"]
    errors = await results(service, plain["error_file_id"])
    assert [row["custom_id"] for row in errors] == ["r0", "r1", "r2"]
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}
    assert plain["request_counts"] == {"total": 3, "completed": 0, "failed": 3}


@pytest.mark.spec("J4")
async def test_next_processes_go_on_and_each_line_has_one_result(
    tmp_path: Path, service: JobsService, capability: Capability
) -> None:
    names = [f"r{n}" for n in range(60)]
    models = ["one", "two", "three"]
    await begin(service, [line(name, models[n % 3]) for n, name in enumerate(names)])
    capabilities = [capability]
    former = service
    heirs = []
    for _ in range(3):
        calls_made = capabilities[-1].calls
        await eventually(lambda: len(calls_made) > 5)  # noqa: B023
        capabilities[-1].gate.clear()
        capabilities.append(Capability())
        heirs.append(jobs_service(tmp_path, capabilities[-1]))  # nothing of the former was closed
        former = heirs[-1]
        capabilities[-2].gate.set()  # its answers come too late
    plain = (await ended(former)).plain
    assert plain["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    found = [row["custom_id"] for row in await results(former, plain["output_file_id"])]
    assert sorted(found) == sorted(names)
    for heir in heirs:
        await heir.close()


@pytest.mark.spec("J4", "L1")
async def test_tenant_sees_its_own_files_and_batches_only(service: JobsService) -> None:
    await begin(service, [line("a")])
    await ended(service)
    for ask in (service.batch, service.cancel_batch):
        with pytest.raises(NotFound):
            await ask("other", "batch_a")
    for ask_file in (service.file, service.delete_file):
        with pytest.raises(NotFound):
            await ask_file("other", "file-batch_a")
    with pytest.raises(NotFound):
        await service.file_content("other", "file-batch_a-out", 0)
    assert await service.files("other", None, "", 10, "desc") == []
    assert await service.batches("other", "", 10) == []
    assert len(await service.files("t", None, "", 10, "desc")) == 2


@pytest.mark.spec("J4")
async def test_file_that_a_batch_reads_stays_and_bounds_of_a_tenant_hold(
    service: JobsService, capability: Capability
) -> None:
    capability.gate.clear()
    await begin(service, [line("a")])
    with pytest.raises(Conflict):
        await service.delete_file("t", "file-batch_a")
    capability.gate.set()
    await ended(service)
    await service.delete_file("t", "file-batch_a")
    service.config = service.config.model_copy(update={"tenant_bytes": 1_000})
    with pytest.raises(TenantLimitReached) as caught:
        await service.begin_file(NewFile("file-big", "t", "x", "batch", 1_000))
    assert caught.value.status_code == 429
    with pytest.raises(Refused, match="at most 209715200"):
        await service.begin_file(NewFile("file-big", "t", "x", "batch", 201 << 20))


@pytest.mark.spec("J4")
async def test_file_is_not_deleted_between_a_batch_that_reads_it_and_the_look_at_the_file(
    service: JobsService,
) -> None:
    await upload(service, [line("a")])
    new = NewBatch("batch_a", "t", CHAT, "file-in", "1h", 3_600.0, "file-out", "file-err")
    _, deleted = await asyncio.gather(
        service.create_batch(new), service.delete_file("t", "file-in"), return_exceptions=True
    )
    assert isinstance(deleted, Conflict)
    assert (await ended(service)).state == "completed"


@pytest.mark.spec("J4", "L1")
async def test_lines_wait_where_the_results_fill_what_a_tenant_may_keep(
    service: JobsService, capability: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "ROOM_AGAIN_S", 0.01)
    await upload(service, [], "file-other")
    input_bytes = len("\n".join(json.dumps(line(f"r{n}")) for n in range(40)))
    room = service.config.model_copy(update={"tenant_bytes": input_bytes + 2_000, "in_flight": 1})
    service.config = room
    await begin(service, [line(f"r{n}") for n in range(40)])

    async def is_full() -> bool | None:
        batch = await service.batch("t", "batch_a")
        return input_bytes + batch.output_bytes >= room.tenant_bytes

    await eventually(is_full)
    with pytest.raises(TenantLimitReached):
        await begin(service, [line("b")], "batch_b")
    batch = await service.batch("t", "batch_a")
    assert batch.state == "in_progress" and 0 < batch.completed < 20
    assert batch.output_bytes < 2_500, "one result beyond the bound at most"
    service.config = room.model_copy(update={"tenant_bytes": 1 << 20})
    assert (await ended(service)).completed == 40
