"""Asks the rungs of a task's ladder one after the other, until one answers.

The request goes on to the next rung when a rung fails with a status of PASSES, and to a sooner rung
when a rung would wait past the budget. Both only before the client has seen any of an answer: two
halves of two answers are no answer.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from arbiter.errors import DeadlineUnmet, RequestError
from deployments import messages
from deployments.config.task_section import PREFIX
from deployments.messages import Parts
from deployments.remotes.offers import SERVED_BY
from deployments.tasks.ladder import Ladder, Rung

logger = logging.getLogger("ray.serve")

# Another model may do what this one could not: it is full, broken, cooling down, lost its engine,
# does not fit, or misses the deadline. A refusal of the request itself would be the same below, but
# for one of a remote, whose rules are not ours.
PASSES = frozenset({429, 500, 502, 503, 504, 507})
LOOK_S = 0.5  # between two looks at a rung that waits: forecasts are read no more often
RETRY_AFTER_S = 1.0  # of a deadline that is over: another request has one of its own

# From the name of the rung that waits and the seconds since the request came to the rung that the
# request goes on to; None: it waits on.
Onward = Callable[[str, float], Awaitable[Rung | None]]


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A request for a task, with the rungs that may answer it, the best first: at least one."""

    task: str
    request_id: str
    ladder: Ladder
    # By a rung's name; raises RequestError
    call_of: Callable[[str], Awaitable[messages.InferenceCall]]
    wants_progress: bool
    onward: Onward | None = None  # None: it has no budget, so no rung is left for its wait

    @property
    def served(self) -> str:
        """The rung that is asked first."""
        return self.ladder.rungs[0].name


async def climb(call: TaskCall, run: Callable[[messages.InferenceCall], Parts]) -> Parts:
    """The response of one rung, its name in a header. Of several that fail the last one's error is
    the response. A rung that was left for its wait is asked again where all others fail. Raises
    RequestError; DeadlineUnmet where the rungs before left nothing of the deadline."""
    began_s = time.monotonic()
    ahead, passed = list(call.ladder.rungs), set[str]()
    while ahead:
        rung = ahead.pop(0)
        has_begun = False
        try:
            one = _later(call, await call.call_of(rung.name), time.monotonic() - began_s)
            logger.info("request %s: task %s -> %s", call.request_id, call.task, rung.name)
            may_leave = ahead and rung.name not in passed and not rung.state.is_remote
            onward = call.onward if may_leave else None
            names = {other.name for other in ahead}
            async with aclosing(_watched(run(one), onward, rung, names, began_s)) as parts:
                async for part in parts:
                    if ahead and not has_begun and _is_passing(part):
                        break
                    has_begun = has_begun or not isinstance(part, messages.Progress)
                    yield _signed(part, one.served or one.model)
                else:
                    return
        except _NextRung as leaves:
            passed.add(rung.name)
            others = [other for other in ahead if other.name != leaves.to.name]
            ahead = [leaves.to, *others, rung]
            logger.info("request %s: %s waits too long", call.request_id, rung.name)
        except RequestError as error:
            passes = error.status_code in PASSES or rung.state.is_remote
            if has_begun or not ahead or not passes:
                raise
            logger.warning("request %s: %s: %s", call.request_id, rung.name, error)
        if call.wants_progress:  # what this rung said last does not hold for the next
            yield messages.STARTING


class _NextRung(Exception):
    """The request goes on to another rung."""

    def __init__(self, to: Rung) -> None:
        super().__init__(to)
        self.to = to


async def _watched(
    parts: Parts, onward: Onward | None, rung: Rung, ahead: set[str], began_s: float
) -> Parts:
    """The parts of a rung. Raises _NextRung while none but progress has come, where another rung of
    those `ahead` is sooner; closing its parts withdraws what it waits for. Raises RequestError."""
    async with aclosing(parts):
        has_begun = onward is None
        while onward is not None and not has_begun:
            following = asyncio.ensure_future(anext(parts, None))
            try:
                while not (await asyncio.wait({following}, timeout=LOOK_S))[0]:
                    to = await onward(rung.name, time.monotonic() - began_s)
                    if to is not None and to.name in ahead and not following.done():
                        raise _NextRung(to)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
            if (part := following.result()) is None:
                return
            has_begun = not isinstance(part, messages.Progress)
            yield part
        async for part in parts:
            yield part


def _later(call: TaskCall, one: messages.InferenceCall, waited_s: float) -> messages.InferenceCall:
    """Returns the call with what the rungs before it left of the deadline. Raises DeadlineUnmet."""
    one = replace(one, wants_progress=call.wants_progress)
    if one.deadline_s is None:
        return one
    if one.deadline_s <= waited_s:
        raise DeadlineUnmet(PREFIX + call.task, waited_s, RETRY_AFTER_S)
    return replace(one, deadline_s=one.deadline_s - waited_s)


def _is_passing(part: messages.Part) -> bool:
    """A refusal that comes as a whole response, as replicas send it."""
    return isinstance(part, messages.FullResponse) and part.head.status in PASSES


def _signed(part: messages.Part, served: str) -> messages.Part:
    """A remote's answer is signed already, by the model's name there."""
    match part:
        case messages.ResponseHead():
            return replace(part, headers={SERVED_BY: served} | part.headers)
        case messages.FullResponse():
            head = replace(part.head, headers={SERVED_BY: served} | part.head.headers)
            return replace(part, head=head)
    return part
