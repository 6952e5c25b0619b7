"""InferenceService: runs a call on the capability that serves its model, and knows no HTTP.

    with service.admitted():                                  # QueueFull beyond front.in_flight
        asked = await parse(path, raw, headers, service.profiles)
        async with aclosing(service.run(await service.call(asked, tenant))) as parts:
            async for part in parts: ...                      # Progress, ResponseHead, bytes

The HTTP routes add keys and the form of the response (deployments.front.inference.relay). Closing
the generator cancels the work down to the engine, so a response is always a stream inside, also
where it is one message. All that breaks is raised as a RequestError.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)

from arbiter.errors import (
    CapabilityFailed,
    DeadlineUnmet,
    QueueFull,
    ReplicaLost,
    RequestError,
    RolePinned,
)
from arbiter.protocol import ray_internals
from deployments import messages
from deployments.config.arbiter_section import TenantConfig
from deployments.config.fields import KvTerm
from deployments.config.front_section import Profile
from deployments.config.model_section import ModelConfig
from deployments.config.schema import Table
from deployments.config.task_section import TaskConfig
from deployments.front.access.keys import Caller, Scope
from deployments.front.inference.kv_use import KeyTerms, allowed_term, keeps_kv, requested_term
from deployments.front.inference.model_names import ModelNames, Target
from deployments.front.inference.request import BadRequest, ParsedRequest, inference_call
from deployments.remotes.offers import RemoteCall
from deployments.remotes.remotes import Remotes
from deployments.replica.background import BackgroundTasks
from deployments.replica.calls.deadline import until_deadline
from deployments.requests import prefixes
from deployments.tasks.climb import TaskCall, climb
from deployments.tasks.fit import served_paths

logger = logging.getLogger("ray.serve")

Parts = messages.Parts
AnyCall = messages.InferenceCall | TaskCall
Send = Callable[[messages.InferenceCall], Any]

# How often a call is sent whose replica or engine died before the client saw anything: once and
# twice again, because replica, engine and arbiter killed together are three causes. A call that a
# pinned model keeps off the node to which it went is sent again, too.
TRIES = 3

OF_ALL = (messages.ACQUIRE, messages.ADAPTERS)  # which every capability answers

# When a full queue may have room again: a short response takes about this long.
RETRY_AFTER_S = 1.0


class InferenceService:
    """Runs the calls of one front. The count of calls in flight and the handles of capabilities
    outlive a change of the table."""

    def __init__(
        self, send_of: Callable[[str], Send] | None = None, remotes: Remotes | None = None
    ) -> None:
        """`send_of`: capability to a function that starts a call and returns its parts."""
        self._send_of = send_of or handle_of
        self.remotes = remotes or Remotes()
        self._sends: dict[str, Send] = {}
        self._background = BackgroundTasks()
        self._in_flight, self._key_terms = 0, KeyTerms()
        self.configure(Table(capabilities={}))

    def configure(self, table: Table) -> None:
        """Takes a table, which holds from the next call on."""
        self._table, self.names = table, ModelNames(table)
        self._paths = {name: served_paths(c) for name, c in table.capabilities.items()}
        self.remotes.configure(table.remotes)

    def take_tasks(self, tasks: Mapping[str, TaskConfig]) -> None:
        """Replaces all tasks, from the next call on; adapters and names stay as read."""
        self._table = self._table.model_copy(update={"tasks": dict(tasks)})

    @property
    def table(self) -> Table:
        return self._table

    @property
    def profiles(self) -> Mapping[str, Profile]:
        return self._table.front.profiles

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts one call in flight, within the bound; entered before the body is awaited, so that
        a burst meets the bound as well. Raises QueueFull."""
        bound = self._table.front.in_flight
        if self._in_flight >= bound:
            raise QueueFull("the front", self._in_flight, bound, RETRY_AFTER_S)
        with self.counted():
            yield

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one call in flight, whatever the bound: the rest of a stream that was admitted."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    async def call(
        self,
        request: ParsedRequest,
        tenant: str,
        scopes: frozenset[Scope] = frozenset(),
        *,
        model: str = "",
    ) -> messages.InferenceCall:
        """Finds what the name of the request's model means for this tenant, and makes the call for
        it. `scopes`: of the caller's key. `model`: a name to use in place of the request's, as for
        a rung of a task.

        Raises UnknownModel, AdapterAmbiguous, AdapterInvalid, AdaptersAway; NotServedHere where the
        model's capability serves other paths; BadRequest where the request names no
        model, unless exactly one serves the path; for a remote model what Remotes.call raises."""
        name = model or request.model or self._only_model(request.path)
        if self.remotes.has(name):
            return self.remotes.call(request, name, Caller(tenant, scopes))
        table, paths = (
            self._table,
            self._paths,
        )  # of these names, also where new ones come meanwhile
        target = await self.names.find(name, tenant)
        capability = table.capabilities[target.capability]
        path = prefixes.served_path(request.path)
        served = paths[target.capability]
        if served and path not in (*served, *OF_ALL):  # its replica would start to say the same
            raise messages.NotServedHere(target.model, path, tuple(sorted(served)))
        config = capability.models[target.model]
        keeps = keeps_kv(capability, config)
        term = self._kv_term(request, target, config, tenant) if keeps else None
        return inference_call(request, target, config, tenant, term=term)

    def _only_model(self, path: str) -> str:
        """The only model that serves `path`, for a request that names none, as requests of TEI's
        clients do. Raises BadRequest where none or several serve it."""
        names = sorted(
            model
            for name, capability in self._table.capabilities.items()
            if path in self._paths[name]
            for model in capability.models
        )
        if len(names) != 1:
            which = f"name one of {', '.join(names)}" if names else f"no model here serves {path}"
            raise BadRequest(f"`model`: {which}", "model")
        return names[0]

    def _kv_term(
        self, request: ParsedRequest, target: Target, model: ModelConfig, tenant: str
    ) -> KvTerm:
        requested = requested_term(request.checked)
        requested = self._key_terms.resolve(tenant, target.served, request.key, requested)
        limits = self._table.arbiter.tenants.get(tenant, TenantConfig())
        return allowed_term(requested, model.kv_term, limits.longest_kv_term)

    def run(self, call: AnyCall) -> Parts:
        """The response: Progress where the call wants it, then a FullResponse, or a ResponseHead
        and bytes. Raises CapabilityFailed where the model's capability has no application, and the
        generator any RequestError."""
        if isinstance(call, TaskCall):
            return climb(call, self.run)
        if isinstance(call, RemoteCall):
            logger.info("request %s: %s leaves for %s", call.request_id, call.path, call.remote)
            return self.remotes.run(call)
        capability = self._table.homes.get(call.model, "")
        logger.info("request %s: %s %s -> %s", call.request_id, call.path, call.served, capability)
        if capability not in self._sends:
            try:
                self._sends[capability] = self._send_of(capability)
            except (KeyError, RayServeException) as error:
                raise CapabilityFailed(call.model, "it has no application") from error
        return answer(call, self._sends[capability])

    async def begin(self, call: AnyCall, within_s: float) -> messages.FullResponse | None:
        """Makes a call that a replica answers at once, and returns the answer. None: it was not
        there within `within_s` seconds, because Serve starts the replica first; the call goes on,
        in flight. Raises RequestError."""
        answered: asyncio.Future[messages.FullResponse] = asyncio.get_running_loop().create_future()
        self._background.begin(self._run_whole(call, answered))
        await asyncio.wait({answered}, timeout=within_s)
        return answered.result() if answered.done() else None

    async def _run_whole(
        self, call: AnyCall, answered: asyncio.Future[messages.FullResponse]
    ) -> None:
        try:
            with self.counted():
                async with aclosing(self.run(call)) as parts:
                    part = await anext(parts)
            assert isinstance(part, messages.FullResponse), "no stream, and no progress"
            answered.set_result(part)
        except RequestError as error:
            answered.set_exception(error)
            answered.exception()  # seen, should the client have its answer already
            logger.warning("request %s: %s", call.request_id, error)


def handle_of(capability: str) -> Send:
    """The capability's deployment. Raises RayServeException where there is no such application."""
    handle = serve.get_deployment_handle(capability, app_name=capability).options(stream=True)
    ray_internals.quiet_when_idle(handle)
    send: Send = handle.handle.remote
    return send


async def answer(call: messages.InferenceCall, send: Send) -> Parts:
    """Sends a call, TRIES times at most, and yields the parts of the first try that gives a
    response; once it has begun there is no other try. A later try has what the earlier ones left of
    the deadline, and is told as STARTING. Raises RequestError."""
    began_s = time.monotonic()
    for number in range(1, TRIES + 1):
        has_begun = False
        try:
            async with aclosing(_parts_of(call, send)) as parts:
                async for part in parts:
                    has_begun = has_begun or not isinstance(part, messages.Progress)
                    yield part
            return
        except RequestError as error:
            retry = None if has_begun or number == TRIES else _retry_of(call, error)
            if retry is None:
                raise
            call = retry
        if call.deadline_s is not None:
            now_s = time.monotonic()
            left_s = call.deadline_s - (now_s - began_s)
            if left_s <= 0:
                raise DeadlineUnmet(call.model, call.deadline_s, RETRY_AFTER_S)
            call, began_s = replace(call, deadline_s=left_s), now_s
        if call.wants_progress:  # what the lost replica said last holds no more
            yield messages.STARTING


def _retry_of(call: messages.InferenceCall, error: RequestError) -> messages.InferenceCall | None:
    """The call that may succeed where this one failed; None: there is none. After a refusal for a
    pinned model the router looks on other nodes, which may have the place."""
    if isinstance(error, RolePinned) and error.node not in call.refused_nodes:
        return replace(call, refused_nodes=(*call.refused_nodes, error.node))
    return call if messages.is_transient(error) else None


def _parts_of(call: messages.InferenceCall, send: Send) -> Parts:
    """Sends a call once. The parts raise RequestError."""
    if call.deadline_s is None:
        return _translated(send(call), call)
    due = replace(call, due_s=time.monotonic() + call.deadline_s)
    return _taken_in_time(_translated(send(due), due), due)


async def _taken_in_time(parts: Parts, call: messages.InferenceCall) -> Parts:
    """Yields the parts of a call with a deadline. Raises DeadlineUnmet where none has come by then:
    Serve has no replica with room for the call, which would say TAKEN at once and keep the deadline
    itself. Raises RequestError."""
    async with aclosing(parts):
        first = await until_deadline(call, time.monotonic(), anext(parts, None))
        if first is not None and (call.wants_progress or first != messages.TAKEN):
            yield first
        async for part in parts:
            yield part


async def _translated(response: Any, call: messages.InferenceCall) -> Parts:
    """Cancels the work behind the response unless all of it was taken. Raises RequestError."""
    ended = False
    try:
        with _CallErrors(call):
            async for part in response:
                ended = isinstance(part, messages.FullResponse)  # nothing follows
                yield part
        ended = True
    except RequestError:
        ended = True
        raise
    finally:
        if not ended:
            response.cancel()


class _CallErrors(AbstractContextManager["_CallErrors", None]):
    """Turns errors of a call into RequestErrors, between Serve and this package. A call may fail
    with an error of Serve, of Ray, of gRPC and, through gRPC, with whatever the replica raised."""

    def __init__(self, call: messages.InferenceCall) -> None:
        self._call = call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Ray makes a class of its own of task error and cause: that, too, is unwrapped
        if isinstance(error, RayTaskError) or (
            isinstance(error, Exception) and not isinstance(error, RequestError)
        ):
            raise translated_error(error, self._call) from error


def translated_error(error: Exception, call: messages.InferenceCall) -> RequestError:
    """The error as the client gets it."""
    match error:
        case BackPressureError(args=(int(queued), int(bound), *_)):
            return QueueFull(call.model, queued, bound, RETRY_AFTER_S)
        case DeploymentUnavailableError():
            return CapabilityFailed(call.model, "its deployment failed")
        case RayActorError() | AioRpcError():
            return ReplicaLost(call.model)
        case RayTaskError(cause=RequestError() as cause):
            return cause
    logger.error("request %s: %r", call.request_id, error)
    return CapabilityFailed(call.model, type(error).__name__)
