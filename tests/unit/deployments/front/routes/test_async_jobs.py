"""`Prefer: respond-async` on generating routes, over the front's application in process."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments import messages
from deployments.front import dependencies
from deployments.front.access import keys
from deployments.front.jobs import async_calls
from deployments.front.status.arbiter_gateway import Presence
from deployments.jobs import calls
from deployments.jobs.errors import EventsRestarted
from deployments.jobs.suspects import DEATHS_MOST
from tests.support.jobs import CHAT, chat
from tests.support.responding import SOUND, Front, fail_at_the_second_look
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("J4")
ASYNC = {"prefer": "respond-async"}
STREAM = {"model": "one", "prompt": "x", "stream": True}
CUT = b'data: {"type": "image_generation.partial_image", "b64_json": "AAAA'
LOST = messages.stream_error(EngineLost("one", TicketId("t")))
SPEECH = {"model": "voice", "input": "Hello", "voice": "joe"}


@pytest.fixture(autouse=True)
def presences(monkeypatch: pytest.MonkeyPatch) -> None:
    async def known(table: object, models: list[str]) -> dict[str, Presence]:
        return {name: Presence("cold", 4.5) for name in models}

    monkeypatch.setattr(async_calls.model_cards, "presences", known)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    made = Front(tmp_path)
    yield made
    made.responder.gate.set()
    await made.service.close()


@pytest.fixture
async def http(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with front.http() as client:
        yield client


async def job_of(http: httpx.AsyncClient, location: str) -> dict[str, Any]:
    job: dict[str, Any] = (await http.get(location)).raise_for_status().json()
    return job


async def ended(
    front: Front, http: httpx.AsyncClient, location: str, tenant: str = "default"
) -> dict[str, Any]:
    await front.ended(location.removeprefix("/v1/jobs/"), tenant)
    return await job_of(http, location)


@pytest.mark.parametrize("prefer", ["respond-async", "wait=5, Respond-Async; x=y"])
async def test_call_is_answered_with_a_job_that_says_how_far_it_is(
    front: Front, http: httpx.AsyncClient, prefer: str
) -> None:
    front.responder.gate.clear()
    answer = await http.post(CHAT, json=chat("hello"), headers={"prefer": prefer})
    assert answer.status_code == 202
    assert answer.headers["preference-applied"] == "respond-async"
    location = answer.headers["location"]
    assert location == f"/v1/jobs/{answer.json()['id']}"
    await eventually(lambda: front.responder.at_once)
    job = await job_of(http, location)
    assert (job["status"], job["estimate_s"]) == ("in_progress", 4.5)
    assert job["progress"]["waiting"] == {"phase": "loading", "position": 0, "estimate_s": 2.5}
    early = await http.get(f"{location}/result")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "conflict")
    front.responder.gate.set()
    assert (await ended(front, http, location))["status"] == "completed"
    result = await http.get(f"{location}/result")
    assert (result.status_code, result.json()["messages"]) == (200, chat("hello")["messages"])
    assert len(front.responder.calls) == 1  # no poll is a call


async def test_place_in_the_queue_is_told(front: Front, http: httpx.AsyncClient) -> None:
    front.service.config = front.service.config.model_copy(update={"in_flight": 1})
    front.responder.gate.clear()
    made = [(await http.post(CHAT, json=chat("x"), headers=ASYNC)).json() for _ in range(3)]
    await eventually(lambda: front.responder.at_once)
    jobs = [await job_of(http, f"/v1/jobs/{one['id']}") for one in made]
    assert [one["queue_position"] for one in jobs] == [None, 0, 1]
    listed = (await http.get("/v1/jobs", params={"limit": 2})).json()
    assert [one["id"] for one in listed["data"]] == [made[2]["id"], made[1]["id"]]
    assert listed["has_more"]


async def test_binary_answer_comes_with_its_content_type(
    front: Front, http: httpx.AsyncClient
) -> None:
    location = (await http.post("/v1/audio/speech", json=SPEECH, headers=ASYNC)).headers["location"]
    await ended(front, http, location)
    result = await http.get(f"{location}/result")
    assert (result.headers["content-type"], result.content) == ("audio/wav", b"".join(SOUND))


async def test_events_are_read_by_number_and_the_result_is_the_stream(
    front: Front,
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post("/v1/completions", json=STREAM, headers=ASYNC)
    location = answer.headers["location"]
    await ended(front, http, location)
    told = (await http.get(f"{location}/events", params={"after": 4})).text
    assert [line for line in told.splitlines() if line.startswith("id:")] == ["id: 5", "id: 6"]
    result = await http.get(f"{location}/result")
    assert result.headers["content-type"].startswith("text/event-stream")
    assert result.text.count("data: ") == 6


async def test_reader_has_no_events_of_two_attempts(
    front: Front, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    front.responder.gate.clear()
    front.responder.broken_ends = [LOST]
    location = (await http.post("/v1/completions", json=STREAM, headers=ASYNC)).headers["location"]
    job_id = location.removeprefix("/v1/jobs/")

    async def has_events() -> bool:
        return (await front.service.get("default", job_id)).event_count == 5

    await eventually(has_events)
    stream = async_calls.events(front.state.jobs, "default", job_id, 0)
    assert (await anext(stream)).count(b"id: ") == 5
    front.responder.gate.set()
    assert (await ended(front, http, location))["attempts"] == 2
    with pytest.raises(EventsRestarted, match="up to number 5 are of an attempt that was lost"):
        await anext(stream)
    told = (await http.get(f"{location}/events", params={"after": 7})).text
    assert json.loads(told.removeprefix("data: "))["error"]["code"] == "events_restarted"
    whole = (await http.get(f"{location}/events")).text
    assert [line for line in whole.splitlines() if line.startswith("id:")][-1] == "id: 6"


@pytest.mark.parametrize(
    ("cut", "losses"),
    [(b"", 0), (CUT, 0), (CUT + b"\n\n", 0), (CUT + LOST, 1), (CUT + LOST[:40] + b"\n\n", 0)],
)
async def test_stream_that_is_cut_within_an_event_is_no_answer(
    front: Front,
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    cut: bytes,
    losses: int,
) -> None:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    front.responder.broken_ends = [cut] if cut else []
    location = (await http.post("/v1/completions", json=STREAM, headers=ASYNC)).headers["location"]
    job = await ended(front, http, location)
    assert (job["status"], job["attempts"]) == ("completed", 2 if cut else 1)
    assert (await http.get(f"{location}/result")).text.count("data: ") == 6
    job_id = location.removeprefix("/v1/jobs/")
    assert (await front.service.get("default", job_id)).losses == losses


async def test_stream_under_which_the_engine_dies_each_time_fails(
    front: Front, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "AGAIN_LEAST_S", 0.01)
    front.responder.broken_ends = [LOST] * DEATHS_MOST
    location = (await http.post("/v1/completions", json=STREAM, headers=ASYNC)).headers["location"]
    job = await ended(front, http, location)
    assert (job["status"], job["attempts"], job["response_status"]) == ("failed", DEATHS_MOST, 502)
    assert job["error"]["code"] == "engine_lost"


@pytest.mark.spec("J8")
async def test_reader_is_told_why_its_events_end_where_jobs_cannot_be_read(
    front: Front, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.responder.gate.clear()
    location = (await http.post("/v1/completions", json=STREAM, headers=ASYNC)).headers["location"]
    fail_at_the_second_look(front, monkeypatch)
    *events, last, end = (await http.get(f"{location}/events")).text.split("\n\n")
    assert events[0].startswith("id: 1\n") and end == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "storage_failed"


@pytest.mark.spec("L1")
@pytest.mark.parametrize("is_response", [False, True])
async def test_reader_whose_key_is_removed_is_told_so_and_reads_no_more(
    front: Front, is_response: bool
) -> None:
    front.responder.gate.clear()
    key = front.key("acme")
    async with front.http(key) as http:
        if is_response:
            begun = {"model": "one", "input": "Who?", "background": True, "stream": True}
            reading = asyncio.create_task(http.post("/v1/responses", json=begun))
        else:
            answer = await http.post("/v1/completions", json=STREAM, headers=ASYNC)
            reading = asyncio.create_task(http.get(f"{answer.headers['location']}/events"))
        await eventually(lambda: front.responder.at_once)
        await eventually(lambda: front.state.readers._counts["acme"] == 1)
        keys.remove(front.keys, key.split("-")[1])
        front.responder.gate.set()
        *_, last, end = (await reading).text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "invalid_api_key"
    assert end == ""
    assert not front.state.readers._counts


@pytest.mark.spec("J8", "L1")
async def test_readers_of_a_tenant_are_bounded_and_take_no_place_of_a_call(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependencies, "READERS_MOST", 2)
    front.responder.gate.clear()
    async with front.http(front.key("acme")) as http, front.http(front.key("rival")) as other:
        answer = await http.post("/v1/completions", json=STREAM, headers=ASYNC)
        path = f"{answer.headers['location']}/events"
        reading = [asyncio.create_task(http.get(path)) for _ in range(2)]
        await eventually(lambda: front.state.readers._counts["acme"] == 2)
        assert front.state.service.in_flight == 0
        begun = {"model": "one", "input": "Who?", "background": True, "stream": True}
        for refused in (await http.get(path), await http.post("/v1/responses", json=begun)):
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
            assert int(refused.headers["retry-after"]) > 0
        assert len(await front.service.page("acme")) == 1
        assert (await other.get(path)).status_code == 404
        result = f"{answer.headers['location']}/result"
        assert (await http.get(result)).json()["error"]["code"] == "quota_exceeded"
        front.responder.gate.set()
        assert {(await one).status_code for one in reading} == {200}
        assert {(await http.get(one)).status_code for one in (path, result)} == {200}
        assert not front.state.readers._counts


async def test_cancelled_and_deleted_jobs_end_their_call(
    front: Front, http: httpx.AsyncClient
) -> None:
    front.responder.gate.clear()
    cancelled, deleted = [
        (await http.post(CHAT, json=chat("x"), headers=ASYNC)).headers["location"] for _ in range(2)
    ]
    await eventually(lambda: front.responder.at_once == 2)
    assert (await http.post(f"{cancelled}/cancel")).json()["status"] == "cancelled"
    assert (await http.delete(deleted)).json()["deleted"]
    assert front.responder.cancelled_count == 2
    assert (await job_of(http, cancelled))["status"] == "cancelled"
    assert (await http.get(deleted)).status_code == 404


@pytest.mark.spec("L3")
async def test_wrong_body_is_refused_before_a_job_is_made(
    front: Front, http: httpx.AsyncClient
) -> None:
    wrong = await http.post(CHAT, json={"model": "one", "messages": 3}, headers=ASYNC)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
    unknown = await http.post(CHAT, json=chat("x", "none"), headers=ASYNC)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    assert front.asked == []


@pytest.mark.spec("L1")
async def test_no_tenant_reaches_the_jobs_of_another(front: Front) -> None:
    front.responder.gate.clear()
    async with front.http(front.key("acme")) as mine, front.http(front.key("rival")) as other:
        location = (await mine.post(CHAT, json=chat("x"), headers=ASYNC)).headers["location"]
        asked = [
            await other.get(location),
            await other.get(f"{location}/result"),
            await other.get(f"{location}/events"),
            await other.post(f"{location}/cancel"),
            await other.delete(location),
        ]
        assert {answer.status_code for answer in asked} == {404}
        assert (await other.get("/v1/jobs")).json()["data"] == []
        front.responder.gate.set()
        assert (await ended(front, mine, location, "acme"))["status"] == "completed"


async def test_response_that_is_preferred_async_is_a_job_and_a_response(
    front: Front, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/responses", json={"model": "one", "input": "Who?"}, headers=ASYNC)
    assert answer.status_code == 202
    await ended(front, http, answer.headers["location"])
    client = front.client()
    assert (await client.responses.retrieve(answer.json()["id"])).status == "completed"


@pytest.mark.spec("J8")
async def test_reader_of_events_that_are_lost_comes_to_an_end(
    front: Front, http: httpx.AsyncClient
) -> None:
    location = (await http.post("/v1/completions", json=STREAM, headers=ASYNC)).headers["location"]
    await ended(front, http, location)
    name, bodies = location.removeprefix("/v1/jobs/") + "-events", front.service._bodies
    *_, last = bodies.lines(name)
    bodies.cut(name, bodies.size(name) - len(last))  # as a loss of power does
    async with asyncio.timeout(20):
        told = (await http.get(f"{location}/events")).text
    assert [line for line in told.splitlines() if line.startswith("id:")][-1] == "id: 5"
