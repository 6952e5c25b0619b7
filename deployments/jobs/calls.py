"""Makes one attempt of a job's call or of a batch's line, with priority batch, and says whether its
answer stands or the call is tried again. A task's rungs are ordered for each attempt; none of them
is a remote, because a job has no key that may send a request away.

Another try may cure a transient error: an engine that died, a full queue, a failed load, an hour at
which the model is not loaded (429 and 503). Everything else is an answer, refusals included.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from arbiter.core.types import Priority
from arbiter.errors import DeadlineUnmet, EngineLost, ReplicaLost, RequestError, error_fields
from deployments import messages
from deployments.config.task_section import PREFIX
from deployments.front.access.keys import Caller, Scope
from deployments.front.inference.request import ParsedRequest, parse
from deployments.front.inference.service import TRIES, AnyCall, InferenceService, Parts
from deployments.front.inference.tasks import Tasks, task_of
from deployments.front.status.forecasts import Forecasts
from deployments.jobs.sse import Events, data_of, is_whole
from deployments.jobs.suspects import DEATHS_MOST
from deployments.tasks.climb import TaskCall

TRANSIENT = (429, 503)
NO_SCOPES = frozenset[Scope]()
# Between two tries: at least the first, so that a refusal does not spin; at most the second, so
# that work goes on soon after a fault is over.
AGAIN_LEAST_S, AGAIN_MOST_S = 1.0, 30.0
CUT_WITHIN = "the stream was cut within an event"
ANSWER_MOST_BYTES = 256 << 20  # ten pictures of 4096 pixels as base64, or hours of speech


@error_fields
class AnswerTooLarge(RequestError):
    """The answer is too large to be kept."""

    size_bytes: int
    most_bytes: int
    status_code, code = 507, "answer_too_large"

    def __str__(self) -> str:
        return (
            f"the answer has over {self.size_bytes} bytes, and at most {self.most_bytes} are kept;"
            " ask for less in one call"
        )


OnEvents = Callable[[list[str]], Awaitable[object]]
OnProgress = Callable[[messages.Progress | None], None]  # None: the answer has begun


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call; of a stream of events only the status, because its events were told one
    by one."""

    status: int
    body: bytes
    content_type: str = "application/json"
    request_id: str = ""


class RetryLater(Exception):
    """The attempt has no answer; the call is to be made again after `after_s` seconds."""

    def __init__(self, after_s: float | None, why: str) -> None:
        super().__init__(after_s, why)
        self.after_s = min(max(after_s or 0.0, AGAIN_LEAST_S), AGAIN_MOST_S)
        self.why = why


class EngineDied(RetryLater):
    """The engine died under the attempt, as often as the attempt sent the call. A call may end
    every engine that runs it: the deaths are counted (Suspects)."""

    def __init__(self, after_s: float | None, why: str, deaths: int) -> None:
        super().__init__(after_s, why)
        self.deaths = deaths

    @property
    def answer(self) -> Answer:
        """What becomes of the call after DEATHS_MOST deaths."""
        message = (
            f"the engine died {DEATHS_MOST} times under this request, in all attempts but the first"
            f" with no other job beside it ({self.why}); change the request, or see the engine's"
            " log for the cause"
        )
        return _failed(message, EngineLost.code)


class StreamCut(RetryLater):
    """A stream of events ended with an error, or without its last event. An engine may end every
    stream of a request so: the tries are counted."""

    def __init__(self, why: str, code: str = "no_response") -> None:
        super().__init__(None, why)
        self.code = code

    @property
    def answer(self) -> Answer:
        """What becomes of the job when there are no more tries."""
        return _failed(self.why, self.code)


def _failed(message: str, code: str) -> Answer:
    return Answer(502, messages.error_body(message, kind="server_error", code=code))


async def attempt(
    service: InferenceService,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    tenant: str,
    on_events: OnEvents,
    on_progress: OnProgress | None = None,
    priority: Priority = Priority.BATCH,
    forecasts: Forecasts | None = None,
    waited_s: float = 0.0,
) -> Answer:
    """Makes the call once, and returns its answer; a deadline that is over gives a refusal. Raises
    RetryLater. Cancelled, it cancels the work down to the engine. `waited_s`: the seconds of the
    earlier attempts, which count against the call's deadline. `forecasts`: by which a task's rungs
    are ordered."""
    try:
        parsed = await parse(path, body, headers, service.profiles)
        if (request := _with_deadline_left(parsed, waited_s)) is None:
            return refused(DeadlineUnmet(parsed.model, waited_s, AGAIN_LEAST_S))
        wants_progress = on_progress is not None
        call: AnyCall
        if (task := task_of(request.model)) is not None:
            tasks = Tasks(service, forecasts or Forecasts())
            made = await tasks.call(task, request, Caller(tenant, NO_SCOPES))
            call = _that_waits(made, priority)
        else:
            call = replace(await service.call(request, tenant), priority=priority)
        call = replace(call, wants_progress=wants_progress)
        async with aclosing(service.run(call)) as parts:
            answer = await _collect(_after_progress(parts, on_progress), on_events)
        return replace(answer, request_id=request.request_id)
    except RequestError as error:
        if isinstance(error, EngineLost) and _is_death(error):
            raise EngineDied(error.retry_after_s, str(error), TRIES) from error
        if messages.is_transient(error) or error.status_code in TRANSIENT:
            raise RetryLater(error.retry_after_s, str(error)) from error
        return refused(error)


def _is_death(error: EngineLost) -> bool:
    """Says whether an engine that had the call died, which its ticket says: a model that left each
    time before the call could enter has none."""
    return error.ticket is not None and not isinstance(error, ReplicaLost)


async def target(service: InferenceService, request: ParsedRequest, tenant: str) -> tuple[str, str]:
    """Returns model and served name, by which lines are collated; for a task its name in both
    places. Raises RequestError; where no rung of a task can serve the request, the error of the
    first rung."""
    task = task_of(request.model)
    if task is None:
        call = await service.call(request, tenant)
        return call.model, call.served
    first: RequestError | None = None
    for rung in Tasks(service, Forecasts()).find(task).ladder:
        try:
            await service.call(request, tenant, model=rung)
            return PREFIX + task, PREFIX + task
        except RequestError as error:
            first = first or error
    assert first is not None, "a ladder has a rung"
    raise first


def _with_deadline_left(request: ParsedRequest, waited_s: float) -> ParsedRequest | None:
    """Returns the request with the rest of its deadline; None: the deadline is over."""
    deadline_s = request.checked.x_deadline_s or request.profile.deadline_s
    if deadline_s is None:
        return request
    left_s = deadline_s - waited_s
    checked = request.checked.model_copy(update={"x_deadline_s": left_s})
    return replace(request, checked=checked) if left_s > 0 else None


def _that_waits(call: TaskCall, priority: Priority) -> TaskCall:
    """Has the call wait for its rung however long that takes, because no person waits for the
    answer."""

    async def call_of(rung: str) -> messages.InferenceCall:
        return replace(await call.call_of(rung), priority=priority)

    return replace(call, call_of=call_of, onward=None)


def refused(error: RequestError) -> Answer:
    head, body = messages.refusal(error)
    return Answer(head.status, body)


async def _after_progress(parts: Parts, on_progress: OnProgress | None) -> Parts:
    async for part in parts:
        progress = part if isinstance(part, messages.Progress) else None
        if on_progress is not None:
            on_progress(progress)
        if progress is None:
            yield part


async def _collect(parts: Parts, on_events: OnEvents) -> Answer:
    """Returns the whole answer; of a stream it tells the events as they come. Raises RetryLater,
    StreamCut."""
    head: messages.ResponseHead | None = None
    events, last, pieces, size = Events(), "", [], 0
    async for part in parts:
        match part:
            case messages.FullResponse():
                return _answer_of(part.head, part.body)
            case messages.ResponseHead():
                head = part
            case bytes() if head is not None and head.is_event_stream:
                whole = events.feed(part)
                await _tell(whole, on_events)
                last = whole[-1] if whole else last
            case bytes():
                pieces.append(part)
                size += len(part)
                if size > ANSWER_MOST_BYTES:
                    return refused(AnswerTooLarge(size, ANSWER_MOST_BYTES))
    assert head is not None, "a response has a head"
    if not (is_whole(last) and is_whole(events.rest)):
        raise StreamCut(CUT_WITHIN)
    return _answer_of(head, b"".join(pieces))


async def _tell(events: list[str], on_events: OnEvents) -> None:
    """Tells the events before an error, which is none of the answer's. Raises RetryLater,
    StreamCut."""
    for number, event in enumerate(events):
        if (error := _error_in(event)) is not None:
            if number:
                await on_events(events[:number])
            raise error
    if events:
        await on_events(events)


def _error_in(event: str) -> RetryLater | None:
    """Returns the error of an event that ends a stream; None of any other event."""
    if '"error"' not in event:
        return None
    if not is_whole(event):  # cut, and what broke the stream stands behind it in the same line
        event = "data:" + event.rpartition("data:")[2]
        if not is_whole(event):
            return StreamCut(CUT_WITHIN)
    data = data_of(event)
    error = data if data.get("type") == "error" else data.get("error")
    if not error or "response" in data or "choices" in data:
        return None
    fields = error if isinstance(error, dict) else {"message": error}
    why, code = str(fields.get("message", error))[:500], str(fields.get("code") or "no_response")
    return EngineDied(None, why, 1) if code == EngineLost.code else StreamCut(why, code)


def _answer_of(head: messages.ResponseHead, body: bytes) -> Answer:
    """Raises RetryLater for a status that another try may cure."""
    if head.status in TRANSIENT:
        retry_after = head.headers.get("retry-after", "")
        raise RetryLater(
            float(retry_after) if retry_after.isdecimal() else None,
            body[:500].decode(errors="replace"),
        )
    return Answer(head.status, body, head.headers.get("content-type", "application/json"))
