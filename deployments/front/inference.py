"""One inference request: whose, for which engine, how urgent; then to its capability and back."""

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from arbiter.core.types import Priority
from arbiter.errors import CapabilityFailed, QueueFull, RequestError
from deployments import messages
from deployments.config.schema import Table
from deployments.front.auth import Authenticator
from deployments.front.keys import Caller, Scope
from deployments.front.model_names import ModelNames, Target
from deployments.front.relay import RETRY_AFTER_S, relay
from deployments.front.request import BadRequest, ParsedRequest, call_of, read, refused

logger = logging.getLogger("ray.serve")


class Inference:
    """Of one table; handles outlive it."""

    def __init__(
        self, table: Table, gate: Authenticator, handles: dict[str, DeploymentHandle]
    ) -> None:
        self.names = ModelNames(table)
        self._table, self._gate, self._handles = table, gate, handles
        self._in_flight = 0

    async def serve(self, request: Request) -> Response:
        """Raises Denied. Everything else that goes wrong is a response."""
        caller = self._gate.require(request, Scope.INFER)
        most = self._table.front.in_flight
        if self._in_flight >= most:
            return refused(QueueFull("the front", self._in_flight, most, RETRY_AFTER_S))
        with self._counted():  # before its body is awaited, so that a burst meets the bound as well
            return await self._serve(request, caller)

    async def _serve(self, request: Request, caller: Caller) -> Response:
        try:
            asked = await read(request, self._table.front.profiles)
            if asked.priority is not None and asked.priority < Priority.NORMAL:
                self._gate.require(request, Scope.PRIORITY)
            target = self.names.find(asked.model, caller.tenant)
            call = self._call(asked, target, caller.tenant)
            handle = self._handle(target)
        except BadRequest as error:
            return error.response
        except RequestError as error:
            return refused(error)
        logger.info(
            "request %s: %s %s -> %s", call.request_id, call.path, target.served, target.capability
        )
        return await self._relayed(call, handle)

    async def _relayed(self, call: messages.InferenceCall, handle: DeploymentHandle) -> Response:
        response = await relay(call, handle.handle.remote, self._table.front.progress_s)
        if isinstance(response, StreamingResponse):
            response.body_iterator = self._streamed(response.body_iterator)
        return response  # Serve's proxy adds x-request-id

    async def _streamed(self, body: Any) -> AsyncGenerator[Any, None]:
        with self._counted():
            async with aclosing(body):
                async for part in body:
                    yield part

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def _call(self, asked: ParsedRequest, target: Target, tenant: str) -> messages.InferenceCall:
        model = self._table.capabilities[target.capability].models[target.model]
        return call_of(asked, target, model, tenant)

    def _handle(self, target: Target) -> DeploymentHandle:
        """Raises CapabilityFailed."""
        name = target.capability
        if name not in self._handles:
            try:
                handle = serve.get_deployment_handle(name, app_name=name)
            except (KeyError, RayServeException) as error:
                raise CapabilityFailed(target.model, "it has no application") from error
            self._handles[name] = handle.options(stream=True)
        return self._handles[name]
