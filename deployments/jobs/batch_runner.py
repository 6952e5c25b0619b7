"""BatchRunner: validates batches, runs their lines, and ends them.

Results that come during a write go together into the next one. While the disk refuses them, no
further line begins, and the results wait in memory until there is room.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from arbiter.errors import RequestError
from deployments.config.jobs_section import JobsConfig
from deployments.front.inference.service import InferenceService
from deployments.front.status.forecasts import Forecasts
from deployments.jobs import validation
from deployments.jobs.batch_store import (
    Batch,
    BatchState,
    BatchStore,
    FinishedLine,
    Line,
    LineError,
)
from deployments.jobs.bodies import Bodies
from deployments.jobs.calls import Answer, EngineDied, RetryLater, attempt
from deployments.jobs.errors import (
    BodyLost,
    StorageFailed,
    StorageFull,
    Superseded,
    TenantLimitReached,
)
from deployments.jobs.line_queue import LineQueue
from deployments.jobs.runner import STORAGE_AGAIN_S, SWEEP_S, Blocking, rounds
from deployments.jobs.suspects import DEATHS_MOST, Suspects
from deployments.jobs.waits import CallsInFlight
from deployments.replica.background import BackgroundTasks, log_failure

logger = logging.getLogger("ray.serve")

CHUNK = 500  # lines in one transaction, of validation and of expiry
ROOM_AGAIN_S = 30.0  # between two looks whether a tenant's files leave room for results
FAILED_TRIES, FAILED_AGAIN_S = 3, 5.0  # calls of a line that bugs end, and seconds between two
YIELD_EVERY = 20  # lines checked between two looks at other work: some ms
_FAILED = {
    "code": "internal_error",
    "message": f"This request failed {FAILED_TRIES} times by an error in the server; see its log.",
}


class BatchRunner:
    """Runs the lines of all batches, a bounded number at a time. `service` returns the front's
    service with the table as it is now."""

    def __init__(
        self,
        store: BatchStore,
        bodies: Bodies,
        blocking: Blocking,
        service: Callable[[], Awaitable[InferenceService]],
        config: Callable[[], JobsConfig],
        suspects: Suspects,
    ) -> None:
        self._store, self._bodies, self._blocking = store, bodies, blocking
        self._service, self._config, self._suspects = service, config, suspects
        self._queue = LineQueue(store.lines, time.monotonic)
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._failures: Counter[tuple[str, int]] = Counter()  # bugs that ended a line's call
        self._first_s: dict[tuple[str, int], float] = {}  # when the first call of a line began
        self._endings = BackgroundTasks()  # what follows the call of a line; nothing cancels it
        self._waits = CallsInFlight()
        self._steps: dict[str, asyncio.Task[None]] = {}  # by batch: its validation, or its end
        self._finished: list[FinishedLine] = []
        self._flushing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._forecasts = Forecasts()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def wake(self) -> None:
        """Has the runner look for something to do."""
        self._wake.set()

    async def run(self) -> None:
        """Runs batches for as long as this process has the jobs. Raises Superseded."""
        await rounds(self._round, self._wake, "batches")

    async def close(self) -> None:
        """Ends every call. The lines of these calls have no result, so the next process runs
        them."""
        running = [*self._running.values(), *self._steps.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._endings.done()

    # -- batches -------------------------------------------------------------------------------

    async def _round(self) -> float | None:
        """Advances each batch by a step, and begins lines. Returns after how many seconds there may
        be more to do without a wake; None: never."""
        await self._blocking(self._store.expire_overdue)
        batches = await self._blocking(self._store.unfinished)
        for batch in batches:
            if batch.id not in self._steps:
                await self._advance(batch)
        await self._fill()
        if not batches:
            return None
        due_s = self._queue.due_s
        return SWEEP_S if due_s is None else min(SWEEP_S, max(0.0, due_s - time.monotonic()))

    async def _advance(self, batch: Batch) -> None:
        match batch.state:
            case BatchState.VALIDATING:
                self._step(batch, self._validate(batch))
            case BatchState.IN_PROGRESS:
                await self._go_on(batch)
            case BatchState.CANCELLING | BatchState.FINALIZING:
                await self._blocking(self._queue.remove, batch.id)
                self._step(batch, self._end(batch))

    async def _go_on(self, batch: Batch) -> None:
        """Finalizes a batch when each line has its result. Lines without a result that neither run
        nor wait are queued again: a bug has ended their calls."""
        is_new = batch.id not in self._queue.batches
        if not is_new and await self._is_open(batch):
            return
        if await self._blocking(self._store.some_lines, batch.id, 1):
            if not is_new:
                logger.error("batch %s has lines that got no result; they run again", batch.id)
                await self._blocking(self._queue.remove, batch.id)
                return self._step(batch, asyncio.sleep(FAILED_AGAIN_S))
            await self._blocking(self._queue.add, batch)
            self.wake()
            return
        await self._blocking(self._queue.remove, batch.id)
        await self._blocking(self._store.finalize, batch.id)
        self.wake()

    async def _is_open(self, batch: Batch) -> bool:
        """Says whether lines of a batch are to be run, or run, or have a result to be kept."""
        if any(finished.batch == batch.id for finished in self._finished):
            return True
        return await self._blocking(self._queue.is_open, batch.id)

    def _step(self, batch: Batch, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._carry_step(batch, work))
        self._steps[batch.id] = task
        task.add_done_callback(log_failure)
        task.add_done_callback(partial(self._step_ended, batch.id))

    async def _carry_step(self, batch: Batch, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BodyLost as error:
            await self._without_input(batch, error)
        except (StorageFull, StorageFailed) as error:
            logger.error("batch %s waits: %s", batch.id, error)
            await asyncio.sleep(STORAGE_AGAIN_S)
        except RetryLater as again:
            logger.info("batch %s waits: %s", batch.id, again.why)
            await asyncio.sleep(again.after_s)
        except Superseded as error:
            logger.warning("%s", error)

    def _step_ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        """Has the next step begin, but not at once after a step that a bug ended: the same step
        would fail again, and read the whole file each time."""

        def go_on() -> None:
            del self._steps[batch_id]
            self.wake()

        if task.cancelled() or task.exception() is None:
            go_on()
        else:
            asyncio.get_running_loop().call_later(FAILED_AGAIN_S, go_on)

    async def _validate(self, batch: Batch) -> None:
        """Checks each line of the input file, and starts the batch or fails it. Raises RetryLater,
        StorageFull, StorageFailed, Superseded."""
        validator = validation.Validator(batch, await self._table())
        await self._blocking(self._store.clear_lines, batch.id)
        lines: list[Line] = []

        async def read(offset: int, most: int) -> bytes:
            return await self._blocking(self._bodies.read, batch.input_file, offset, most)

        async for offset, raw in validation.pieces_of_lines(read):
            if line := await validator.check(offset, raw):
                lines.append(line)
            if len(lines) >= CHUNK:
                await self._blocking(self._store.add_lines, batch.id, lines)
                lines = []
            if validator.is_over:
                break
            if validator.number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        await self._blocking(self._store.add_lines, batch.id, lines)
        if errors := validator.all_errors:
            await self._blocking(self._store.fail, batch.id, errors)
        else:
            models = list(validator.models)
            await self._blocking(self._store.start, batch.id, validator.total, models)
        logger.info("batch %s: %d lines, %d wrong", batch.id, validator.total, len(errors))

    async def _end(self, batch: Batch) -> None:
        """Ends the calls of a batch, keeps the results that have come, and closes its files. Of an
        expired batch each line that was not run gets an error."""
        mine = [task for (batch_id, _), task in self._running.items() if batch_id == batch.id]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        self._failures = Counter({k: n for k, n in self._failures.items() if k[0] != batch.id})
        self._first_s = {k: s for k, s in self._first_s.items() if k[0] != batch.id}
        await self._flush()
        if "in_progress" not in batch.times:  # lines that a validation left behind are none of its
            await self._blocking(self._store.clear_lines, batch.id)
        while batch.outcome == "expired":
            lines = await self._blocking(self._store.some_lines, batch.id, CHUNK)
            if not lines:
                break
            await self._blocking(self._store.keep, [await self._expired(batch, x) for x in lines])
        await self._blocking(self._end_now, batch)
        logger.info("batch %s: %s", batch.id, batch.outcome)

    def _end_now(self, batch: Batch) -> None:
        self._store.end(self._store.get(batch.tenant, batch.id))

    async def _expired(self, batch: Batch, line: Line) -> FinishedLine:
        custom_id, _ = await self._request(batch, line)
        message = "This request could not be executed before the completion window expired."
        error = {"code": "batch_expired", "message": message}
        return _finished(batch, line, custom_id, None, error)

    # -- lines ---------------------------------------------------------------------------------

    async def _fill(self) -> None:
        """Begins lines while fewer than `in_flight` run. At the bound, a line whose model has
        waited for a whole turn makes room for a line of another model (CallsInFlight). A line that
        is to run alone has no others of its model begin (Suspects)."""
        config = self._config()
        alone: set[str] = set()  # whose calls are not in `_suspects` yet
        while not self._is_stuck:
            late = self._waits.models(config.turn_s) | self._suspects.models | alone
            if len(self._running) >= config.in_flight:
                has_other = bool(late) and await self._blocking(self._queue.has_line, late)
                if has_other:
                    self._waits.give_way(config.turn_s, config.in_flight)
                return
            taken = await self._blocking(self._queue.take, config.turn_s, late)
            if taken is None:
                return
            batch, line = taken
            if line.losses:
                alone.add(line.model)
            task = asyncio.create_task(self._carry(batch, line))
            self._running[batch.id, line.number] = task
            task.add_done_callback(log_failure)
            # No `finally` of the task: a cancelled one would not end what it has in hand there.
            task.add_done_callback(partial(self._ended, batch, line))

    def _ended(self, batch: Batch, line: Line, task: asyncio.Task[None]) -> None:
        del self._running[batch.id, line.number]
        if not task.cancelled() and task.exception() is not None:
            self._failures[batch.id, line.number] += 1
        self._endings.begin(self._end_line(batch))

    async def _end_line(self, batch: Batch) -> None:
        await self._blocking(self._queue.end, batch)
        self.wake()

    @property
    def _is_stuck(self) -> bool:
        """The disk takes no results: more of them would fill the memory."""
        return len(self._finished) > 4 * self._config().in_flight

    async def _carry(self, batch: Batch, line: Line) -> None:
        """Makes one attempt of one line. While the tenant's files fill all that they may, the line
        is put back until some are deleted, or the window ends."""
        try:
            most = self._config().tenant_bytes
            await self._blocking(self._store.check_room, batch.tenant, most)
            custom_id, body = await self._request(batch, line)
            if self._failures[batch.id, line.number] >= FAILED_TRIES:
                return self._keep(_finished(batch, line, custom_id, None, _FAILED))
            answer = await self._attempt(batch, line, body)
            self._keep(_result(batch, line, custom_id, answer))
        except TenantLimitReached as error:
            logger.warning("%s line %d waits: %s", batch.id, line.number, error)
            await self._put_back(batch, line, ROOM_AGAIN_S)
        except RetryLater as again:
            logger.info("%s line %d is tried again: %s", batch.id, line.number, again.why)
            if isinstance(again, EngineDied):
                line = replace(line, losses=line.losses + again.deaths)
            await self._put_back(batch, line, again.after_s)
        except BodyLost as error:
            await self._without_input(batch, error)
        except (StorageFull, StorageFailed) as error:
            logger.error("%s line %d waits: %s", batch.id, line.number, error)
            await self._put_back(batch, line, STORAGE_AGAIN_S)

    async def _attempt(self, batch: Batch, line: Line, body: bytes) -> Answer:
        """Makes one attempt. The last of DEATHS_MOST deaths of the engine is taken for the answer.
        Raises RetryLater, StorageFull, StorageFailed, Superseded."""
        service = await self._table()
        headers, now_s = validation.JSON_HEADERS, time.monotonic()
        waited_s = now_s - self._first_s.setdefault((batch.id, line.number), now_s)
        try:
            async with (
                self._suspects.call(line.model, line.losses),
                self._waits.call(line.model) as call,
            ):
                return await attempt(
                    service,
                    batch.endpoint,
                    body,
                    headers,
                    batch.tenant,
                    _no_events,
                    on_progress=call.note,
                    forecasts=self._forecasts,
                    waited_s=waited_s,
                )
        except EngineDied as died:
            line = replace(line, losses=line.losses + died.deaths)
            if line.losses >= DEATHS_MOST:
                return died.answer
            await self._blocking(self._store.note_losses, batch.id, line)
            raise

    def _keep(self, finished: FinishedLine) -> None:
        self._first_s.pop((finished.batch, finished.line.number), None)
        self._finished.append(finished)
        self._begin_flush()

    async def _put_back(self, batch: Batch, line: Line, after_s: float) -> None:
        await self._blocking(self._queue.put_back, batch, line, time.monotonic() + after_s)

    async def _request(self, batch: Batch, line: Line) -> tuple[str, bytes]:
        """The line's custom id and its body. Raises BodyLost where the input file is gone, or has
        another line in its place."""
        raw = await self._blocking(self._bodies.read, batch.input_file, line.offset, line.length)
        try:
            checked = validation.LineBody.model_validate_json(raw)
        except ValidationError as error:
            why = f"line {line.number} is not what it was when it was checked"
            raise BodyLost(str(self._bodies.path(batch.input_file)), why) from error
        return checked.custom_id, json.dumps(checked.body).encode()

    async def _without_input(self, batch: Batch, lost: BodyLost) -> None:
        message = f"the input file {batch.input_file} was lost after its upload; upload it again"
        error = LineError("input_file_lost", message, param="input_file_id")
        await self._give_up(batch.id, error, lost)

    async def _give_up(self, batch_id: str, error: LineError, lost: BodyLost) -> None:
        """Lets a batch fail that has lost a file: no later try would find it."""
        logger.error("batch %s fails: %s", batch_id, lost)
        await self._blocking(self._store.give_up, batch_id, error)

    async def _table(self) -> InferenceService:
        """Raises RetryLater while the arbiter is away."""
        try:
            return await self._service()
        except RequestError as error:
            raise RetryLater(error.retry_after_s, str(error)) from error

    def _begin_flush(self) -> None:
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush_all())
            self._flushing.add_done_callback(log_failure)

    async def _flush_all(self) -> None:
        while self._finished:
            try:
                await self._flush()
            except (StorageFull, StorageFailed) as error:
                logger.error("results wait: %s", error)
                await asyncio.sleep(STORAGE_AGAIN_S)
            except Superseded as error:
                logger.warning("%s", error)
                return
        self.wake()

    async def _flush(self) -> None:
        """Keeps the results so far. Two calls at once are harmless, because a line is kept once."""
        for batch_id in {one.batch for one in self._finished}:
            taken = [one for one in self._finished if one.batch == batch_id]
            try:
                await self._blocking(self._store.keep, taken)
            except BodyLost as lost:
                message = "results of this batch were lost from the disk; send it again"
                await self._give_up(batch_id, LineError("output_file_lost", message), lost)
            self._finished = [one for one in self._finished if one not in taken]


async def _no_events(events: list[str]) -> None:
    """A line of a batch is no stream."""


def _result(batch: Batch, line: Line, custom_id: str, answer: Answer) -> FinishedLine:
    """Writes a result as OpenAI does: an answer, whatever its status, is a `response`."""
    try:
        body = json.loads(answer.body)
    except ValueError:
        body = answer.body.decode(errors="replace")
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    return _finished(batch, line, custom_id, response, None)


def _finished(
    batch: Batch,
    line: Line,
    custom_id: str,
    response: dict[str, Any] | None,
    error: dict[str, Any] | None,
) -> FinishedLine:
    row = {
        "id": f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    is_error = response is None or response["status_code"] >= 400
    usage = {} if response is None or is_error else usage_of(response["body"])
    return FinishedLine(batch.id, line, json.dumps(row).encode() + b"\n", is_error, usage)


def usage_of(body: Any) -> dict[str, int]:
    """Tokens of an answer in any of OpenAI's forms; empty where it tells none."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return {}
    inside = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    outside = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return {
        "input": usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        "output": usage.get("completion_tokens") or usage.get("output_tokens") or 0,
        "cached": inside.get("cached_tokens") or 0,
        "reasoning": outside.get("reasoning_tokens") or 0,
    }
