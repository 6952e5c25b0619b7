"""One use of one model: a counter while it is resident, a wait while it is not."""

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

from arbiter.core.types import ANYBODY, Client, Priority
from arbiter.errors import EngineLost, RequestError, TicketClosed
from arbiter.units import Span, TicketId, in_seconds
from deployments.messages import ResponseHead
from deployments.replica.held_model import HeldModel, HolderState, WarmerApi
from deployments.replica.residency_api import ResidencyApi
from deployments.requests.prefixes import PrefixEnd


def outcome_of(error: BaseException | None) -> str:
    """Returns the word of the event log for how a use ended."""
    if error is None:
        return "answered"
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "left"
    return error.code if isinstance(error, RequestError) else "failed"


class Use:
    """One use of one model, from `async with` to its end; also the handle to its engine."""

    __slots__ = (
        "_began_ns",
        "_client",
        "_deadline_s",
        "_held",
        "_model",
        "_priority",
        "_request",
        "_residency",
        "_serves_ns",
        "_ticket",
    )

    def __init__(
        self,
        residency: ResidencyApi,
        model: str,
        deadline_s: float | None,
        priority: Priority,
        request: str = "",
        client: Client = ANYBODY,
    ) -> None:
        self._residency, self._model, self._deadline_s = residency, model, deadline_s
        self._priority, self._request, self._client = priority, request, client
        self._began_ns = 0
        self._serves_ns: int | None = None  # since when the model serves; None: it does not
        self._held: HeldModel | None = None
        self._ticket = TicketId("")

    async def __aenter__(self) -> "Use":
        self._began_ns = time.monotonic_ns()
        held = self._residency.models.get(self._model)
        is_warm = held is not None and held.state is HolderState.RESIDENT
        # Where the kernel tells of no change of the model's files, the residency looks first.
        if held is not None and is_warm and not held.files.is_unwatched:
            held.begin_request(self._priority, self._client)
        else:
            try:
                held = await self._residency.begin_request(
                    self._model, self._deadline_s, self._priority, self._client
                )
            except (RequestError, asyncio.CancelledError) as error:
                self._tell(None, error)
                raise
        self._held = held
        self._serves_ns = time.monotonic_ns()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release(error)

    def release(self, error: BaseException | None = None) -> None:
        """Ends the use; does nothing if the use has ended or was never entered. `error`: why it
        ended early."""
        held, self._held = self._held, None
        if held is not None:
            self._ticket = held.ticket
            held.end_request()
            self._tell(held.ticket, error)

    def _tell(self, ticket: TicketId | None, error: BaseException | None) -> None:
        """Notes the finished request for the event log; the next heartbeat carries it."""
        now_ns, log = time.monotonic_ns(), self._residency.client().request_log
        ran = None if self._serves_ns is None else Span(now_ns - self._serves_ns)
        took, outcome = Span(now_ns - self._began_ns), outcome_of(error)
        log.note(ticket, self._model, took, outcome, self._request, self._client, ran)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that its engine was started with."""
        assert self._held is not None
        return self._held.plan.config

    @property
    def model(self) -> str:
        return self._model

    @property
    def is_open(self) -> bool:
        """Whether the use has neither been released nor lost its engine."""
        return self._held is not None and self._held.state is not HolderState.CLOSED

    @property
    def ticket(self) -> TicketId:
        return self._held.ticket if self._held else self._ticket

    def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """See EngineLink.stream. Raises TicketClosed after release, EngineLost."""
        if self._held is None:
            raise TicketClosed(self._ticket)
        if self._held.link is None or self._held.state is HolderState.CLOSED:
            raise EngineLost(self._model, self._held.ticket)
        return self._held.link.stream(method, path, headers, body)

    def stay_warm(self, for_s: float) -> None:
        """Keeps the model from counting as idle, for so long from now."""
        assert self._held is not None
        until_ns = time.monotonic_ns() + round(for_s * 1e9)
        requests = self._held.requests
        requests.warm_until_ns = max(requests.warm_until_ns, until_ns)

    def exclude_from_run_times(self) -> None:
        """Keeps this use, which runs no request itself, out of the run times of requests."""
        self._serves_ns = None

    def note_stable_prefix(self, cut: PrefixEnd, chat: bytes, tenant: str) -> None:
        """Notes that a request with this body begins with a stable prefix."""
        if warmer := self._warmer_for(tenant):
            warmer.on_use(cut, chat, tenant)

    def warm_for_session(self, cut: PrefixEnd | None, chat: bytes, tenant: str) -> None:
        """Has a session's prefix warmed once the engine is idle; None: what the configuration
        declares."""
        if warmer := self._warmer_for(tenant):
            warmer.on_session(cut, chat, tenant)

    def _warmer_for(self, tenant: str) -> WarmerApi | None:
        """Returns the model's warmer; None where nothing is warmed, or no more for a tenant that
        was removed meanwhile."""
        if self._held is None or self._residency.was_removed_since(tenant, self._began_ns):
            return None
        return self._held.warmer

    @property
    def predicted_s(self) -> float:
        """Seconds that its last load or wake was predicted to take; 0: nothing was known."""
        return in_seconds(self._held.load.predicted) if self._held else 0.0


async def read_response(
    stream: AsyncGenerator[ResponseHead | bytes, None],
) -> tuple[ResponseHead, bytes]:
    """Returns an engine's answer, read to its end. Raises EngineLost."""
    head, *rest = [part async for part in stream]
    assert isinstance(head, ResponseHead), "an answer begins with its head"
    return head, b"".join(part for part in rest if isinstance(part, bytes))
