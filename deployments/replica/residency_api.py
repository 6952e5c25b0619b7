"""What the steps of a model's life need of the holder that they belong to."""

from collections.abc import Coroutine
from typing import Any, Protocol

from arbiter.client.holder import HolderClient
from arbiter.core.types import Client, Priority
from arbiter.units import HolderId, TicketId
from deployments.config.load_plan import Plans
from deployments.replica.background import BackgroundTasks
from deployments.replica.held_model import HeldModel


class ResidencyApi(Protocol):
    """A Residency, as loading, unloading, resize and use see it."""

    capability: str
    holder: HolderId
    models: dict[str, HeldModel]  # by name; new requests go to these
    tickets: dict[TicketId, HeldModel]  # those that hold bytes
    plans: Plans
    background: BackgroundTasks

    def client(self) -> HolderClient: ...

    async def begin_request(
        self, model: str, deadline_s: float | None, priority: Priority, client: Client
    ) -> HeldModel:
        """Waits until the model serves, and puts the request in flight. Raises RequestError."""

    def begin_work(self, held: HeldModel, work: Coroutine[Any, Any, None]) -> None:
        """Makes this the model's work: there is one at a time, on a task of its own."""

    def was_removed_since(self, tenant: str, began_ns: int) -> bool:
        """Whether a tenant was removed after a request of it came. On the monotonic clock."""

    def tell_caps(self, held: HeldModel) -> None:
        """Has the engine follow caps of tenants that have changed since it was told them."""

    def bring_back_after(
        self, model: str, after_s: float | None, *, is_wanted: bool = False
    ) -> None:
        """Brings a model back that is pinned, or wanted without a request, after so many seconds;
        None: not at all."""
