"""Stored responses of OpenAI's API: what they continue, what they look like, and their streams.

A stored response is a job of the kind `response`. Its request is what the engine gets: the whole
conversation as `input`, with `store` false, so no engine keeps anything of it and any engine can
continue it. Its result is the response as its client gets it. Knows no HTTP and no store.

Events of a background stream have the numbers of the job's events; the first, number 0, is made
here at once, so that a client has the id before a model is loaded.
"""

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from deployments import messages
from deployments.front.inference.service import Parts
from deployments.jobs.calls import Answer, StreamCut
from deployments.jobs.sse import Events, data_of
from deployments.jobs.store import EventPage, Job, JobState

PATH, KIND = "/v1/responses", "response"
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
# What the front answers itself, and takes out of what an engine gets
OURS = ("background", "previous_response_id", "conversation", "store")
STATUS = {JobState.EXPIRED: "failed", JobState.CANCELLING: "in_progress"}  # else the job's own word

Json = dict[str, Any]
KeepResponse = Callable[[Json], Awaitable[bool]]


def new_id() -> str:
    """Returns an id that cannot be guessed."""
    return f"resp_{uuid.uuid4().hex}"


# -- conversations -----------------------------------------------------------------------------


def items_of(value: Any) -> list[Json]:
    """Returns an `input`, which may be a text, as a list of items."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return list(value)


def self_contained(fields: Mapping[str, Any], history: list[Json] | None) -> Json:
    """Returns the request as an engine gets it. `history`: the items of the response that it
    continues; None where it continues none."""
    sent = {name: value for name, value in fields.items() if name not in OURS}
    if history is not None:
        sent["input"] = history + items_of(fields.get("input", ""))
    return sent | {"store": False}


def history_of(request: Json, response: Json) -> list[Json]:
    """Returns the items of a conversation up to the next turn. `instructions` and reasoning are not
    carried over."""
    items = [item for item in response.get("output", []) if item.get("type") != "reasoning"]
    return items_of(request["input"]) + items


def input_items(response_id: str, request: Json) -> list[Json]:
    """The items of its input, the oldest first, each with an id and with its content as parts. An
    item keeps the id that its client gave it, unless an earlier item has it too: pages begin behind
    an id."""
    stem = response_id.removeprefix("resp_")
    items: dict[str, Json] = {}
    for number, item in enumerate(items_of(request["input"])):
        own = item.get("id")
        if not isinstance(own, str) or own == "" or own in items:
            own = f"item_{stem}_{number}"
        items[own] = _item(own, item)
    return list(items.values())


def _item(item_id: str, item: Json) -> Json:
    fields = {"type": "message", **item, "id": item_id}
    if fields["type"] == "message":
        fields = {"status": "completed", **fields}
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        if isinstance(text := item.get("content"), str):
            fields["content"] = [{"type": kind, "text": text}]
    return fields


# -- the object ----------------------------------------------------------------------------------


def marked(response: Json, response_id: str, meta: Mapping[str, Any], is_stored: bool) -> Json:
    """Returns an engine's response object with the fields that only the front knows."""
    return response | {
        "id": response_id,
        "background": meta["background"],
        "previous_response_id": meta["previous_response_id"],
        "store": is_stored,
    }


def echoed(request: Json) -> Json:
    """Returns the fields of a request that its response object repeats."""
    return {name: request[name] for name in _ECHOED if request.get(name) is not None}


def without_answer(job: Job, echo: Json) -> Json:
    """The response object of a job that has no answer, or was refused. `echo`: see `echoed`."""
    status = "failed" if job.status is not None else STATUS.get(job.state, job.state.value)
    error = None
    if job.error is not None:
        code, message = job.error.get("code"), job.error.get("message")
        error = {"code": code or "server_error", "message": message or ""}
    elif job.state is JobState.EXPIRED:
        error = {"code": "expired", "message": f"it was not answered by {job.deadline_s:.0f}"}
    response = {
        "object": "response",
        "created_at": int(job.created_s),
        "status": status,
        "error": error,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **_ABSENT,
        **echo,
    }
    return marked(response, job.id, job.meta, True)


_ABSENT: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "model": "",
    "parallel_tool_calls": True,
    "temperature": None,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
_ECHOED = tuple(_ABSENT)


class ResponseKind:
    """How the runner keeps the result of a background response."""

    def request(self, job: Job, body: bytes) -> bytes:
        """The request as it was kept."""
        return body

    def answer(self, job: Job, answer: Answer, events: list[str]) -> Answer:
        """The response object, also of a stream, whose last event has it. Raises StreamCut."""
        if answer.status >= 400:
            return answer
        if not answer.content_type.startswith("text/event-stream"):
            response: Json | None = json.loads(answer.body)
        else:
            last = [data_of(event) for event in events[-2:]]
            response = next((one["response"] for one in last if one.get("type") in TERMINAL), None)
        if response is None:
            raise StreamCut("the stream ended without a response")
        body = json.dumps(marked(response, job.id, job.meta, True)).encode()
        return replace(answer, body=body, content_type="application/json")


class StreamKind:
    """How the runner keeps the result of any other call: a stream of events as it was."""

    def request(self, job: Job, body: bytes) -> bytes:
        """The request as it was kept."""
        return body

    def answer(self, job: Job, answer: Answer, events: list[str]) -> Answer:
        """The events, where there were any."""
        if not answer.content_type.startswith("text/event-stream"):
            return answer
        return replace(answer, body="".join(f"{event}\n\n" for event in events).encode())


# -- streams ---------------------------------------------------------------------------------------


def sse(data: Json) -> bytes:
    """An event by its `type`."""
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


def first_event(job: Job, echo: Json) -> bytes:
    """Number 0 of a background stream. `echo`: see `echoed`."""
    queued = without_answer(job, echo) | {"status": "queued", "error": None}
    return sse({"type": "response.created", "sequence_number": 0, "response": queued})


def events_of(page: EventPage) -> list[tuple[Json, bytes]]:
    """The events of a page as the client gets them."""
    events = []
    for number, text in page.events:
        if not (data := data_of(text)):
            continue
        if "response" in data:
            data["response"] = marked(data["response"], page.job.id, page.job.meta, True)
        if data.get("type") == "response.created":  # the client has that as number 0
            data["type"], data["response"]["status"] = "response.queued", "queued"
        data["sequence_number"] = number
        events.append((data, sse(data) if "type" in data else b"data: " + _compact(data)))
    return events


def last_event(response: Json, number: int) -> bytes:
    """The end of a stream whose own last event its reader has not had from here: the attempt that
    it was reading was lost, or there is no answer."""
    kind = response["status"]
    return sse({"type": f"response.{kind}", "sequence_number": number, "response": response})


def _compact(data: Json) -> bytes:
    return json.dumps(data).encode() + b"\n\n"


async def kept(
    parts: Parts,
    response_id: str,
    meta: Mapping[str, Any],
    keep: KeepResponse,
    *,
    is_to_be_stored: bool,
) -> Parts:
    """The parts of a call with our marks in its response object, which `keep` is given before the
    client has the last of it; where `keep` says no, the object says `store: false`.
    `is_to_be_stored`: what the events before the last say. Raises what the parts raise."""
    events: _AnnotatedEvents | None = None
    async with aclosing(parts):
        async for part in parts:
            match part:
                case messages.FullResponse() if part.head.status == 200:
                    object_ = marked(json.loads(part.body), response_id, meta, True)
                    object_["store"] = await keep(object_)
                    yield messages.FullResponse(_of_any_length(part.head), _body(object_))
                case messages.ResponseHead() if part.is_event_stream and part.status == 200:
                    events = _AnnotatedEvents(response_id, meta, keep, is_to_be_stored)
                    yield _of_any_length(part)
                case bytes() if events is not None:
                    if piece := await events.feed(part):
                        yield piece
                case _:
                    yield part


class _AnnotatedEvents:
    def __init__(
        self, response_id: str, meta: Mapping[str, Any], keep: KeepResponse, is_to_be_stored: bool
    ) -> None:
        self._events, self._id, self._meta, self._keep = Events(), response_id, meta, keep
        self._is_to_be_stored = is_to_be_stored

    async def feed(self, piece: bytes) -> bytes:
        return b"".join([await self._marked(event) for event in self._events.feed(piece)])

    async def _marked(self, event: str) -> bytes:
        if '"response"' not in event or "response" not in (data := data_of(event)):
            return f"{event}\n\n".encode()
        is_stored = self._is_to_be_stored
        data["response"] = marked(data["response"], self._id, self._meta, is_stored)
        if data.get("type") in TERMINAL:
            data["response"]["store"] = await self._keep(data["response"])
        return sse(data)


def _of_any_length(head: messages.ResponseHead) -> messages.ResponseHead:
    kept_headers = {k: v for k, v in head.headers.items() if k.lower() != "content-length"}
    return replace(head, headers=kept_headers)


def _body(object_: Json) -> bytes:
    return json.dumps(object_).encode()
