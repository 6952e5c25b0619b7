"""OpenAI's files and batches with its official client, over the front's application in process."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from deployments.config.jobs_section import JobsConfig
from deployments.front.access import keys
from deployments.front.access.keys import Scope
from deployments.front.dependencies import READERS_MOST
from deployments.jobs import bodies
from deployments.jobs.client import JobsAway, JobsClient
from tests.support.jobs import CHAT
from tests.support.jobs_front import Front, lines
from tests.support.waits import eventually


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    made = Front(tmp_path)
    yield made
    await made.service.close()


async def finished(client: AsyncOpenAI, batch_id: str) -> Any:
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch


@pytest.mark.spec("J4")
async def test_official_client_uploads_runs_and_reads_a_batch(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.front.routes.files.PIECE_BYTES", 1_000)
    monkeypatch.setattr(bodies.Bodies.read, "__defaults__", (0, 700))  # more than one of each
    client = front.client()
    names = [f"r{n}" for n in range(20)]
    raw = lines(*names)
    file = await client.files.create(
        file=("in.jsonl", raw),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3_600},
    )
    assert (file.bytes, file.purpose, file.filename) == (len(raw), "batch", "in.jsonl")
    assert file.expires_at == file.created_at + 3_600 and file.status == "processed"
    assert (await client.files.content(file.id)).content == raw
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"name": "nightly"},
    )
    assert batch.expires_at == batch.created_at + 86_400 and batch.metadata == {"name": "nightly"}
    done = await finished(client, batch.id)
    assert done.status == "completed" and done.request_counts.completed == 20
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    output = (await client.files.content(done.output_file_id)).text.splitlines()
    assert sorted(json.loads(one)["custom_id"] for one in output) == sorted(names)
    listed = [one.id async for one in client.files.list(limit=1)]
    assert set(listed) == {file.id, done.output_file_id}
    assert [one.id async for one in client.files.list(purpose="batch")] == [file.id]
    assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
    assert (await client.files.delete(file.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)


@pytest.mark.spec("J8", "L1")
async def test_readers_of_a_tenants_files_are_bounded_and_leave_their_places(front: Front) -> None:
    client = front.client()
    file = await client.files.create(file=("in.jsonl", lines("a")), purpose="batch")
    with contextlib.ExitStack() as reading:
        for _ in range(READERS_MOST):
            reading.enter_context(front.state.reader("default"))
        async with front.http() as http:
            refused = await http.get(f"/files/{file.id}/content")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
    assert (await client.files.content(file.id)).content == lines("a")
    front.full = "file_content"
    with pytest.raises(openai.APIStatusError) as full:
        await client.with_options(max_retries=0).files.content(file.id)
    assert full.value.status_code == 507
    assert not front.state.readers._counts


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"purpose": "batch"}, "file"),
        ({"purpose": "dancing", "file": b"x"}, "purpose"),
        ({"file": b"x"}, "purpose"),
        (
            {"purpose": "batch", "file": b"x", "expires_after[seconds]": "9999"},
            "expires_after[anchor]",
        ),
        (
            {
                "purpose": "batch",
                "file": b"x",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "1",
            },
            "expires_after[seconds]",
        ),
    ],
)
async def test_wrong_field_of_an_upload_is_named(
    front: Front, form: dict[str, Any], param: str
) -> None:
    files = [(name, value) for name, value in form.items() if isinstance(value, bytes)]
    data = {name: value for name, value in form.items() if isinstance(value, str)}
    parts: Any = files or [("other", b"")]
    answer = await front.http().post("/files", data=data, files=parts)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"metadata": {"x": 3}}, "metadata.x"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_wrong_field_of_a_batch_is_named(
    front: Front, change: dict[str, Any], param: str
) -> None:
    body = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"} | change
    answer = await front.http().post("/batches", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    if isinstance(sent := change.get(param), str):
        assert repr(sent) in error["message"]


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize("field", ["endpoint", "completion_window"])
async def test_wrong_field_of_a_batch_is_told_clipped(front: Front, field: str) -> None:
    body = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}
    answer = await front.http().post("/batches", json=body | {field: "x" * 10_000})
    assert answer.status_code == 400 and len(answer.json()["error"]["message"]) < 400


@pytest.mark.spec("J4", "L1")
async def test_keys_tell_tenants_apart(front: Front) -> None:
    one = keys.add(front.keys, "a", "acme", frozenset({Scope.INFER}))
    two = keys.add(front.keys, "b", "other", frozenset({Scope.INFER}))
    with pytest.raises(openai.AuthenticationError):
        await front.client().files.list()
    file = await front.client(one).files.create(file=("a", lines("a")), purpose="batch")
    assert [f.id async for f in front.client(one).files.list()] == [file.id]
    assert [f.id async for f in front.client(two).files.list()] == []
    with pytest.raises(openai.NotFoundError):
        await front.client(two).files.content(file.id)
    with pytest.raises(openai.BadRequestError, match="no file"):
        await front.client(two).batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    answer = await front.http(two).get("http://localhost/arbiter/jobs")
    assert answer.status_code == 403
    answer = await front.http(two).delete("http://localhost/arbiter/jobs/batch_x")
    assert answer.status_code == 403


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize("of", ["/files", "/batches", "/jobs"])
async def test_page_behind_what_is_not_there_is_refused_and_not_empty(
    front: Front, of: str
) -> None:
    answer = await front.http().get(of, params={"after": "file-none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


@pytest.mark.spec("J4", "L1")
async def test_list_whose_last_row_was_deleted_does_not_end_as_if_all_were_seen(
    front: Front,
) -> None:
    one = keys.add(front.keys, "a", "acme", frozenset({Scope.INFER}))
    client, others = front.client(one), keys.add(front.keys, "b", "o", frozenset({Scope.INFER}))
    for name in ("a", "b", "c"):
        last = await client.files.create(file=(name, lines(name)), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="after"):
        await front.client(others).files.list(after=last.id)
    with pytest.raises(openai.BadRequestError, match="list again from the start"):
        async for file in client.files.list(limit=1):
            await client.files.delete(file.id)
    assert len((await client.files.list()).data) == 2


@pytest.mark.spec("J4")
async def test_full_disk_is_a_typed_failure_and_the_next_upload_works(front: Front) -> None:
    for method in ("begin_file", "append_file", "finish_file"):
        front.full = method
        with pytest.raises(openai.APIStatusError) as caught:
            client = front.client().with_options(max_retries=0)
            await client.files.create(file=("a", lines("a")), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
    front.full = None
    assert await front.client().files.create(file=("a", lines("a")), purpose="batch")


@pytest.mark.spec("J4")
async def test_operator_sees_and_cancels_any_job_without_its_words(front: Front) -> None:
    front.capability.gate.clear()
    client = front.client()
    file = await client.files.create(file=("a", lines("secret-word")), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    answer = await front.http().get("http://localhost/arbiter/jobs")
    [row] = answer.json()["jobs"]
    assert (row["id"], row["kind"], row["tenant"]) == (batch.id, "batch", "default")
    assert "secret-word" not in answer.text
    bad = await client.files.create(
        file=("b", b'{"custom_id": "other-secret", "method": "GET", "url": "/other-secret"}'),
        purpose="batch",
    )
    wrong = await client.batches.create(
        input_file_id=bad.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    async with asyncio.timeout(60):
        while (await client.batches.retrieve(wrong.id)).status != "failed":
            continue
    answer = await front.http().get(f"http://localhost/arbiter/jobs/{wrong.id}")
    assert [error["line"] for error in answer.json()["errors"]] == [1]
    assert "secret" not in answer.text
    admin = keys.add(front.keys, "a", "acme", frozenset({Scope.ADMIN, Scope.VIEW}))
    answer = await front.http(admin).delete(f"http://localhost/arbiter/jobs/{batch.id}")
    assert answer.json()["state"] == "cancelling"
    answer = await front.http(admin).get("http://localhost/arbiter/jobs/job-none")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


HEAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
END = b"\r\n--b--\r\n"
FORM = {"content-type": "multipart/form-data; boundary=b"}


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the upload is read")
    yield b""


@pytest.mark.spec("J4", "J8")
@pytest.mark.parametrize(
    ("bound", "declared"),
    [
        ({"tenant_files": 1}, {}),
        ({"tenant_bytes": 100}, {}),
        ({"tenant_bytes": 1 << 20}, {"content-length": str(2 << 20)}),
    ],
)
async def test_upload_that_finds_no_room_is_refused_before_it_is_read(
    front: Front, bound: dict[str, int], declared: dict[str, str]
) -> None:
    await front.client().files.create(file=("a", b"x" * 100), purpose="assistants")
    front.service.config = front.service.config.model_copy(update=bound)
    answer = await front.http().post("/files", content=unread(), headers=FORM | declared)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")
    assert answer.headers["retry-after"]


@pytest.mark.spec("J4", "J8")
async def test_tenant_has_so_many_uploads_at_once_at_most(front: Front) -> None:
    one = keys.add(front.keys, "a", "acme", frozenset({Scope.INFER}))
    two = keys.add(front.keys, "b", "other", frozenset({Scope.INFER}))
    go_on, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def held() -> AsyncIterator[bytes]:
        yield HEAD
        begun.release()
        await go_on.wait()
        yield b"content" + END

    def post(key: str, content: AsyncIterator[bytes]) -> asyncio.Task[httpx.Response]:
        asking = front.http(key).post("/files", content=content, headers=FORM, timeout=60)
        return asyncio.create_task(asking)

    most = JobsConfig().tenant_uploads
    uploads = [post(one, held()) for _ in range(most)]
    async with asyncio.timeout(60):
        for _ in uploads:
            await begun.acquire()
        answer = await post(one, unread())
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")
        uploads.append(post(two, held()))
        await begun.acquire()
        go_on.set()
        assert [(await upload).status_code for upload in uploads] == [200] * (most + 1)
        assert (await post(one, held())).status_code == 200


@pytest.mark.spec("J4", "J8")
@pytest.mark.parametrize("leaves", [True, False])
async def test_upload_that_breaks_off_leaves_nothing_and_counts_no_more(
    front: Front, tmp_path: Path, leaves: bool
) -> None:
    """Its client leaves, or the process of jobs does not answer."""
    front.service.config = front.service.config.model_copy(update={"tenant_files": 1})
    written = asyncio.Event()

    async def send(method: str, *args: Any) -> Any:
        answer = await getattr(front.service, method)(*args)
        if method == "append_file":
            written.set()
            if leaves:
                await asyncio.Event().wait()
            raise JobsAway("its answer is lost")
        return answer

    whole, front.state.jobs = front.state.jobs, JobsClient(send)
    content = HEAD + b"content" + END
    upload = asyncio.create_task(front.http().post("/files", content=content, headers=FORM))
    async with asyncio.timeout(60):
        await written.wait()
        if leaves:
            upload.cancel()
        await asyncio.wait([upload])
    assert leaves or upload.result().status_code == 503

    async def has_room() -> bool:
        return (await front.http().post("/files", content=content, headers=FORM)).is_success

    front.state.jobs = whole
    await eventually(has_room)
    assert [name for name in os.listdir(tmp_path / "jobs") if name.endswith(bodies.PART)] == []


@pytest.mark.spec("J4", "L1")
async def test_upload_waits_in_the_folder_of_the_bodies_and_leaves_nothing_there(
    front: Front, tmp_path: Path
) -> None:
    """Not where Ray keeps what it spills, which may be RAM."""
    folder, seen = tmp_path / "jobs", list[str]()

    def opened() -> list[str]:
        links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return [link for link in links if "deleted" in link and link.startswith(f"{tmp_path}/")]

    async def large() -> AsyncIterator[bytes]:
        yield HEAD
        for _ in range(3):
            yield b"x" * (1 << 20)
        seen.extend(opened())
        yield END

    answer = await front.http().post("/files", content=large(), headers=FORM)
    assert answer.json()["bytes"] == 3 << 20
    assert [Path(link).parent for link in seen] == [folder]
    assert opened() == [] and [path.name for path in folder.iterdir()] == [answer.json()["id"]]


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize("body", [b"--c\r\n", HEAD.replace(b'name="file"; ', b""), HEAD + HEAD])
async def test_form_that_cannot_be_read_is_400(front: Front, body: bytes) -> None:
    answer = await front.http().post("/files", content=body, headers=FORM)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize("charset", ["undefined", "punycode", "utf-8\0"])
async def test_form_whose_charset_reads_no_text_is_400(front: Front, charset: str) -> None:
    headers = {"content-type": f"{FORM['content-type']}; charset={charset}"}
    answer = await front.http().post("/files", content=HEAD + b"x" + END, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
