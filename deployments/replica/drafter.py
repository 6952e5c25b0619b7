"""A target and its drafter in one engine (A13): two tickets of one gang, granted all or none.

The drafter proposes tokens and the target checks several in one step; the answer is the target's.
One process loads both, so the drafter's ticket is a companion in the target's: this holder requests
it and accounts for it, the rest is the arbiter's (arbiter.core.tickets.companions).
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
    client: HolderClient, held: HeldModel, holder: HolderId, capability: str
) -> Granted:
    """The grant of the model's own ticket, once the tickets beside it are granted too: those of its
    gang, or its drafter's. Raises RequestError."""
    asked, gang, companion = requests(held, holder, capability), held.gang, held.companion
    if gang is None and companion is None:
        return await client.acquire(asked[0])
    try:
        if gang is not None:
            return await gang_request.acquire(client, asked[0], gang)
        granted, beside = await client.acquire_all(asked)
    except (RequestError, asyncio.CancelledError):
        client.tell(Withdrawn(held.ticket))  # its own grant may be here, and another's not
        raise
    assert companion is not None
    companion.devices = beside.devices
    return granted


def requests(held: HeldModel, holder: HolderId, capability: str) -> tuple[Requested, ...]:
    """What the arbiter is asked for, whichever of the messages reaches it first: the model, and
    with it its drafter. The drafter's bytes are told, not learned from other engines, because it
    has no process of its own whose overhead would be in them."""
    asked, drafter, companion = (
        held.request(holder, capability),
        held.plan.drafter,
        held.companion,
    )
    if drafter is None or companion is None:
        return (asked,)
    asked = replace(asked, gang=(held.ticket, companion.ticket))
    beside = replace(
        asked,
        ticket=companion.ticket,
        model=drafter.model,
        need=drafter.need,
        need_is_explicit=True,
        settings_key=drafter.settings_key,
        shares_process_with=held.ticket,
    )
    return asked, beside


def account(held: HeldModel) -> tuple[HeldTicket, ...]:
    """What the heartbeat says of the model and of its drafter."""
    own = held.account()
    drafter, companion = held.plan.drafter, held.companion
    if drafter is None or companion is None:
        return (own,)
    beside = replace(
        own,
        ticket=companion.ticket,
        model=drafter.model,
        need=drafter.need,
        settings_key=drafter.settings_key,
        devices=companion.devices,
        uses_count=0,
        shares_process_with=own.ticket,
    )
    return own, beside
