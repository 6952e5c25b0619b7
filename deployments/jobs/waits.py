"""CallsInFlight: has calls that wait give their places to calls of other models.

A call may wait long in the arbiter's queue, for memory or for the hours of its model. One waiting
call of each model keeps its place, so that the model keeps its place in that queue. Where such
calls hold all places, one of them gives its place away as well.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deployments.jobs import calls
from deployments.jobs.calls import RetryLater
from deployments.messages import Progress


@dataclass(slots=True, eq=False)
class Call:
    """One call in flight."""

    model: str
    bound: asyncio.Timeout
    queued_at_s: float | None = None  # when it joined the arbiter's queue; None: it is not in it
    again_s: float | None = None  # when it may be made again, once it has given its place away

    def note(self, progress: Progress | None) -> None:
        """Notes how far the call's model is; None: the answer has begun. Progress is reported at
        intervals (deployments.replica.calls.wait_progress), so a load that is shorter than one goes
        unreported, and its call still counts as queued."""
        if progress is None or not progress.is_queued:
            self.queued_at_s = None
        elif self.queued_at_s is None:
            self.queued_at_s = time.monotonic()

    @property
    def gives_way(self) -> bool:
        """Whether the call is being ended, so that a call of another model gets its place."""
        return self.bound.when() is not None


class CallsInFlight:
    """The calls of one runner."""

    def __init__(self) -> None:
        self._calls: dict[Call, None] = {}  # in the order in which they began
        # Of models whose last call gave its place away: when a call of theirs may begin again.
        self._until_s: dict[str, float] = {}

    @asynccontextmanager
    async def call(self, model: str) -> AsyncGenerator[Call]:
        """Counts the call that is made within the block as in flight. Raises RetryLater where the
        call had to give its place away."""
        call: Call | None = None
        try:
            async with asyncio.timeout(None) as bound:
                call = Call(model, bound)
                self._calls[call] = None
                try:
                    yield call
                finally:
                    del self._calls[call]
        except TimeoutError:
            if call is None or not call.bound.expired():
                raise
            message = f"{model} waits for memory or for its hours, and calls of other models do not"
            raise RetryLater(call.again_s, message) from None

    def models(self, least_s: float) -> frozenset[str]:
        """Returns the models of which no further call is to begin: a call of theirs has waited for
        `least_s`, or their last one has just given its place away."""
        now_s = time.monotonic()
        self._until_s = {model: s for model, s in self._until_s.items() if s > now_s}
        return frozenset(call.model for call in self._waiting(least_s)) | self._until_s.keys()

    def give_way(self, least_s: float, places: int) -> None:
        """Ends one call that has waited for `least_s`, of the model with most such calls, unless a
        call is being ended already. `places`: how many calls may be in flight."""
        waiting = self._waiting(least_s)
        counts = Counter(call.model for call in waiting)
        last = max(waiting, key=lambda call: counts[call.model], default=None)
        if last is None or any(call.gives_way for call in self._calls):
            return
        if counts[last.model] == 1:
            if len(waiting) < places:
                return
            last.again_s = calls.AGAIN_MOST_S
            self._until_s[last.model] = time.monotonic() + calls.AGAIN_MOST_S
        last.bound.reschedule(asyncio.get_running_loop().time())

    def _waiting(self, least_s: float) -> list[Call]:
        since_s = time.monotonic() - least_s
        return [
            call
            for call in self._calls
            if call.queued_at_s is not None and call.queued_at_s <= since_s and not call.gives_way
        ]
