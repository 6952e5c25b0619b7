"""Batches by the Python client: over a socket and by a handle, on the front's own application with
a process of jobs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.errors import UnknownModel
from deployments.client import AsyncClient, Audio, Client, FrontUnreachable, Line, batches
from deployments.front.inference.request import BadRequest
from deployments.jobs import batch_runner
from deployments.jobs.errors import StorageFailed
from deployments.jobs.file_store import FileStore
from tests.support.answering_front import MODEL, AnsweringFront, both, whole
from tests.support.scripted_front import ScriptedFront

pytestmark = pytest.mark.spec("J4", "J7")
CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
HI = {"model": MODEL, "usage": USAGE, "choices": [{"message": {"content": "Hi."}}]}
WAYS = ("http", "handle")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    monkeypatch.setattr(batch_runner, "SWEEP_S", 0.05)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[AnsweringFront]:
    made = AnsweringFront(tmp_path)
    made.says(CHAT, whole(HI))
    async with made.with_jobs(tmp_path):
        yield made


@pytest.fixture
async def clients(front: AnsweringFront) -> AsyncIterator[dict[str, AsyncClient]]:
    async with both(front) as made:
        yield made


async def listed(parts: AsyncGenerator[Any]) -> list[Any]:
    return [part async for part in parts]


@pytest.mark.parametrize("way", WAYS)
async def test_batch_answers_each_line_as_its_call_or_with_its_typed_error(
    front: AnsweringFront, clients: dict[str, AsyncClient], way: str
) -> None:
    client = clients[way]
    lines = [await client.line(f"n{n}", client.chat, f"Hello {n}", max_tokens=3) for n in range(3)]
    assert not front.calls
    batch = await client.submit_batch(lines, completion_window="2h", metadata={"a": "b"})
    results = await listed(batch.results())
    live = await client.chat("Hello", max_tokens=3)
    assert {one.custom_id: one.answer for one in results} == {f"n{n}": live for n in range(3)}
    status = await batch.status()
    assert (status.state, status.total, status.completed, status.failed) == ("completed", 3, 3, 0)
    assert (status.usage.prompt_count, status.plain["completion_window"]) == (9, "2h")
    assert status.plain["metadata"] == {"a": "b"}
    again = await listed(client.batch(batch.id).results())  # as another program finds it
    assert [one.answer["choices"] for one in again] == [HI["choices"]] * 3

    front.answers[CHAT] = BadRequest("`top_k`: no", "top_k")
    refusing = await client.submit_batch(lines[:1])
    [result] = await listed(refusing.results())
    assert isinstance(result.error, BadRequest) and result.error.param == "top_k"
    with pytest.raises(BadRequest):
        print(result.answer)


@pytest.mark.parametrize("way", WAYS)
async def test_wrong_line_is_the_typed_error_of_its_batch(
    front: AnsweringFront, clients: dict[str, AsyncClient], way: str
) -> None:
    client = clients[way]
    with pytest.raises(BadRequest, match="`n`"):
        await client.line("a", client.chat, "Hello", n=0)
    with pytest.raises(BadRequest, match="takes a file"):
        await client.line("a", client.transcribe, Audio(b"RIFF"))
    with pytest.raises(TypeError, match="no call of a client"):
        await client.line("a", asyncio.sleep, 0)
    good = await client.line("a", client.chat, "Hello")
    unknown = await client.line("b", client.chat, "Hello", model="none")
    failed = await client.submit_batch([good, unknown, unknown])
    with pytest.raises(UnknownModel, match=r"^line 2: .*\(and 1 more\)$"):
        await listed(failed.results())
    assert (await failed.status()).state == "failed" and not front.calls
    embedding = await client.line("c", client.embed, "Hello")
    wrong: list[list[Line[Any]]] = [[], [good, embedding]]
    for lines in wrong:
        with pytest.raises(BadRequest, match=r"of one path|at least one"):
            await client.submit_batch(lines)
    with pytest.raises(BadRequest, match="completion_window"):
        await client.submit_batch([good], completion_window="soon")
    kept = await front.jobs.files("default", None, "", 100, "asc")
    assert len(kept) == 1  # of the batch that failed; what was refused at once leaves none


async def test_refusal_of_a_batch_is_told_also_where_its_file_cannot_be_deleted(
    clients: dict[str, AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def delete(_: FileStore, tenant: str, file_id: str) -> None:
        refused.append(file_id)
        raise StorageFailed("the folder", "no answer of its disk")

    monkeypatch.setattr(FileStore, "delete", delete)
    client = clients["http"]
    line = await client.line("a", client.chat, "Hello")
    with pytest.raises(BadRequest, match="completion_window"):
        await client.submit_batch([line], completion_window="soon")
    assert len(refused) == 1


async def test_expired_and_cancelled_batches_say_what_became_of_their_lines(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    front.says(CHAT)
    front.holds.add(CHAT)
    client = clients["handle"]
    line = await client.line("a", client.chat, "Hello")
    cancelled = await client.submit_batch([line])
    assert not (await cancelled.status()).is_finished
    await cancelled.cancel()
    assert await listed(cancelled.results()) == []
    expired = await client.submit_batch([line], completion_window="1s")
    [result] = await listed(expired.results())
    assert result.error is not None and result.error.code == "batch_expired"
    assert (await expired.status()).state == "expired"


async def test_plain_client_submits_a_batch_by_plain_calls(front: AnsweringFront) -> None:
    def plain(url: str) -> None:
        with Client(url, key=front.key, model=MODEL) as client:
            live = client.chat("Hello")
            batch = client.submit_batch([client.line("a", client.chat, "Hello")])
            assert [one.answer for one in batch.results()] == [live]
            assert batch.wait().is_finished and batch.status() == batch.cancel()
            [found] = client.batch(batch.id).results()
            assert found.custom_id == "a" and found.answer["model"] == MODEL

    with front.serving() as url:
        await asyncio.to_thread(plain, url)


async def test_wait_outlives_a_restart_of_the_front_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "/v1/batches/batch_a"
    counts = {"total": 1, "completed": 1, "failed": 0}
    usage = {"input_tokens": 3, "output_tokens": 2}
    row = {"id": "batch_a", "status": "completed", "request_counts": counts, "usage": usage}
    front = ScriptedFront()
    front.refuses("GET", path, 503, "jobs_unavailable", "it starts")
    with front.serving() as url:
        async with AsyncClient(url) as client:
            waiting = asyncio.create_task(client.batch("batch_a").wait())
            while len(front.requests) < 3:
                await asyncio.sleep(0)
            front.says("GET", path, row)
            assert (await waiting).is_finished
    monkeypatch.setattr(batches, "AWAY_S", 0.05)
    async with AsyncClient(url) as client:
        with pytest.raises(FrontUnreachable):
            await client.batch("batch_a").wait()
