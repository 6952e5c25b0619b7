"""Calls that the front keeps as jobs, against a front that answers as a test says. With the real
one: tests/graph/test_python.py."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from arbiter.errors import RequestError, UnknownModel
from deployments.client import AsyncClient, Client, FrontUnreachable, jobs
from tests.support.scripted_front import Answer, ScriptedFront

CHAT, JOB = "/v1/chat/completions", "/v1/jobs/job_1"
SAID = {
    "model": "m",
    "choices": [{"message": {"content": "Hi."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}


def job(state: str, **more: Any) -> dict[str, Any]:
    return {
        "id": "job_1",
        "status": state,
        "model": "m",
        "queue_position": None,
        "progress": {"events": 0, "waiting": None},
        "estimate_s": None,
        "error": None,
        **more,
    }


@pytest.fixture
def front() -> ScriptedFront:
    scripted = ScriptedFront()
    scripted.says("POST", CHAT, job("queued", queue_position=1), status=202)
    scripted.says("GET", JOB, job("completed"))
    body = json.dumps(SAID).encode()
    scripted.answers["GET", f"{JOB}/result"] = Answer(
        200, {"content-type": "application/json"}, body
    )
    return scripted


@pytest.fixture
def url(front: ScriptedFront) -> Iterator[str]:
    with front.serving() as url:
        yield url


@pytest.mark.spec("J7", "J4")
async def test_kept_call_says_that_it_may_be_kept_and_is_read_as_the_call_would_be(
    front: ScriptedFront, url: str
) -> None:
    async with AsyncClient(url, model="m") as client:
        kept = await client.submit(client.chat, "Hello", n=2)
        [request] = front.requests
        assert request.headers["prefer"] == "respond-async" and request.body["n"] == 2
        assert (await kept.result()).text == "Hi."
        assert await client.job(kept.id).result() == SAID
        assert await kept.status() == jobs.JobStatus("job_1", "completed", "m", None, 0, None, "")


@pytest.mark.spec("J7", "J4")
def test_plain_client_keeps_calls_too(url: str) -> None:
    with Client(url, model="m") as client:
        kept = client.submit(client.chat, "Hello")
        assert kept.status().is_finished and kept.result().text == "Hi."
        assert client.job("job_1").result() == SAID


@pytest.mark.spec("J7", "J4")
async def test_what_is_wrong_is_told_at_once_and_what_went_wrong_with_the_result(
    front: ScriptedFront, url: str
) -> None:
    async with AsyncClient(url, model="m") as client:
        kept = await client.submit(client.chat, "Hello")
        front.refuses("GET", f"{JOB}/result", 409, "conflict", "job job_1 is cancelled")
        front.says("POST", f"{JOB}/cancel", job("cancelled", error={"message": "it was told to"}))
        assert (await kept.cancel()).error == "it was told to"
        with pytest.raises(RequestError, match="is cancelled"):
            await kept.result()
        front.refuses("POST", CHAT, 404, "model_not_found", "no model")
        with pytest.raises(UnknownModel):
            await client.submit(client.chat, "Hello")


@pytest.mark.spec("J7", "J4")
async def test_result_waits_until_the_job_is_finished_although_the_front_breaks_off(
    front: ScriptedFront, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "AGAIN_S", 0.0)
    front.says("GET", JOB, job("in_progress"))
    front.streams(f"{JOB}/events", ": waiting\n\n")
    looks = 0
    answer = front.answer

    def script(method: str, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        nonlocal looks
        if path == JOB:
            looks += 1
            if looks == 2:
                raise ConnectionResetError
            if looks == 3:
                front.says("GET", JOB, job("completed"))
        return answer(method, path, headers, raw)

    monkeypatch.setattr(front, "answer", script)
    async with AsyncClient(url, model="m") as client:
        kept = await client.submit(client.chat, "Hello")
        assert (await kept.result()).text == "Hi."
    assert looks == 3


@pytest.mark.spec("J7", "J4")
async def test_result_asks_seldom_where_events_end_before_their_job(
    front: ScriptedFront, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "AGAIN_S", 0.01)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            front.says("GET", JOB, job("completed"))
        await sleep(0)

    monkeypatch.setattr(jobs.asyncio, "sleep", pause)
    front.says("GET", JOB, job("in_progress"))
    front.streams(f"{JOB}/events", "event: error\ndata: {}\n\n")
    async with AsyncClient(url, model="m") as client:
        kept = await client.submit(client.chat, "Hello")
        assert (await kept.result()).text == "Hi."
    assert pauses == [0.01] * 3


@pytest.mark.spec("J7", "J4")
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("path", [JOB, f"{JOB}/events"])
async def test_result_waits_while_the_front_is_full_or_its_process_of_jobs_starts(
    front: ScriptedFront, url: str, monkeypatch: pytest.MonkeyPatch, path: str, status: int
) -> None:
    monkeypatch.setattr(jobs, "AGAIN_S", 0.0)
    front.says("GET", JOB, job("in_progress"))
    front.refuses("GET", path, status, "jobs_unavailable", "it starts")
    answer = front.answer

    def script(method: str, asked: str, headers: dict[str, str], raw: bytes) -> Answer:
        said = answer(method, asked, headers, raw)
        if front.asked().count(("GET", path)) == 2:
            front.says("GET", JOB, job("completed"))
        return said

    monkeypatch.setattr(front, "answer", script)
    async with AsyncClient(url, model="m") as client:
        assert await client.job("job_1").result() == SAID


@pytest.mark.spec("J7", "J4")
async def test_refusal_that_is_the_jobs_answer_is_raised_at_once(
    front: ScriptedFront, url: str
) -> None:
    front.refuses("GET", f"{JOB}/result", 503, "load_failed", "no memory")
    async with AsyncClient(url, model="m") as client:
        with pytest.raises(RequestError, match="no memory"):
            await client.job("job_1").result()
    assert front.asked().count(("GET", f"{JOB}/result")) == 1


@pytest.mark.spec("J7", "J4")
async def test_result_gives_up_when_no_front_has_answered_for_long(
    front: ScriptedFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "AGAIN_S", 0.0)
    monkeypatch.setattr(jobs, "AWAY_S", 0.0)
    with front.serving() as url:
        client = AsyncClient(url, model="m")
        kept = await client.submit(client.chat, "Hello")
    with pytest.raises(FrontUnreachable):
        await kept.result()
    await client.close()


@pytest.mark.spec("J7")
async def test_only_a_call_of_a_model_is_kept(url: str) -> None:
    async def nothing() -> None:
        return None

    async with AsyncClient(url, model="m") as client:
        with pytest.raises(TypeError, match="no call of a client"):
            await client.submit(nothing)
    with Client(url, model="m") as plain, pytest.raises(TypeError, match="no call of a client"):
        plain.submit(len, "abc")
