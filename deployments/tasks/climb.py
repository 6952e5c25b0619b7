"""Down a ladder: the answer of the first rung that gives one.

A rung that fails with something that passes, before the client has seen any of its answer, makes
way for the next. After that nothing does: two halves of two answers are no answer.
"""

import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from arbiter.errors import RequestError
from deployments import messages
from deployments.messages import Parts
from deployments.remotes.offers import SERVED_BY
from deployments.tasks.ladder import Ladder

logger = logging.getLogger("ray.serve")

# Another model may do what this one could not: it is full, broken, cooling down, lost its engine,
# does not fit, or misses the deadline. A refusal of the request itself would be the same below, but
# for one of a remote, whose rules are not ours.
PASSES = frozenset({429, 500, 502, 503, 504, 507})


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A request for a task, with the rungs that may answer it, the best first: at least one."""

    task: str
    request_id: str
    ladder: Ladder
    call_of: Callable[[str], messages.InferenceCall]  # by a rung's name; raises RequestError
    wants_progress: bool

    @property
    def served(self) -> str:
        """The rung that is asked first."""
        return self.ladder.rungs[0].name


async def climb(call: TaskCall, run: Callable[[messages.InferenceCall], Parts]) -> Parts:
    """The response of one rung, its name in a header. Of several that fail the last one's error is
    the response. Raises RequestError."""
    began_s = time.monotonic()
    for rung in call.ladder.rungs:
        is_last = rung is call.ladder.rungs[-1]
        has_begun = False
        try:
            one = _later(call.call_of(rung.name), time.monotonic() - began_s)
            one = replace(one, wants_progress=call.wants_progress)
            logger.info("request %s: task %s -> %s", call.request_id, call.task, rung.name)
            async with aclosing(run(one)) as parts:
                async for part in parts:
                    if not (has_begun or is_last) and _is_passing(part):
                        break
                    has_begun = has_begun or not isinstance(part, messages.Progress)
                    yield _signed(part, one.served or one.model)
                else:
                    return
        except RequestError as error:
            passes = error.status_code in PASSES or rung.candidate.is_remote
            if has_begun or is_last or not passes:
                raise
            logger.warning("request %s: %s: %s", call.request_id, rung.name, error)


def _later(call: messages.InferenceCall, waited_s: float) -> messages.InferenceCall:
    """With what the rungs before it left of the deadline."""
    if call.deadline_s is None:
        return call
    return replace(call, deadline_s=call.deadline_s - waited_s)


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
