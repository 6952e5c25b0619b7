"""Validation of a batch's input file, line by line: every line is right, or none is run.

Reads the file in pieces, holds one line, and tells for each wrong line its number and field.
"""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from arbiter.errors import RequestError
from deployments.front.inference.request import parse
from deployments.front.inference.service import InferenceService
from deployments.jobs import responses as stored
from deployments.jobs.batch_store import Batch, Line, LineError
from deployments.jobs.bodies import PIECE_BYTES
from deployments.jobs.calls import TRANSIENT, RetryLater, target

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/images/generations",
)
LINES_MOST = 50_000  # OpenAI's bound
LINE_MOST_BYTES = 32 << 20  # the front's bound of one body
ERRORS_MOST = 100  # reported for one file; a file that is no JSON has an error in each line
MESSAGE_MOST, FIELD_MOST = 500, 100  # characters of an error; it lies in a row of the state file
JSON_HEADERS = {"content-type": "application/json"}
WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
WINDOW_MOST_S = 14 * 86_400
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

# Fields of `/v1/responses` that a line may not have. The front handles them for a live request; the
# engine that gets a line has no stored responses, and would answer a background response before it
# has worked on it.
NOT_IN_A_BATCH = ("previous_response_id", "background")

Read = Callable[[int, int], Awaitable[bytes]]  # reads the file: from an offset, so many bytes


class LineBody(BaseModel):
    """One line of an input file."""

    model_config = ConfigDict(extra="allow")  # which _parsed refuses, with one error

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class WrongLine(Exception):
    """Carries its LineError."""

    def __init__(self, error: LineError) -> None:
        super().__init__(error)
        self.error = error


def window_s(text: str) -> int | None:
    """Returns the seconds of a text such as `24h`: a number of s, m, h or d, up to 14 days; None
    for any other text."""
    match = WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    return seconds if 0 < seconds <= WINDOW_MOST_S else None


async def pieces_of_lines(read: Read) -> AsyncIterator[tuple[int, bytes]]:
    """Offset and bytes of each line, with its end. A line beyond LINE_MOST_BYTES comes cut."""
    offset, rest = 0, b""
    at = 0
    while piece := await read(at, PIECE_BYTES):
        at += len(piece)
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield offset, line + b"\n"
            offset += len(line) + 1
        if len(rest) > LINE_MOST_BYTES:
            yield offset, rest
            return
    if rest:
        yield offset, rest


class Validator:
    """Validates the input file of one batch: give it each line in order."""

    def __init__(self, batch: Batch, service: InferenceService) -> None:
        self._batch, self._service = batch, service
        self._seen: dict[str, int] = {}  # custom id to line
        self.errors: list[LineError] = []
        self.total = 0
        self.models: dict[tuple[str, str], None] = {}  # in the order of their first lines
        self.number = 0  # of the line that was checked last, from 1

    @property
    def is_over(self) -> bool:
        """Whether there is no use in looking further."""
        return len(self.errors) >= ERRORS_MOST or self.total > LINES_MOST

    @property
    def all_errors(self) -> list[LineError]:
        """The errors of the lines, or the error that the file has no line."""
        if self.total == 0:
            return [LineError("empty_file", "the input file has no request; it needs at least one")]
        return self.errors

    async def check(self, offset: int, raw: bytes) -> Line | None:
        """Returns a line that is right; None: it is blank, or wrong, which `errors` tells. Raises
        RetryLater."""
        self.number += 1
        if not raw.strip():
            return None
        self.total += 1
        try:
            if self.total > LINES_MOST:
                message = f"more than {LINES_MOST} requests; split the file into several batches"
                raise self._wrong("too_many_tasks", message, None)
            model, served = await self._target(raw)
        except WrongLine as wrong:
            self.errors.append(wrong.error)
            return None
        self.models[model, served] = None
        return Line(self.number, offset, len(raw), model, served)

    async def _target(self, raw: bytes) -> tuple[str, str]:
        """Model and served name. Raises WrongLine; RetryLater where a file server is away."""
        line = self._parsed(raw)
        if (first := self._seen.setdefault(line.custom_id, self.number)) != self.number:
            message = (
                f"line {first} has the custom_id {line.custom_id!r} too; give each line its own"
            )
            raise self._wrong("duplicate_custom_id", message, "custom_id")
        if line.url != self._batch.endpoint:
            message = f"url {line.url!r} is not the batch's endpoint, {self._batch.endpoint}"
            raise self._wrong("mismatched_url", message, "url")
        if line.body.get("stream"):
            message = "a line of a batch cannot be a stream; leave `stream` out"
            raise self._wrong("invalid_request", message, "body.stream")
        for name in NOT_IN_A_BATCH if line.url == stored.PATH else ():
            if line.body.get(name):
                message = f"a line of a batch has no `{name}`; give all turns as `input`"
                raise self._wrong("invalid_request", message, f"body.{name}")
        body = json.dumps(line.body).encode()
        try:
            service = self._service
            request = await parse(line.url, body, JSON_HEADERS, service.profiles)
            return await target(service, request, self._batch.tenant)
        except RequestError as error:
            if error.status_code in TRANSIENT:  # of no fault of the line's
                raise RetryLater(error.retry_after_s, str(error)) from error
            param = f"body.{error.param}" if error.param else "body"
            raise self._wrong(error.code, str(error), param) from error

    def _parsed(self, raw: bytes) -> LineBody:
        if len(raw) > LINE_MOST_BYTES:
            message = f"more than {LINE_MOST_BYTES} bytes; shorten this request"
            raise self._wrong("line_too_large", message, None)
        try:
            line = LineBody.model_validate_json(raw)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            if problem["type"] == "json_invalid":
                raise self._wrong("invalid_json_line", problem["msg"], None) from error
            field = str(problem["loc"][0]) if problem["loc"] else None
            message = f"`{field}`: {problem['msg']}" if field else problem["msg"]
            raise self._wrong("invalid_request", message, field) from error
        for name in line.model_extra or ():
            message = f"`{name}`: a line has no such field; leave it out"
            raise self._wrong("invalid_request", message, name)
        return line

    def _wrong(self, code: str, message: str, param: str | None) -> WrongLine:
        """Makes the error of this line. The message may repeat the line's text, so it is clipped:
        it lies in a row of the state file."""
        short = None if param is None else _clipped(param, FIELD_MOST)
        clipped = _clipped(message, MESSAGE_MOST)
        return WrongLine(LineError(_clipped(code, FIELD_MOST), clipped, self.number, short))


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
