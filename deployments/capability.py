"""What every capability deployment is: a call comes in, its model is made resident, the engine's
answer goes out. Subclasses say which paths they serve.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import ClassVar

from ray import serve

from arbiter.errors import RequestError
from deployments import wire
from deployments.pace import Pace
from deployments.residency import Residency

logger = logging.getLogger("ray.serve")


class Capability:
    """One Serve replica. Its constructor takes no ticket and loads nothing: three failures there
    before the first success would end the deployment for good (Serve's rule)."""

    paths: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, capability: str) -> None:
        self._capability = capability
        replica = serve.get_replica_context().replica_id.unique_id
        self._pace = Pace()
        self._residency = Residency.start(capability, holder=f"{capability}#{replica}")

    async def handle(self, call: wire.Call) -> AsyncIterator[wire.Head | bytes]:
        """Head, then bytes. Closing this generator cancels the work down to the engine. A refusal
        is an answer; within a stream of events it is the last event. Raises EngineLost where the
        client has seen nothing yet, so that the front tries again."""
        if call.path not in self.paths:
            head, body = _wrong_route(call, self.paths)
            yield head
            yield body
            return
        sent: wire.Head | None = None
        try:
            use = self._residency.use(
                call.model,
                deadline_s=call.deadline_s,
                priority=call.priority,
                request=call.request_id,
            )
            async with use as engine:
                answer = engine.stream("POST", call.path, call.headers, call.body)
                async with aclosing(self._pace.follow(answer)) as parts:
                    async for part in parts:
                        if isinstance(part, wire.Head):
                            sent = part
                        yield part
        except RequestError as error:
            logger.warning("request %s: %s", call.request_id, error)
            if sent is None and not wire.is_transient(error):
                head, body = wire.refusal(error)
                yield head
                yield body
            elif sent is not None and sent.is_stream:
                yield wire.stream_error(error)
            else:
                raise

    async def check_health(self) -> None:
        """Called by Serve, which replaces this replica when it raises: it could load nothing."""
        self._residency.client().check()

    async def __del__(self) -> None:
        await self._residency.close()


def _wrong_route(call: wire.Call, paths: frozenset[str]) -> tuple[wire.Head, bytes]:
    """404, as OpenAI answers a chat request for a model that is none."""
    message = f"{call.model} is served at {', '.join(sorted(paths))}, not at {call.path}"
    body = wire.error_body(
        message, kind=wire.kind_of(404), code="model_not_supported", param="model"
    )
    return wire.Head(404, {"content-type": "application/json"}), body
