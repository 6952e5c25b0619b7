"""Capability: a Serve deployment that makes the model of a call resident and passes the engine's
response on. A subclass may say which paths it serves and what a call needs besides its model.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, replace
from typing import Any, ClassVar

from ray import serve

from arbiter.core.types import Client
from arbiter.errors import RequestError, RolePinned, TicketClosed
from arbiter.protocol.ray_internals import own_node
from deployments import messages
from deployments.replica.calls import acquired
from deployments.replica.calls.deadline import left_s, until_deadline
from deployments.replica.calls.sessions import Sessions
from deployments.replica.calls.stream_batching import SLOW_S, StreamBatching
from deployments.replica.calls.wait_progress import is_at_hand, with_progress
from deployments.replica.held_model import HolderState
from deployments.replica.lifecycle import resize
from deployments.replica.residency import Residency
from deployments.replica.use import Use
from deployments.requests import prefixes
from deployments.routing.rank import AdapterSlots, ModelPresence

logger = logging.getLogger("ray.serve")

# Headers of an answer whose model had to be brought: seconds from the replica's first sight of the
# request until the model served, and what the load or wake alone was predicted to take.
WAITED, ESTIMATE = "x-arbiter-waited-s", "x-arbiter-estimate-s"
WAIT_TOLD_S = 0.05  # a resident model is at hand within a millisecond

# Growths for one request. A model may be revoked as it is about to grow, which is a race of
# milliseconds; a second time means that the device is too small for its users.
GROWTHS = 2

# What a router may count on; a model that is on its way out is as good as gone.
PRESENCE = {
    HolderState.QUEUED: ModelPresence.COMING,
    HolderState.LOADING: ModelPresence.COMING,
    HolderState.RESIDENT: ModelPresence.RESIDENT,
    HolderState.ASLEEP: ModelPresence.ASLEEP,
}


class Capability:
    """One Serve replica. Its constructor takes no ticket and loads nothing: three failures there
    before the first success would end the deployment for good (Serve's rule)."""

    # Served HTTP paths; empty: those that the table lists for it, which the front checks
    paths: ClassVar[frozenset[str]] = frozenset()
    _node = ""

    def __init__(self, capability: str) -> None:
        self._capability, self._node = capability, str(own_node())
        replica = serve.get_replica_context().replica_id.unique_id
        self._stream_batching = StreamBatching()
        self.adapter_slots = AdapterSlots()
        self._residency = Residency.start(capability, holder=f"{capability}#{replica}")
        self._sessions = Sessions(self._residency, self.prepare)

    async def handle(self, call: messages.InferenceCall) -> AsyncIterator[messages.Part]:
        """Serves one call of the front: yields TAKEN where the call has a deadline, progress where
        it wants it, then a FullResponse, or a ResponseHead and bytes. Closing this generator
        cancels the work down to the engine.

        A refusal is a response; in an event stream that has begun it is the last event. Two kinds
        of errors are raised instead: EngineLost and RolePinned before the response has begun, so
        that the front tries again; and any RequestError in a stream of another kind that has begun,
        so that the front breaks the connection."""
        if (answer := await self._answer_without_model(call)) is not None:
            yield answer
            return
        if call.deadline_s is not None:
            yield messages.TAKEN
        begun: messages.ResponseHead | None = None
        try:
            async with aclosing(self._with_growth(call)) as parts:
                async for part in parts:
                    if isinstance(part, messages.ResponseHead):
                        if not part.is_stream:
                            whole = messages.FullResponse(part, await _rest(parts))
                            self.note_answer(call, whole)
                            yield whole
                            return
                        begun = part
                    yield part
        except RequestError as error:
            logger.warning("request %s: %s", call.request_id, error)
            yield _last_part(begun, error)

    async def _answer_without_model(
        self, call: messages.InferenceCall
    ) -> messages.FullResponse | None:
        """Returns the response to a call that waits for no model; None: the call needs a model."""
        if call.path == messages.ACQUIRE:
            return None
        if self.paths and prefixes.served_path(call.path) not in self.paths:
            return _wrong_route(call, self.paths)
        return self._sessions.open(call) if call.path == prefixes.PATH else None

    async def _with_growth(
        self, call: messages.InferenceCall
    ) -> AsyncGenerator[messages.Progress | messages.ResponseHead | bytes, None]:
        """Yields the engine's answer. Where the engine refuses for want of memory that its
        configuration lets it grow to, the model grows and the engine is asked again, GROWTHS times
        at most (A14). Raises RequestError."""
        began_s = time.monotonic()
        for growths_left in range(GROWTHS, -1, -1):
            async with aclosing(self._with_model(call, began_s)) as parts:
                async for part in parts:
                    if growths_left and resize.asks_for_more(part):
                        break
                    yield resize.unmarked(part)
                else:
                    return
            if call.wants_progress:  # it may have heard that the engine runs, which is restarted
                yield messages.LOADING
            try:
                await self._grown(call, began_s)
            except TicketClosed:  # the model was unloaded just then, and is loaded again
                if growths_left == 1:
                    raise

    async def _grown(self, call: messages.InferenceCall, began_s: float) -> None:
        """Gives the call's model what it may grow to. Raises DeadlineUnmet, and what
        `Residency.grow` raises."""
        await until_deadline(call, began_s, self._residency.grow(call.model))

    async def _with_model(
        self, call: messages.InferenceCall, began_s: float
    ) -> AsyncGenerator[messages.Progress | messages.ResponseHead | bytes, None]:
        """Makes the model resident, with this call in flight, and passes its engine's answer on;
        before it, progress where the call wants it. Raises RequestError."""
        model = await until_deadline(call, began_s, self.served_by(call))
        use = self._residency.use(
            model,
            deadline_s=left_s(call, began_s),
            priority=call.priority,
            request=call.request_id,
            client=Client(call.tenant, call.client_id),
        )
        async with AsyncExitStack() as stack:
            if call.wants_progress and not is_at_hand(self._residency.models, model):
                steps = with_progress(use, self._residency.models, model)
                async for step in await stack.enter_async_context(aclosing(steps)):
                    yield step
            else:
                await use.__aenter__()
            stack.push_async_exit(use)
            async with aclosing(self._prepared(call, use, began_s)) as last_steps:
                async for step in last_steps:
                    yield step
            if call.stable is not None:
                use.note_stable_prefix(call.stable, call.body, call.tenant)
            if call.stay_warm_s:
                use.stay_warm(call.stay_warm_s)
            waited_s = time.monotonic() - began_s
            logger.info(
                "request %s: %s under %s, waited %.2f s",
                call.request_id,
                model,
                use.ticket,
                waited_s,
            )
            async with aclosing(self._from_engine(call, use, began_s)) as parts:
                async for part in parts:
                    yield _with_wait(part, waited_s, use) if waited_s > WAIT_TOLD_S else part

    async def _prepared(
        self, call: messages.InferenceCall, use: Use, began_s: float
    ) -> AsyncGenerator[messages.Progress, None]:
        """Brings what the call needs besides its model, and says so where that takes long. Raises
        RequestError."""
        work = asyncio.ensure_future(until_deadline(call, began_s, self.prepare(call, use)))
        try:
            if call.wants_progress and not (await asyncio.wait({work}, timeout=SLOW_S))[0]:
                yield messages.LOADING
            await work
        finally:
            work.cancel()
            await asyncio.wait({work})

    def _from_engine(
        self, call: messages.InferenceCall, use: Use, began_s: float
    ) -> AsyncGenerator[messages.Progress | messages.ResponseHead | bytes, None]:
        if call.path == messages.ACQUIRE:
            return acquired.events(use, call.body)
        headers = _engine_headers(call, began_s)
        if call.reader_node and call.reader_node == self._node:
            headers[messages.SIDE_STREAM] = secrets.token_hex(16)
        stream = use.stream("POST", call.path, headers, call.body)
        return self._stream_batching.follow(stream, wants_progress=call.wants_progress)

    async def served_by(self, call: messages.InferenceCall) -> str:
        """Returns the name of the held model that answers the call; another than the call's only
        where that is resident."""
        return call.model

    async def prepare(self, call: messages.InferenceCall, use: Use) -> None:
        """Brings what a call needs on this node besides its model. Raises RequestError."""

    def note_answer(self, call: messages.InferenceCall, response: messages.FullResponse) -> None:
        """Sees each answer of the engine that is no stream."""

    def record_routing_stats(self) -> dict[str, Any]:
        """Returns what this replica has, for deployments.routing; Serve asks each second and passes
        changes on."""
        models = self._residency.models
        presences = {
            name: PRESENCE.get(held.state, ModelPresence.COLD) for name, held in models.items()
        }
        return {
            "models": {name: int(p) for name, p in presences.items() if p},
            "adapters": self.adapter_slots.names({held.ticket for held in models.values()}),
            "kept": {name: asdict(held.kept_kv) for name, held in models.items() if held.kept_kv},
        }

    async def check_health(self) -> None:
        """Raises when this replica could load nothing any more; Serve then replaces it."""
        self._residency.client().check()

    async def __del__(self) -> None:
        await self._sessions.close()
        await self._residency.close()


def _engine_headers(call: messages.InferenceCall, began_s: float) -> dict[str, str]:
    """Returns the headers for the engine, whose own queue goes by priority and deadline too."""
    headers = call.headers | {messages.PRIORITY_HEADER: str(int(call.priority))}
    if (remaining_s := left_s(call, began_s)) is not None:
        headers[messages.DEADLINE_HEADER] = f"{remaining_s:.3f}"
    return headers


def _last_part(
    begun: messages.ResponseHead | None, error: RequestError
) -> messages.FullResponse | bytes:
    """Returns what ends a response with an error, by the head that it has begun with. Raises the
    error itself where `handle` says so."""
    if begun is not None and begun.is_event_stream:
        return messages.stream_error(error)
    if begun is not None or messages.is_transient(error) or isinstance(error, RolePinned):
        raise error
    return messages.FullResponse(*messages.refusal(error))


async def _rest(parts: AsyncIterator[messages.Progress | messages.ResponseHead | bytes]) -> bytes:
    return b"".join([part async for part in parts if isinstance(part, bytes)])


def _with_wait(
    part: messages.Progress | messages.ResponseHead | bytes, waited_s: float, use: Use
) -> messages.Progress | messages.ResponseHead | bytes:
    """Adds what the request waited for: a client without progress comments learns it here."""
    if not isinstance(part, messages.ResponseHead):
        return part
    headers = {WAITED: f"{waited_s:.2f}"}
    if use.predicted_s:
        headers[ESTIMATE] = f"{use.predicted_s:.2f}"
    return replace(part, headers=part.headers | headers)


def _wrong_route(call: messages.InferenceCall, paths: frozenset[str]) -> messages.FullResponse:
    """Returns a 404, as OpenAI answers a chat request for a model that is no chat model."""
    error = messages.NotServedHere(call.model, call.path, tuple(sorted(paths)))
    return messages.FullResponse(*messages.refusal(error))
