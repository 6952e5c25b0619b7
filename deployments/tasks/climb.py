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

# Statuses after which the next rung is asked: the model is full, broken, cooling down, lost its
# engine, does not fit, or misses the deadline. A refusal of the request itself is final, because
# the rungs below would refuse it as well; but a remote, whose rules are not ours, may be alone in
# that.
PASSES = frozenset({429, 500, 502, 503, 504, 507})
LOOK_S = 0.5  # between two looks at a rung that waits: forecasts are read no more often
RETRY_AFTER_S = 1.0  # of a deadline that is over: another request has one of its own

# Takes the name of the rung that waits and the seconds since the request came. Returns the rung to
# which the request goes on; None: it waits on.
Onward = Callable[[str, float], Awaitable[Rung | None]]


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A request for a task, with the rungs that may answer it, the best first: at least one."""

    task: str
    request_id: str
    ladder: Ladder
    # Makes the call of a rung, by its name; raises RequestError
    call_of: Callable[[str], Awaitable[messages.InferenceCall]]
    wants_progress: bool
    onward: Onward | None = None  # None: the request has no budget, so it waits for any rung

    @property
    def served(self) -> str:
        """The rung that is asked first."""
        return self.ladder.rungs[0].name


async def climb(call: TaskCall, run: Callable[[messages.InferenceCall], Parts]) -> Parts:
    """Yields the response of the first rung that answers, with its name in a header. Where all fail
    the error of the last one is the response. A rung that was left because it would wait too long
    is asked again where all others fail. Raises RequestError; DeadlineUnmet where earlier rungs
    left nothing of the deadline."""
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
        if call.wants_progress:  # the progress of this rung says nothing of the next
            yield messages.STARTING


class _NextRung(Exception):
    """The request goes on to another rung."""

    def __init__(self, to: Rung) -> None:
        super().__init__(to)
        self.to = to


async def _watched(
    parts: Parts, onward: Onward | None, rung: Rung, ahead: set[str], began_s: float
) -> Parts:
    """Yields the parts of a rung. Raises _NextRung when a rung of `ahead` would answer sooner and
    nothing but progress has come; the parts are then closed, which withdraws the call. Raises
    RequestError."""
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
    """Whether a part is a refusal of PASSES that came as a whole response, as replicas send it."""
    return isinstance(part, messages.FullResponse) and part.head.status in PASSES


def _signed(part: messages.Part, served: str) -> messages.Part:
    """Returns a part with the name of the rung in the head. The head of a remote's answer has the
    model's name at the remote already, and keeps it."""
    match part:
        case messages.ResponseHead():
            return replace(part, headers={SERVED_BY: served} | part.headers)
        case messages.FullResponse():
            head = replace(part.head, headers={SERVED_BY: served} | part.head.headers)
            return replace(part, head=head)
    return part
