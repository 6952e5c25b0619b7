"""Keeps work of priority batch out of the steps that compute a more urgent request's prompt (J4,
C2).

A step takes as long as all that is in it. Without this, a question waits for the steps of every
line of a batch that shares its engine; with it, for the one step that runs when it comes. Its later
tokens share their steps with the batch, which on a GPU costs them little.

vLLM's scheduler passes over a running request before its `next_decode_eligible_step`, and takes the
rest from its two queues of waiting requests, of which one has those that hold blocks already, as
while their KV comes out of the slab. So none of them is changed. A request that is held keeps its
blocks. Only where the urgent one finds no place or no blocks, one request of priority batch is
preempted by vLLM's own means: its tokens stay, and their KV is computed again, as far as the prefix
cache has lost it.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import PriorityRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from arbiter.core.types import Priority
from deployments.engines.vllm.batching.batch_admission import BYPASSES

_BATCH = int(Priority.BATCH)


@dataclass(slots=True)
class HoldTrace:
    """Steps by what became of work of priority batch, and how often it gave up its place."""

    held: int = 0  # an urgent prompt was computed without it
    beside: int = 0  # an urgent prompt was computed in one step with it
    preempted: int = 0

    def facts(self) -> dict[str, int]:
        return {"held": self.held, "beside": self.beside, "preempted": self.preempted}


class BatchHold:
    """Takes the place of the scheduler's own `schedule`. At most BYPASSES steps in a row leave out
    work of priority batch, so that an engine which always has urgent prompts goes on with it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.trace = HoldTrace()
        self._scheduler, self._schedule = scheduler, scheduler.schedule
        self._in_a_row = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        late = self._batch_requests()
        prompts = self._urgent_prompts() if late else []
        if not prompts or self._in_a_row >= BYPASSES:
            self._in_a_row = 0
            return self._traced(self._schedule(*args, **kwargs), prompts)
        self._in_a_row += 1
        step = self._without(late, *args, **kwargs)
        if not any(one.request_id in step.num_scheduled_tokens for one in prompts):
            # The prompts did not enter this step, so that to leave out work of priority batch once
            # more would not help them.
            self._in_a_row = BYPASSES
            self._make_room(prompts)
        return self._traced(step, prompts)

    def _urgent_prompts(self) -> list[Request]:
        return [one for one in self._all_requests() if not _is_batch(one) and _is_prompt(one)]

    def _batch_requests(self) -> list[Request]:
        # `_is_batch` without a call: this runs in each step over all requests.
        return [one for one in self._all_requests() if one.priority >= _BATCH]

    def _all_requests(self) -> Iterator[Request]:
        scheduler = self._scheduler
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        return chain(scheduler.running, *map(_in_no_order, queues))

    def _without(self, late: list[Request], *args: Any, **kwargs: Any) -> SchedulerOutput:
        """One step in which nothing of `late` is computed."""
        scheduler = self._scheduler
        for one in late:
            if one.status == RequestStatus.RUNNING:
                # `schedule` counts up first, so this is the step after its next.
                one.next_decode_eligible_step = max(
                    one.next_decode_eligible_step, scheduler.current_step + 2
                )
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        held = [(queue, [one for one in _in_no_order(queue) if _is_batch(one)]) for queue in queues]
        for queue, queued in held:
            queue.remove_requests(queued)
        try:
            return self._schedule(*args, **kwargs)
        finally:
            for queue, queued in held:
                for one in queued:
                    queue.add_request(one)

    def _make_room(self, prompts: list[Request]) -> None:
        """Preempts the latest request of priority batch, for a prompt that lacks only a place in
        the batch or blocks. The next step finds the place and the blocks of that request. Where a
        step in flight may still write those blocks, as on a GPU with a KV connector, they are freed
        later, and until then no further request is preempted."""
        scheduler = self._scheduler
        if scheduler.deferred_frees:
            return
        ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        waiting = {one for one in prompts if one.status in ready} - scheduler.deferred_waiting
        running = [one for one in scheduler.running if _is_batch(one)]
        if not waiting or not running:
            return
        victim = max(running, key=lambda one: (one.priority, one.arrival_time))
        scheduler.running.remove(victim)
        # As the scheduler itself does between two steps (`reset_prefix_cache`).
        scheduler._preempt_request(victim, time.monotonic(), drop_stale_output=True)
        self.trace.preempted += 1
        self._in_a_row = 0

    def _traced(self, step: SchedulerOutput, prompts: list[Request]) -> SchedulerOutput:
        if any(one.request_id in step.num_scheduled_tokens for one in prompts):
            scheduled = (self._scheduler.requests.get(key) for key in step.num_scheduled_tokens)
            if any(one is not None and _is_batch(one) for one in scheduled):
                self.trace.beside += 1
            elif self._in_a_row:
                self.trace.held += 1
        return step


def _in_no_order(queue: RequestQueue) -> Iterable[Request]:
    """Returns the requests of a queue in any order. vLLM's own iterator sorts a copy of the heap by
    priority, which with a thousand requests takes longer than a step."""
    requests: Iterable[Request] = queue._heap if isinstance(queue, PriorityRequestQueue) else queue
    return requests


def _is_batch(request: Request) -> bool:
    return request.priority >= _BATCH


def _is_prompt(request: Request) -> bool:
    """Whether some of its prompt, or after a preemption of its tokens so far, is to be computed."""
    return bool(request.num_computed_tokens < request.num_prompt_tokens)
