"""StoredResponses: what one tenant keeps of `/v1/responses`, in the jobs' process. Knows no HTTP.

A response that is stored has an id of ours. A live one is kept when it is complete, before its
client has the last of it; where it cannot be kept, the client gets it all the same, and it says
`store: false`.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from arbiter.core.types import Priority
from arbiter.errors import RequestError
from deployments.front.inference.request import (
    BadRequest,
    check_body,
    headers_for_later,
    json_object,
)
from deployments.front.inference.schemas import DAY_S, StoredFields
from deployments.front.inference.service import AnyCall, Parts
from deployments.front.jobs import async_calls
from deployments.front.middleware.body_limit import MAX_BODY_BYTES
from deployments.jobs import responses
from deployments.jobs.client import JobsClient
from deployments.jobs.errors import NotFound
from deployments.jobs.responses import Json
from deployments.jobs.store import Job, NewJob
from deployments.tasks.climb import TaskCall

logger = logging.getLogger("ray.serve")

KEEP_S = 30 * DAY_S  # OpenAI's
# How long a live answer waits for its keeping: a process of jobs starts in 1-3 s, on a machine busy
# with imports in ten, and it is woken when the call begins
KEEP_WITHIN_S = 10.0
ECHOED_MOST_CHARS = 4_096  # of a job's meta, which is read with each look at its row
COMPLETE = 200  # the status of an answer that can be continued


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A request for a response: what the client says of it, and the body that an engine gets."""

    checked: StoredFields
    is_stored: bool
    body: bytes
    echoed: Json  # what the response object says again of it

    @property
    def is_background(self) -> bool:
        return self.checked.background is True

    @property
    def is_changed(self) -> bool:
        """Whether the answer must say something that the engine does not know."""
        return self.is_stored or self.checked.previous_response_id is not None

    @property
    def meta(self) -> Json:
        """The `meta` of its job. In it is what the response object repeats of the request, so that
        a client's poll need not read the whole request; but nothing large, as tools may be, because
        each look at the job's row reads its meta."""
        is_kept = self.is_background and len(json.dumps(self.echoed)) <= ECHOED_MOST_CHARS
        return {
            "background": self.is_background,
            "stream": self.checked.stream is True,
            "previous_response_id": self.checked.previous_response_id,
            **({"echoed": self.echoed} if is_kept else {}),
        }


class StoredResponses:
    """Every method raises JobsAway; NotFound where the tenant has no such response."""

    def __init__(self, jobs: JobsClient, tenant: str) -> None:
        self._jobs, self._tenant = jobs, tenant

    async def prepare(
        self, raw: bytes, stores: bool, *, is_async: bool = False
    ) -> PreparedResponse:
        """`stores`: what an absent `store` means. `is_async`: the client wants no answer now.
        Raises BadRequest naming the field."""
        fields = json_object(raw)
        checked = check_body(StoredFields, fields)
        if is_async:
            checked = checked.model_copy(update={"background": True})
        is_stored = (
            checked.store if checked.store is not None else stores or checked.background is True
        )
        if checked.background and not is_stored:
            raise BadRequest("`background`: only a response with `store` can be fetched", "store")
        history = None
        if checked.previous_response_id is not None:
            if not isinstance(fields.get("input", ""), str | list):
                raise BadRequest("`input`: a text or a list of items", "input")
            history = await self._history(checked.previous_response_id)
        sent = responses.self_contained(fields, history)
        body = json.dumps(sent).encode()
        if len(body) > MAX_BODY_BYTES:  # each turn adds to it, though its own body is within that
            message = f"{len(body)} bytes with all turns before; at most {MAX_BODY_BYTES}"
            raise BadRequest(f"{message}: begin a new conversation", "previous_response_id")
        return PreparedResponse(checked, is_stored, body, responses.echoed(sent))

    async def _history(self, response_id: str) -> list[Json]:
        """Raises BadRequest, as OpenAI's service does."""
        try:
            job = await self.job(response_id)
        except NotFound:
            raise _NoPrevious(f"previous response {response_id!r} not found") from None
        if job.status != COMPLETE:
            raise _NoPrevious(f"previous response {response_id!r} is {job.state}")
        request, whole = await asyncio.gather(self.request(job.id), self._whole(job.id))
        return responses.history_of(request, json.loads(whole))

    async def begin(
        self,
        prepared: PreparedResponse,
        call: AnyCall,
        headers: Mapping[str, str],
        priority: Priority | None,
    ) -> Job:
        """Queues the job of a background response. Raises TenantLimitReached, StorageFull,
        BadRequest."""
        model = (await async_calls.for_later(call)).model
        new = self._new(prepared, model, responses.new_id())
        lifted = {} if priority is None else {"priority": priority.name}
        new.meta.update(lifted)
        new.headers.update(headers_for_later(headers))
        job: Job = await self._jobs.call("create", new, prepared.body)
        return job

    def live(self, prepared: PreparedResponse, call: AnyCall, parts: Parts) -> Parts:
        """Returns the parts of a call that is answered now. If the response is to be stored, its
        object gets an id of ours, and is kept before the client has the end."""
        if not prepared.is_changed:
            return parts
        model = f"task:{call.task}" if isinstance(call, TaskCall) else call.model
        new = self._new(prepared, model, responses.new_id())
        if prepared.is_stored:
            self._jobs.wake()

        async def keep(response: Json) -> bool:
            if not prepared.is_stored:
                return False
            try:
                async with asyncio.timeout(KEEP_WITHIN_S):
                    await self._jobs.call("keep", new, prepared.body, json.dumps(response).encode())
            except (RequestError, TimeoutError) as error:
                logger.warning("response %s is not kept: %r", new.id, error)
                return False
            return True

        is_stored = prepared.is_stored
        return responses.kept(parts, new.id, new.meta, keep, is_to_be_stored=is_stored)

    def _new(self, prepared: PreparedResponse, model: str, response_id: str) -> NewJob:
        return NewJob(
            *(response_id, self._tenant, responses.KIND, responses.PATH, model),
            meta=prepared.meta,
            keep_s=KEEP_S,
        )

    async def job(self, response_id: str) -> Job:
        """The job of a response."""
        job: Job = await self._jobs.call("get", self._tenant, response_id)
        if job.kind != responses.KIND:
            raise NotFound("response", response_id)
        return job

    async def request(self, response_id: str) -> Json:
        """The body that an engine gets."""
        body: Json = json.loads(await self._jobs.call("request", self._tenant, response_id))
        return body

    async def _whole(self, response_id: str) -> bytes:
        return await async_calls.whole_result(self._jobs, self._tenant, response_id)

    def answer(self, job: Job) -> AsyncGenerator[bytes, None]:
        """The response object of a job that has one, as it was kept, in pieces."""
        return async_calls.result(self._jobs, self._tenant, job.id)

    async def shown(self, job: Job) -> Json:
        """The response object as it is now."""
        if job.status == COMPLETE:
            body: Json = json.loads(await self._whole(job.id))
            return body
        return responses.without_answer(job, await self._echoed(job))

    async def _echoed(self, job: Job) -> Json:
        kept: Json | None = job.meta.get("echoed")
        return responses.echoed(await self.request(job.id)) if kept is None else kept

    async def stream(self, job: Job, after: int | None) -> AsyncGenerator[bytes, None]:
        """Yields the events with a number above `after`, or all, until the response ends. The last
        event always says that it has ended, also to a reader that has had that event before."""
        if after is None:
            yield responses.first_event(job, await self._echoed(job))
        last, is_ended = after or 0, False
        async for page in async_calls.pages(self._jobs, self._tenant, job.id, last):
            job = page.job
            if not page.events:
                yield async_calls.COMMENT
            for data, event in responses.events_of(page):
                last, is_ended = data["sequence_number"], data.get("type") in responses.TERMINAL
                yield event
        if not is_ended:
            yield responses.last_event(await self.shown(job), last + 1)

    async def cancel(self, response_id: str) -> Json:
        """Ends the work; a finished response stays as it is. Raises BadRequest where it is none of
        the background."""
        job = await self.job(response_id)
        if not job.meta["background"]:
            raise BadRequest(
                "only a response made with `background: true` can be cancelled", "response_id"
            )
        return await self.shown(await async_calls.cancelled(self._jobs, self._tenant, job.id))

    async def delete(self, response_id: str) -> None:
        """Raises Conflict where it is unfinished."""
        await self.job(response_id)
        await self._jobs.call("delete", self._tenant, response_id)


class _NoPrevious(BadRequest):
    code = "previous_response_not_found"

    def __init__(self, message: str) -> None:
        super().__init__(message, "previous_response_id")
