"""A target and its drafter in one engine (SPEC A13): two tickets of one gang, granted all or none.

The drafter proposes tokens, the target checks several in one step; what is answered is the
target's. Both are loaded by one process, so the drafter's ticket lives in the target's: this
holder asks for it and gives account of it, the rest is the arbiter's (arbiter.rules.lodgers).
"""

from dataclasses import replace

from arbiter.client import HolderClient
from arbiter.events import HeldTicket, Requested
from arbiter.units import HolderId
from arbiter.wire import Granted
from deployments.slot import Slot, new_ticket


async def acquire(client: HolderClient, slot: Slot, holder: HolderId, capability: str) -> Granted:
    """The grant of the model's own ticket, with its drafter's if it has one. Raises
    RequestError."""
    asked = slot.asks(holder, capability)
    drafter = slot.plan.drafter
    if drafter is None:
        return await client.acquire(asked)
    slot.lodger, slot.lodger_devices = new_ticket(drafter.model), ()
    lodges = _asks(slot, asked)
    granted, lodged = await client.acquire_all((asked, lodges))
    slot.lodger_devices = lodged.devices
    return granted


def _asks(slot: Slot, asked: Requested) -> Requested:
    """What a drafter's weights and work take is told, not learned of other engines: it has no
    process whose overhead would be in it."""
    drafter = slot.plan.drafter
    assert drafter is not None and slot.lodger is not None
    return replace(
        asked, ticket=slot.lodger, model=drafter.model, need=drafter.need, need_is_explicit=True,
        settings_key=drafter.settings_key, lives_in=asked.ticket,
    )  # fmt: skip


def account(slot: Slot) -> tuple[HeldTicket, ...]:
    """What this holder says of the slot with each heartbeat."""
    own = slot.account()
    drafter = slot.plan.drafter
    if drafter is None or slot.lodger is None:
        return (own,)
    lodges = replace(
        own, ticket=slot.lodger, model=drafter.model, need=drafter.need,
        settings_key=drafter.settings_key, devices=slot.lodger_devices, uses_count=0,
        lives_in=own.ticket,
    )  # fmt: skip
    return own, lodges
