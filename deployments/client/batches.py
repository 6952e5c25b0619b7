"""Many calls in one file, made when interactive work leaves room (docs/jobs.md).

lines = [await client.line(name, client.chat, text) for name, text in texts.items()]
batch = await client.submit_batch(lines)
async for result in batch.results():
    print(result.custom_id, result.answer.text)
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from arbiter.errors import RequestError
from deployments.client.answers import Usage
from deployments.client.connection import Connection, Files, Read, Request, of_json
from deployments.client.fields import Json
from deployments.client.jobs import AGAIN_STATUS, AWAY_S, FINISHED
from deployments.client.typed_errors import error_of_code, error_of_event, error_of_response
from deployments.front.inference.request import BadRequest

T = TypeVar("T")

BATCHES, FILES = "/v1/batches", "/v1/files"
LOOK_S = 2.0  # between two looks at a batch, which lasts minutes or hours
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """How far a batch is. `plain` is OpenAI's object."""

    id: str
    state: str  # OpenAI's `status`
    total: int  # 0 until its lines were checked
    completed: int
    failed: int
    usage: Usage  # of the lines that were answered
    plain: Json

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED

    @property
    def error(self) -> RequestError | None:
        """Why it failed: the first line that is wrong, or that its input was lost while lines were
        run. None: lines were run, or will be."""
        if self.state != "failed":
            return None
        first, *others = self.plain["errors"]["data"]
        where = f"line {first['line']}: " if first["line"] else ""
        more = f" (and {len(others)} more)" if others else ""
        return error_of_code(
            f"{where}{first['message']}{more}", 400, first["code"], first["param"], None
        )


@dataclass(frozen=True, slots=True)
class Line(Generic[T]):
    """One call of a batch, whose answer is a T. `custom_id`: a name of its own in the batch."""

    custom_id: str
    path: str
    body: Mapping[str, Any]
    read: Read[T] = field(repr=False)

    @classmethod
    def of(cls, custom_id: str, request: Request, read: Read[T]) -> "Line[T]":
        """Raises BadRequest where the call sends files."""
        if request.json is None:
            raise BadRequest(f"{request.path} takes a file, which no line of a batch has", "file")
        return cls(custom_id, request.path, request.json, read)

    def written(self) -> bytes:
        """This line as the input file has it."""
        row = {"custom_id": self.custom_id, "method": "POST", "url": self.path, "body": self.body}
        return json.dumps(row).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class LineResult(Generic[T]):
    """What became of one line: an answer or a refusal."""

    custom_id: str
    _answer: T | None
    error: RequestError | None  # as the call itself would have raised; None: it was answered

    @property
    def answer(self) -> T:
        """Raises `error`."""
        if self.error is not None:
            raise self.error
        return cast("T", self._answer)


class AsyncBatch(Generic[T]):
    """Calls that the front makes when there is room; each line's answer is a T. They go on when
    this object, its client or any process of the system ends."""

    def __init__(
        self, connection: Connection, batch_id: str, reads: Mapping[str, Read[T]] | None = None
    ) -> None:
        """`reads`: by custom id; absent where another client sent the batch."""
        self._connection, self.id, self._reads = connection, batch_id, reads or {}

    async def status(self) -> BatchStatus:
        """Loads no model and waits for none. Raises RequestError."""
        return _status(await self._connection.read(Request("GET", f"{BATCHES}/{self.id}")))

    async def cancel(self) -> BatchStatus:
        """Ends what runs of it; the results so far stay. Raises RequestError."""
        return _status(await self._connection.read(Request("POST", f"{BATCHES}/{self.id}/cancel")))

    async def wait(self) -> BatchStatus:
        """How it is once it is finished. Outlives a restart of the front. Raises RequestError."""
        answered_s = time.monotonic()
        while True:
            try:
                status = await self.status()
                if status.is_finished:
                    return status
                answered_s = time.monotonic()
            except RequestError as error:
                if error.status_code not in AGAIN_STATUS or time.monotonic() - answered_s > AWAY_S:
                    raise
            await asyncio.sleep(LOOK_S)

    async def results(self) -> AsyncGenerator[LineResult[T]]:
        """Waits for its end; then each line's result, answers first, in the order in which they
        came. A line that was not run because the batch was cancelled has none. Raises RequestError:
        why the batch failed."""
        status = await self.wait()
        if status.error is not None:
            raise status.error
        for name in ("output_file_id", "error_file_id"):
            if (file := status.plain[name]) is not None:
                content = Request("GET", f"{FILES}/{file}/content")
                async for row in self._connection.rows(content):
                    yield _result(row, self._reads.get(row["custom_id"], _plain))


async def submit_batch(
    connection: Connection,
    lines: Sequence[Line[T]],
    completion_window: str,
    metadata: Mapping[str, str] | None,
) -> AsyncBatch[T]:
    """See AsyncClient.submit_batch."""
    paths = {line.path for line in lines}
    if len(paths) != 1:
        expected = "all of one path" if paths else "at least one"
        raise BadRequest(f"`lines`: {expected}, and not {sorted(paths)}", "lines")
    raw = b"".join(line.written() for line in lines)
    content: Files = {"file": ("lines.jsonl", raw, "application/jsonl")}
    file = await connection.read(Request("POST", FILES, form={"purpose": "batch"}, files=content))
    body = {
        "input_file_id": file["id"],
        "endpoint": paths.pop(),
        "completion_window": completion_window,
        "metadata": metadata,
    }
    try:
        batch = await connection.read(Request("POST", BATCHES, json=body))
    except RequestError:
        # A file that cannot be deleted now expires; the caller is to learn why there is no batch.
        with contextlib.suppress(RequestError):
            await connection.read(Request("DELETE", f"{FILES}/{file['id']}"))
        raise
    return AsyncBatch(connection, batch["id"], {line.custom_id: line.read for line in lines})


def _status(row: Json) -> BatchStatus:
    counts, usage = row["request_counts"], row["usage"]
    return BatchStatus(
        row["id"],
        row["status"],
        counts["total"],
        counts["completed"],
        counts["failed"],
        Usage(usage["input_tokens"], usage["output_tokens"]),
        row,
    )


def _result(row: Json, read: Read[T]) -> LineResult[T]:
    response = row["response"]
    if response is None:
        return LineResult(row["custom_id"], None, error_of_event(row))
    raw = json.dumps(response["body"]).encode()
    if response["status_code"] >= 400:
        return LineResult(
            row["custom_id"], None, error_of_response(response["status_code"], {}, raw)
        )
    return LineResult(row["custom_id"], read(raw, _JSON), None)


def _fields(row: Json) -> Json:
    return row


_plain: Read[Any] = of_json(_fields)
