"""A target and its drafter in one engine (A13): two tickets of one gang, granted all or none.

The drafter proposes tokens, the target checks several in one step; what is answered is the
target's. Both are loaded by one process, so the drafter's ticket lives in the target's: this
holder asks for it and gives account of it, the rest is the arbiter's (arbiter.rules.companions).
"""

import asyncio
from dataclasses import replace

from arbiter.client import gang_request
from arbiter.client.holder import HolderClient
from arbiter.core.events import HeldTicket, Requested, Withdrawn
from arbiter.errors import RequestError
from arbiter.protocol.messages import Granted
from arbiter.units import HolderId
from deployments.replica.held_model import HeldModel


async def acquire(
    client: HolderClient, slot: HeldModel, holder: HolderId, capability: str
) -> Granted:
    """The grant of the model's own ticket, with those that it needs beside it: of its gang, or its
    drafter's. Raises RequestError."""
    asked, gang = asks(slot, holder, capability), slot.gang
    if len(asked) == 1 and gang is None:
        return await client.acquire(asked[0])
    try:
        if gang is not None:
            return await gang_request.acquire(client, asked[0], gang)
        granted, lodged = await client.acquire_all(asked)
    except (RequestError, asyncio.CancelledError):
        client.tell(Withdrawn(slot.ticket))  # if it was granted, and another's answer had to come
        raise
    slot.lodger_devices = lodged.devices
    return granted


def asks(slot: HeldModel, holder: HolderId, capability: str) -> tuple[Requested, ...]:
    """What the arbiter is asked for, whichever word of it comes first: the model, and with it its
    drafter. What a drafter's weights and work take is told, not learned of other engines: it has
    no process whose overhead would be in it."""
    asked, drafter = slot.asks(holder, capability), slot.plan.drafter
    if drafter is None or slot.companion is None:
        return (asked,)
    asked = replace(asked, gang=(slot.ticket, slot.companion))
    lodges = replace(
        asked,
        ticket=slot.companion,
        model=drafter.model,
        need=drafter.need,
        need_is_explicit=True,
        settings_key=drafter.settings_key,
        shares_process_with=slot.ticket,
    )
    return asked, lodges


def account(slot: HeldModel) -> tuple[HeldTicket, ...]:
    """What this holder says of the slot with each heartbeat."""
    own = slot.account()
    drafter = slot.plan.drafter
    if drafter is None or slot.companion is None:
        return (own,)
    lodges = replace(
        own,
        ticket=slot.companion,
        model=drafter.model,
        need=drafter.need,
        settings_key=drafter.settings_key,
        devices=slot.lodger_devices,
        uses_count=0,
        shares_process_with=own.ticket,
    )
    return own, lodges
