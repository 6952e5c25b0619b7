"""Loads models again that made room for a load which failed (A12), and remembers what left for
`arbiter free`.

An eviction and the load that it is for are one swap. Until the load has succeeded, its victims are
noted under the asker; if the load fails and is not tried again in time, their holders are asked to
load them.
"""

from arbiter.core.decisions import LoadModel
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import AskedLoad, CoreState, EvictedFor, EvictedForKey
from arbiter.core.types import ModelName
from arbiter.units import HolderId, after


def note_evicted_for(state: CoreState, asker: Ticket, victim: Ticket) -> None:
    """Notes that a victim made room for an asker. A model that was awake and left for
    `arbiter free` returns once that lease is over. The victim may be a lease: then there is no
    model to load again."""
    if victim.lease:
        return
    if asker.frees:
        if victim.state is State.RESIDENT:
            state.freed_for.setdefault(asker.id, {})[victim.model_name] = None
        return
    made_room = state.evicted_for.setdefault((asker.holder, asker.model), EvictedFor())
    made_room.models[(victim.holder, victim.model)] = victim.id


def note_retried(state: CoreState, key: EvictedForKey) -> None:
    """Notes that the holder tries a failed load again, so that its victims stay away for now."""
    if made_room := state.evicted_for.get(key):
        made_room.restore_at = None


def restore_later(state: CoreState, key: EvictedForKey) -> None:
    """Has the victims of a failed load loaded again, unless the holder tries the load again within
    `Timeouts.retry`."""
    if made_room := state.evicted_for.get(key):
        made_room.restore_at = after(state.now, state.settings.timeouts.retry)
        state.timers.set(("restore", ""), made_room.restore_at)


def on_restore_timer(state: CoreState) -> None:
    """Has the victims loaded again of loads that failed and were not tried again in time."""
    for key, made_room in list(state.evicted_for.items()):
        if made_room.restore_at is None:
            continue
        if state.now >= made_room.restore_at:
            reload_evicted(state, key)
        else:
            state.timers.set(("restore", ""), made_room.restore_at)


def reload_evicted(state: CoreState, key: EvictedForKey) -> None:
    """Asks the holders of a failed load's victims to load them again."""
    made_room = state.evicted_for.pop(key, None)
    for (holder, model), ticket_id in made_room.models.items() if made_room else ():
        ticket = state.ledger.find(ticket_id)
        known = state.holders.get(holder)
        if known and (ticket is None or ticket.state is not State.RESIDENT):
            load = AskedLoad(holder, state.now, first_asked_at=state.now)
            state.asked_loads[ModelName(known.capability, model)] = load
            state.decide(LoadModel(holder, model))


def forget_evicted_for(state: CoreState, holder: HolderId) -> None:
    """Forgets the victims of a holder that is gone: its loads neither succeed nor fail any more."""
    for key in [key for key in state.evicted_for if key[0] == holder]:
        del state.evicted_for[key]
