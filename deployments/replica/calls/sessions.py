"""Sessions that clients open by POST /v1/prewarm: the model is brought in with the least priority,
and its engine warms what the session's chats begin with (G1)."""

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core.types import Client, Priority
from arbiter.errors import QueueFull, RequestError
from deployments import messages
from deployments.replica.background import BackgroundTasks
from deployments.replica.calls.deadline import until_deadline
from deployments.replica.residency_api import ResidencyApi
from deployments.replica.use import Use
from deployments.requests import prefixes

OPENING_MOST = 64  # sessions of a replica that wait for their model, each a task and its body
# A session whose model and adapter are not there by then has begun without them.
OPEN_S = 60.0
RETRY_AFTER_S = 5.0

Prepare = Callable[[messages.InferenceCall, Use], Awaitable[None]]


class Sessions:
    """One per replica. A pre-warm asks for the model as its client's own use, of priority `batch`:
    it waits behind every other request, and no more urgent model leaves for it."""

    def __init__(self, residency: ResidencyApi, prepare: Prepare) -> None:
        self._residency, self._prepare = residency, prepare
        self._opening = BackgroundTasks()

    def open(self, call: messages.InferenceCall) -> messages.FullResponse:
        """Answers at once; the event `prewarm` tells what came of it."""
        waiting = len(self._opening.running)
        if waiting >= OPENING_MOST:
            error = QueueFull(call.model, waiting, OPENING_MOST, RETRY_AFTER_S)
            return messages.FullResponse(*messages.refusal(error))
        held = self._residency.models.get(call.model)
        state = held.state.value if held else "cold"
        self._opening.begin(self._open(call))
        accepted = prefixes.accepted(call.request_id, call.served or call.model, state)
        head = messages.ResponseHead(202, {"content-type": "application/json"})
        return messages.FullResponse(head, json.dumps(accepted).encode())

    async def _open(self, call: messages.InferenceCall) -> None:
        began_s = time.monotonic()
        call = replace(call, deadline_s=call.deadline_s or OPEN_S)
        use = Use(
            self._residency,
            call.model,
            call.deadline_s,
            Priority.BATCH,
            call.request_id,
            Client(call.tenant, call.client_id),
        )
        try:
            async with use:
                await until_deadline(call, began_s, self._prepare(call, use))
                if call.stay_warm_s:
                    use.stay_warm(call.stay_warm_s)
                use.warm_for_session(call.stable, call.body, call.tenant)
        except RequestError as error:
            self._tell_failure(call, error)

    def _tell_failure(self, call: messages.InferenceCall, error: RequestError) -> None:
        name = call.stable.key if call.stable else prefixes.DECLARED
        event = ev.Prewarmed(self._residency.holder, None, call.model, name, "session", str(error))
        self._residency.client().tell(event)

    async def close(self) -> None:
        for task in list(self._opening.running):
            task.cancel()
        await self._opening.done()
