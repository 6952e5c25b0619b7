"""Wakes an asleep ticket on the devices where its process lives, or asks for the room it lacks."""

from arbiter.core.eviction import pressure
from arbiter.core.queue.grant_limits import apply_exclusion, apply_quota, asker_priority
from arbiter.core.queue.grants import grant, grant_of
from arbiter.core.queue.outcome import Outcome
from arbiter.core.queue.pass_state import GrantPass, Limits
from arbiter.core.queue.several_devices import make_room_on_each
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Sizes, Ticket
from arbiter.core.state import CoreState, reject_queued
from arbiter.core.tickets import quotas
from arbiter.core.tickets.lendable_devices import unpinned_bytes
from arbiter.errors import GpusLost, NeverFits, QuotaExceeded
from arbiter.units import Bytes


def wake(state: CoreState, pass_: GrantPass, ticket: Ticket, queued: QueueEntry) -> Outcome:
    """Wakes an asleep ticket on the devices where its process lives, or asks for the room it
    lacks."""
    home = list(ticket.home)
    if any(d not in pass_.books or pressure.is_closed_to(state, ticket, d) for d in home):
        return pass_.defer(queued, ())
    priority = asker_priority(state, pass_, queued)
    missing = {d: Bytes(size - ticket.charge(d)) for d, size in ticket.home.items()}
    limits = pass_.limits(state, ticket, Bytes(sum(missing.values())))
    if never := _never_wakes(state, pass_, ticket, limits, missing):
        reject_queued(state, ticket, never)
        return Outcome.REJECTED
    outcome = apply_quota(state, pass_, ticket, limits, priority, home)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    if pass_.reserved_devices & ticket.home.keys():
        return pass_.defer(queued, home)
    outcome = apply_exclusion(state, pass_, ticket, queued, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    if all(limits.fits(d, size) for d, size in missing.items()):
        ticket.count_wake()
        return grant(state, pass_, ticket, queued, dict(ticket.home))
    make_room_on_each(state, pass_, ticket, missing, priority)
    return pass_.defer(queued, home)


def _never_wakes(
    state: CoreState, pass_: GrantPass, ticket: Ticket, limits: Limits, missing: Sizes
) -> NeverFits | QuotaExceeded | GpusLost | None:
    """Returns the error for an asleep ticket that can never be awake, however long it waits: its
    devices lend less (B6), or its tenant may have less (C10). What it holds asleep is a part of
    what it will hold, but of a pinned ticket that is left out of all limits."""
    whole = missing if ticket.pinned else ticket.home
    for device, size in whole.items():
        if size > (most := unpinned_bytes(pass_.books[device])):
            return NeverFits(ticket.id, size, most)
    most_by_device = limits.most_by_device
    bound = sum(min(size, most_by_device.get(d, size)) for d, size in whole.items())
    return quotas.never_fits(state, ticket.client.tenant, Bytes(sum(whole.values())), bound)


def return_to_service(state: CoreState, ticket: Ticket) -> Outcome:
    """Grants again a ticket that was to be woken, but never went to sleep."""
    state.unqueue(ticket)
    state.decide(grant_of(ticket))
    return Outcome.GRANTED
