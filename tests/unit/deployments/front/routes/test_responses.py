"""OpenAI's responses with its official client, over the front's application in process: stored,
continued, in the background, resumed, cancelled, and of two tenants."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import openai
import pytest
from openai import AsyncOpenAI

from arbiter.core.types import Priority
from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments import messages
from deployments.front.access.keys import Scope
from deployments.front.dependencies import READERS_MOST
from deployments.front.inference.request import parse
from deployments.front.jobs import stored_responses
from deployments.front.jobs.async_calls import COMMENT
from deployments.front.jobs.stored_responses import StoredResponses
from deployments.jobs import bodies, calls, sse
from deployments.jobs import client as jobs_client
from deployments.jobs.errors import StorageFailed, StorageFull
from deployments.jobs.runner import CUT_TRIES
from tests.support import responding
from tests.support.responding import WORDS, Front, fail_at_the_second_look
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("J4")
TEXT = "".join(WORDS)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    made = Front(tmp_path)
    yield made
    made.responder.gate.set()
    await made.service.close()


@pytest.fixture
def client(front: Front) -> AsyncOpenAI:
    return front.client()


async def ended(
    front: Front, client: AsyncOpenAI, response_id: str, tenant: str = "default"
) -> Any:
    await front.ended(response_id, tenant)
    return await client.responses.retrieve(response_id)


async def test_live_response_is_kept_and_continued_without_the_engine_keeping_any(
    front: Front, client: AsyncOpenAI
) -> None:
    first = await client.responses.create(model="one", input="Who?")
    assert (first.output_text, first.status) == (TEXT, "completed")
    assert await client.responses.retrieve(first.id) == first
    second = await client.responses.create(
        model="two", input=[{"role": "user", "content": "Why?"}], previous_response_id=first.id
    )
    assert second.previous_response_id == first.id != second.id
    sent = front.responder.bodies[1]
    assert [item["role"] for item in sent["input"]] == ["user", "assistant", "user"]
    assert {body["store"] for body in front.responder.bodies} == {False}
    assert "previous_response_id" not in sent
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    third = await client.responses.create(model="one", input="And?", previous_response_id=second.id)
    assert third.status == "completed"  # each response has its whole conversation
    assert len(front.responder.bodies[2]["input"]) == 5


@pytest.mark.spec("L3")
@pytest.mark.parametrize("wrong", [5, True, None, {"role": "user"}])
async def test_input_that_is_none_is_named_where_a_response_is_continued(
    client: AsyncOpenAI, wrong: Any
) -> None:
    first = await client.responses.create(model="one", input="Who?")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="one", input=wrong, previous_response_id=first.id)
    assert refused.value.param == "input"


async def test_stream_is_kept_at_its_end_under_the_id_of_its_first_event(
    client: AsyncOpenAI,
) -> None:
    stream = await client.responses.create(model="one", input="Who?", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(6))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert events[-1].response.id == events[0].response.id
    kept = await client.responses.retrieve(events[0].response.id)
    assert kept.output_text == TEXT
    with pytest.raises(openai.BadRequestError, match="stream") as refused:
        await client.responses.retrieve(kept.id, stream=True)
    assert refused.value.param == "stream"


async def test_store_false_keeps_nothing_and_asks_the_jobs_process_nothing(
    front: Front, client: AsyncOpenAI
) -> None:
    said = await client.responses.create(model="one", input="Who?", store=False)
    assert said.output_text == TEXT and front.asked == []
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(said.id)


async def test_no_event_of_a_stream_says_that_what_is_not_kept_is_stored(
    client: AsyncOpenAI,
) -> None:
    first = await client.responses.create(model="one", input="Who?")
    stream = await client.responses.create(
        model="one", input="Why?", previous_response_id=first.id, store=False, stream=True
    )
    objects = [event.response async for event in stream if hasattr(event, "response")]
    assert len(objects) > 1
    assert {(one.model_extra or {})["store"] for one in objects} == {False}


@pytest.mark.spec("L3")
async def test_conversation_has_the_bound_of_a_body_with_all_its_turns(
    front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "MAX_BODY_BYTES", 3_000)
    first = await client.responses.create(model="one", input="x" * 2_000)
    with pytest.raises(openai.BadRequestError, match="begin a new conversation") as refused:
        await client.responses.create(model="one", input="y" * 2_000, previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"
    assert len(front.responder.bodies) == 1


async def test_answer_that_cannot_be_kept_is_given_and_says_so(
    front: Front, client: AsyncOpenAI
) -> None:
    front.refusal = StorageFull("/state", "no space left on device")
    said = await client.responses.create(model="one", input="Who?")
    assert said.output_text == TEXT
    assert said.model_extra is not None and said.model_extra["store"] is False


async def test_background_response_is_queued_run_as_batch_and_retrieved(
    front: Front, client: AsyncOpenAI
) -> None:
    front.responder.gate.clear()
    begun = await client.responses.create(
        model="one", input="Who?", background=True, instructions="Briefly.", metadata={"a": "b"}
    )
    assert begun.status in ("queued", "in_progress") and begun.background
    assert (begun.instructions, begun.metadata) == ("Briefly.", {"a": "b"})
    front.responder.gate.set()
    done = await ended(front, client, begun.id)
    assert (done.status, done.output_text, done.id) == ("completed", TEXT, begun.id)
    [call] = front.responder.calls
    assert call.priority is Priority.BATCH


@pytest.mark.parametrize(("tools_count", "reads"), [(0, 0), (1, 0), (120, 1)])
async def test_running_response_is_shown_without_a_look_at_its_whole_request(
    front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, tools_count: int, reads: int
) -> None:
    front.responder.gate.clear()
    tools: Any = [
        {"type": "function", "name": f"f{n}", "parameters": {}, "strict": False}
        for n in range(tools_count)
    ]
    begun = await client.responses.create(
        model="one", input="Who? " * 50_000, background=True, instructions="Briefly.", tools=tools
    )
    read, request = [], StoredResponses.request

    async def noted(stored: StoredResponses, response_id: str) -> Any:
        read.append(response_id)
        return await request(stored, response_id)

    monkeypatch.setattr(StoredResponses, "request", noted)
    shown = await client.responses.retrieve(begun.id)
    assert (shown.instructions, len(shown.tools), shown.model) == ("Briefly.", tools_count, "one")
    assert shown.status in ("queued", "in_progress") and len(read) == reads
    front.responder.gate.set()
    done = await ended(front, client, begun.id)
    assert done.output_text == TEXT


async def test_background_priority_is_lifted_only_within_the_scope_of_its_key(
    front: Front,
) -> None:
    high: Any = {"x_priority": "high"}
    with pytest.raises(openai.PermissionDeniedError):
        await front.client(front.key("acme")).responses.create(
            model="one", input="Who?", background=True, extra_body=high
        )
    client = front.client(front.key("acme", Scope.PRIORITY))
    begun = await client.responses.create(
        model="one", input="Who?", background=True, extra_body=high
    )
    await ended(front, client, begun.id, "acme")
    assert [call.priority for call in front.responder.calls] == [Priority.HIGH]


async def test_stream_of_the_background_is_resumed_where_it_was_left(
    front: Front, client: AsyncOpenAI
) -> None:
    stream = await client.responses.create(model="one", input="Who?", background=True, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert [event.sequence_number for event in events] == list(range(7))
    whole = events[-1]
    assert whole.type == "response.completed" and whole.response.output_text == TEXT
    again = await client.responses.retrieve(whole.response.id, stream=True, starting_after=3)
    rest = [event async for event in again]
    assert [event.sequence_number for event in rest] == [4, 5, 6]
    assert rest == events[4:]
    assert len(front.responder.calls) == 1  # a reader asks no engine


@pytest.mark.spec("J8")
async def test_reader_of_a_stream_is_told_why_it_ends_where_jobs_cannot_be_read(
    front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.responder.gate.clear()
    fail_at_the_second_look(front, monkeypatch)
    stream = await client.responses.create(model="one", input="Who?", background=True, stream=True)
    with pytest.raises(openai.APIError, match="an error of the disk"):
        async for _ in stream:
            pass
    [job] = await front.service.page(None)
    fail_at_the_second_look(front, monkeypatch)
    again = await client.responses.retrieve(job.id, stream=True)
    with pytest.raises(openai.APIError, match="an error of the disk"):
        async for _ in again:
            pass


async def test_reader_of_a_stream_has_its_end_from_the_next_process(
    front: Front, client: AsyncOpenAI
) -> None:
    front.responder.gate.clear()
    kept = StoredResponses(front.state.jobs, "default")
    asked = {"model": "one", "input": "Who?", "background": True, "stream": True}
    prepared = await kept.prepare(json.dumps(asked).encode(), stores=True)
    parsed = await parse("/v1/responses", prepared.body, {}, {})
    job = await kept.begin(prepared, await front.state.service.call(parsed, "default"), {}, None)
    stream = kept.stream(job, None)
    events = [await anext(stream) for _ in range(6)]  # all but the last, which the gate holds
    former = front.service
    front.start()  # as after kill -9: nothing was closed
    front.responder.gate.set()
    events += [event async for event in stream if event != COMMENT]
    data = [sse.data_of(event.decode()) for event in events]
    assert [one["sequence_number"] for one in data] == list(range(7))
    assert data[-1]["type"] == "response.completed"
    assert (await client.responses.retrieve(job.id)).output_text == TEXT
    assert (await front.service.get("default", job.id)).attempts == 2
    await former.close()


async def test_cancelled_response_ends_its_call_and_stays_cancelled(
    front: Front, client: AsyncOpenAI
) -> None:
    front.responder.gate.clear()
    begun = await client.responses.create(model="one", input="Who?", background=True)
    await eventually(lambda: front.responder.at_once)
    with pytest.raises(openai.ConflictError):
        await client.responses.delete(begun.id)
    assert (await client.responses.cancel(begun.id)).status == "cancelled"
    assert front.responder.cancelled_count == 1
    assert (await client.responses.cancel(begun.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="cancelled") as refused:
        await client.responses.create(model="one", input="x", previous_response_id=begun.id)
    assert refused.value.param == "previous_response_id"
    await client.responses.delete(begun.id)


async def test_stream_without_its_end_is_a_failed_response(
    front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    front.responder.broken_ends = [b""] * CUT_TRIES
    stream = await client.responses.create(model="one", input="Who?", background=True, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None and "without a response" in last.response.error.message


@pytest.mark.parametrize(
    "end", [b"", messages.stream_error(EngineLost("one", TicketId("x")))], ids=["cut", "lost"]
)
async def test_cut_stream_is_tried_again_and_its_reader_has_no_event_twice(
    front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    front.responder.broken_ends = [end] * (CUT_TRIES - 1)
    stream = await client.responses.create(model="one", input="Who?", background=True, stream=True)
    events = [event async for event in stream]
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))
    assert "error" not in [event.type for event in events]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == TEXT
    assert len(front.responder.calls) == CUT_TRIES


@pytest.mark.parametrize("background", [True, False], ids=["background", "live"])
async def test_separators_of_lines_within_a_text_end_no_line_of_its_stream(
    front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    words = ("one\u2028", "two\u2029", "three\x85")
    monkeypatch.setattr(responding, "WORDS", words)
    stream = await client.responses.create(
        model="one", input="Who?", instructions="a\u2028b", background=background, stream=True
    )
    last = [event async for event in stream][-1]
    assert last.type == "response.completed" and last.response.output_text == "".join(words)
    kept = await client.responses.retrieve(last.response.id)
    assert (kept.output_text, kept.instructions) == ("".join(words), "a\u2028b")
    await client.responses.create(model="one", input="Why?", previous_response_id=kept.id)
    assert len(front.responder.calls) == 2


async def test_input_items_are_listed_in_both_orders_and_by_pages(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model="one", input="Who?")
    second = await client.responses.create(model="one", input="Why?", previous_response_id=first.id)
    newest = await client.responses.input_items.list(second.id)
    assert [item.content[0].text for item in newest.data] == ["Why?", TEXT, "Who?"]
    oldest = client.responses.input_items.list(second.id, order="asc", limit=1)
    assert [item.id async for item in oldest] == [item.id for item in reversed(newest.data)]


async def test_pages_of_input_items_end_also_where_a_client_repeats_their_ids(
    client: AsyncOpenAI,
) -> None:
    ids: list[Any] = ["a", "b", "a", "a", None, 7, ""]
    items: Any = [{"id": one, "role": "user", "content": "Who?"} for one in ids]
    kept = await client.responses.create(model="one", input=items)
    for order in ("asc", "desc"):
        pages = client.responses.input_items.list(kept.id, order=order, limit=1)
        listed: list[Any] = []
        async for item in pages:
            listed.append(item.id)
            assert len(listed) <= len(ids), "the pages go round"
        assert len(set(listed)) == len(ids)
        assert (listed if order == "asc" else listed[::-1])[:2] == ["a", "b"]


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"background": True, "store": False}, "store"),
        ({"background": "perhaps"}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True, "input": []}, "input"),
    ],
)
@pytest.mark.spec("L3")
async def test_wrong_field_is_named_and_nothing_is_kept(
    front: Front, client: AsyncOpenAI, said: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**{"model": "one", "input": "Who?"} | said)
    assert refused.value.param == field
    assert not front.responder.calls and await front.service.page(None) == []


@pytest.mark.spec("L3")
@pytest.mark.parametrize("wrong", [r'"\ud83d"', "NaN", "1e999"])
@pytest.mark.parametrize("field", ["metadata", "instructions", "temperature"])
async def test_what_cannot_be_told_again_is_refused_before_a_response_is_made_in_the_background(
    front: Front, field: str, wrong: str
) -> None:
    asked = {"model": "one", "input": "Who?", "background": True, field: "?"}
    raw = json.dumps(asked).replace('"?"', wrong)
    async with front.http() as http:
        answer = await http.post("/v1/responses", content=raw.encode())
    assert answer.status_code == 400
    assert not front.responder.calls and await front.service.page(None) == []


@pytest.mark.spec("L1")
async def test_no_tenant_reaches_the_responses_of_another(front: Front) -> None:
    mine, other = front.client(front.key("acme")), front.client(front.key("rival"))
    kept = await mine.responses.create(model="one", input="Who?")
    front.responder.gate.clear()
    begun = await mine.responses.create(model="one", input="Who?", background=True, stream=False)
    for one in (kept.id, begun.id):
        for ask in (
            other.responses.retrieve,
            other.responses.cancel,
            other.responses.delete,
            other.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                await ask(one)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await other.responses.create(model="one", input="x", previous_response_id=one)
    front.responder.gate.set()
    assert (await ended(front, mine, begun.id, "acme")).status == "completed"
    assert (await mine.responses.retrieve(kept.id)).output_text == TEXT


async def test_oldest_are_forgotten_beyond_what_a_tenant_may_keep(
    front: Front, client: AsyncOpenAI
) -> None:
    front.service.config = front.service.config.model_copy(update={"tenant_results": 2})
    made = [await client.responses.create(model="one", input=f"{n}") for n in range(4)]
    kept = [job.id for job in await front.service.page("default")]
    assert sorted(kept) == sorted(one.id for one in made[2:])
    front.service.config = front.service.config.model_copy(update={"tenant_result_bytes": 1})
    await client.responses.create(model="one", input="large")
    assert await front.service.page("default") == []


@pytest.mark.spec("J8")
async def test_kept_answer_is_read_in_pieces_and_is_503_where_it_cannot_be(
    front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies.Bodies.read, "__defaults__", (0, 100))
    kept = await client.responses.create(model="one", input="Who?")
    front.asked.clear()
    assert await client.responses.retrieve(kept.id) == kept
    assert front.asked.count("result") > 2 and "request" not in front.asked
    fails = AsyncMock(side_effect=StorageFailed("/state", "an error of the disk"))
    monkeypatch.setattr(front.service, "result", fails)
    async with front.http() as http:
        for path in (f"/v1/responses/{kept.id}", f"/v1/jobs/{kept.id}/result"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
            assert answer.headers["retry-after"] == "5"
    assert not front.state.readers._counts


@pytest.mark.spec("J8")
async def test_readers_of_kept_requests_are_bounded_until_their_clients_have_them(
    front: Front,
) -> None:
    front.responder.gate.clear()
    async with front.http() as http:
        body = {"model": "one", "input": "Who?", "background": True}
        path = f"/v1/responses/{(await http.post('/v1/responses', json=body)).json()['id']}"
        with contextlib.ExitStack() as reading:
            for _ in range(READERS_MOST):
                reading.enter_context(front.state.reader("default"))
            front.asked.clear()
            for refused in (await http.get(path), await http.get(f"{path}/input_items")):
                assert refused.json()["error"]["code"] == "quota_exceeded"
                assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (429, True)
            assert not front.asked, "nothing was read"
        for answer in (await http.get(path), await http.get(f"{path}/input_items")):
            assert answer.headers["content-length"] == str(len(answer.content))
            assert answer.status_code == 200
        with contextlib.ExitStack() as calls_in_flight:
            for _ in range(front.state.table.front.in_flight):
                calls_in_flight.enter_context(front.state.service.admitted())
            refused = await http.post(f"{path}/cancel")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert (await http.post(f"{path}/cancel")).status_code == 200
    assert not front.state.readers._counts and not front.state.service.in_flight


async def test_process_of_jobs_is_woken_when_a_call_begins_and_not_for_each(
    front: Front, client: AsyncOpenAI
) -> None:
    front.responder.gate.clear()
    asking = asyncio.create_task(client.responses.create(model="one", input="Who?"))
    await eventually(lambda: front.asked == ["page"])
    front.responder.gate.set()
    await asking
    await client.responses.create(model="one", input="Who?")
    assert front.asked == ["page", "keep", "keep"]


async def test_answer_does_not_wait_long_for_a_process_that_does_not_start(
    front: Front, client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "KEEP_WITHIN_S", 0.05)
    front.refusal = ConnectionAbortedError("no replica")
    monkeypatch.setattr(jobs_client, "_DIED", (ConnectionAbortedError,))
    said = await client.responses.create(model="one", input="Who?")
    assert said.output_text == TEXT
    assert said.model_extra is not None and said.model_extra["store"] is False
