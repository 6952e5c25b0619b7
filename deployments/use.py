"""One use of one model: a counter while it is resident, a wait while it is not."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol

from arbiter.errors import EngineLost, TicketClosed
from arbiter.events import Priority
from arbiter.units import TicketId
from deployments.slot import Life, Slot
from deployments.wire import Head


class Slots(Protocol):
    """What a use needs of Residency."""

    slots: dict[str, Slot]

    async def enter(self, model: str, deadline_s: float | None, priority: Priority) -> Slot: ...


class Use:
    """One use of one model, from `async with` to its end; also the handle to its engine."""

    __slots__ = ("_deadline_s", "_model", "_priority", "_residency", "_slot", "_ticket")

    def __init__(
        self, residency: Slots, model: str, deadline_s: float | None, priority: Priority
    ) -> None:
        self._residency, self._model, self._deadline_s = residency, model, deadline_s
        self._priority = priority
        self._slot: Slot | None = None
        self._ticket = TicketId("")

    async def __aenter__(self) -> "Use":
        slot = self._residency.slots.get(self._model)
        if slot is not None and slot.life is Life.RESIDENT:
            slot.enter(self._priority)
        else:
            slot = await self._residency.enter(self._model, self._deadline_s, self._priority)
        self._slot = slot
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._ticket = slot.ticket
            slot.leave()

    @property
    def ticket(self) -> TicketId:
        return self._slot.ticket if self._slot else self._ticket

    def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[Head | bytes, None]:
        """See EngineLink.stream. Raises TicketClosed after release, EngineLost."""
        if self._slot is None:
            raise TicketClosed(self._ticket)
        if self._slot.link is None or self._slot.life is Life.CLOSED:
            raise EngineLost(self._model, self._slot.ticket)
        return self._slot.link.stream(method, path, headers, body)
