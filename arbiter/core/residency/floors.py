"""Keeps floors (D1, D2, D8): where a person or the table wants a model to be; and removes models
(D9).

A floor is how far a model may fall: `device`, loaded now and never a victim; `host`, asleep at
least; `cold`, anywhere. In a capability that is managed from outside nothing else brings a model
in: a request for a model without the device floor is answered NotResident, at once. Leaving the
device floor releases the device as soon as the model is idle.
"""

from collections.abc import Iterable
from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import DropSlabs, EventKind, LoadModel, LogEvent, Reason, WithdrawLoad
from arbiter.core.eviction.eviction import revoke
from arbiter.core.records.ticket import AWAKE, COMING, State, Ticket
from arbiter.core.residency import slabs
from arbiter.core.state import RETRIED_FOR, AskedLoad, CoreState, reject_queued
from arbiter.core.tickets.pins import cap_pins
from arbiter.core.tickets.reclaim import quarantined_bytes
from arbiter.core.types import Floor, ModelName
from arbiter.errors import NotResident, OutsideHours, UnknownCapability, UnknownModel
from arbiter.units import HolderId, Instant, Span, after, in_seconds, seconds, since

# After so long a load for a floor is asked for again: while a model's files are just being copied,
# its holder finds no plan for the load and asks for no ticket.
LOOK_AGAIN = seconds(10)
# A load that a holder was asked for longer ago, and has not begun, it could not begin.
ASKED_WITHIN = seconds(60)
LEAST_RETRY_S = 1.0  # the least time to ask again, where the hours begin at any moment


# -- floors ---------------------------------------------------------------------------------------


def on_set(state: CoreState, event: ev.FloorSet) -> None:
    """Sets the floor of a model and acts on it. Raises UnknownCapability, UnknownModel, having
    changed nothing."""
    state.registry.find(event.model_name)
    before = state.all_floors().get(event.model_name, Floor.COLD)
    state.floors[event.model_name] = event.floor
    _act_on(state, event.model_name, before, event.floor, source="person")


def on_table(state: CoreState, before: dict[ModelName, Floor]) -> None:
    """Acts on floors that a change of the table has changed. `before`: all floors before it."""
    after = state.all_floors()
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, Floor.COLD), after.get(name, Floor.COLD)
        if new is not old and is_known(state, name):
            _act_on(state, name, old, new, source="table")


def _act_on(state: CoreState, name: ModelName, before: Floor, floor: Floor, *, source: str) -> None:
    """Acts on a floor that a person or the table has changed: pins, lets idle tickets go down to
    it, loads, withdraws loads, and refuses requests that it rules out."""
    state.log(
        EventKind.FLOOR_SET,
        capability=name.capability,
        model=name.model,
        floor=floor.value,
        source=source,
    )
    tickets = _tickets(state, name)
    for ticket in tickets:
        state.ledger.pin(ticket, state.is_pinned(name))
        is_to_be_awake = ticket.state in AWAKE or ticket.id in state.queue
        ticket.settle_when_idle(floor is Floor.COLD or (floor is Floor.HOST and is_to_be_awake))
        state.set_timer(ticket, state.now)
        cap_pins(state, ticket.node)
    if floor is Floor.DEVICE:
        _end_prefetch(state, name)
        load(state, name)
        if failure := state.failures.get(name):
            state.timers.set(("floors", ""), failure.until)
        return
    if floor is Floor.COLD or before is Floor.DEVICE:
        _withdraw_load(state, name, tickets)
    if error := _not_resident(state, name):
        for ticket in [t for t in tickets if t.id in state.queue]:
            reject_queued(state, ticket, error)


def _withdraw_load(state: CoreState, name: ModelName, tickets: list[Ticket]) -> None:
    """Ends what was to load without a request: a ticket in the queue for which no request waits
    would else be granted, and have others evicted for it. Which tickets these are is known to the
    holders only. A model that the table pins stays wanted."""
    state.awaiting_holder.pop(name, None)
    pending = state.asked_loads.pop(name, None)
    if state.is_pinned(name):
        return
    holders = [ticket.holder for ticket in tickets if ticket.id in state.queue]
    for holder in dict.fromkeys([*holders, *([pending.holder] if pending else [])]):
        state.decide(WithdrawLoad(holder, name.model))


def on_rebuilt(state: CoreState, ticket: Ticket) -> None:
    """Has a ticket of the last epoch go down to its floor in a capability managed from outside:
    that the floor was lowered while the model was in use, nothing but the floor tells any more."""
    name = ticket.model_name
    if not ticket.lease and state.opens_at(name) is None and _not_resident(state, name):
        ticket.settle_when_idle(True)


def stop_settling_at_floor(state: CoreState, ticket: Ticket) -> None:
    """Forgets that the floor of a ticket was lowered once the ticket has come down to it."""
    if (
        ticket.settles
        and ticket.state is State.ASLEEP
        and state.floor_of(ticket.model_name) is Floor.HOST
    ):
        ticket.settle_when_idle(False)


def settle(state: CoreState, ticket: Ticket) -> None:
    """Revokes an idle ticket that is above its floor. A holder that is busy after all declines,
    and is asked again once it is no longer left alone."""
    if state.now < ticket.declined_until:
        state.set_timer(ticket, ticket.declined_until)
    else:
        revoke(state, ticket, Reason.MANUAL, None)


def refusal(
    state: CoreState, name: ModelName, deadline: Span | None = None
) -> OutsideHours | NotResident | None:
    """Returns the error for a request outside the hours of its model, or in a capability managed
    from outside, where only models with the device floor are loaded; None when it may be loaded."""
    return outside_hours(state, name, deadline) or _not_resident(state, name)


def _not_resident(state: CoreState, name: ModelName) -> NotResident | None:
    """Returns the error for a model without the device floor in a capability managed from outside;
    None for any other."""
    spec = state.registry.specs.get(name.capability)
    if spec is None or not spec.is_external:
        return None
    floor = state.floor_of(name)
    return None if floor is Floor.DEVICE else NotResident(name.model, name.capability, floor.value)


def outside_hours(state: CoreState, name: ModelName, deadline: Span | None) -> OutsideHours | None:
    """Returns the error for a request that does not wait until the hours of its model begin (C13);
    None when they have, or when it does."""
    opens_at = state.opens_at(name)
    if opens_at is None:
        return None
    wait = since(state.now, opens_at)
    if deadline is not None and deadline >= wait:
        return None
    again_s = max(LEAST_RETRY_S, in_seconds(wait))
    return OutsideHours(name.model, state.registry.hours[name], again_s)


# -- loading without a request ---------------------------------------------------------------------


def on_load_asked(state: CoreState, event: ev.LoadAsked) -> None:
    """Loads a model once, by hand; a model that is resident already stays warm as long as after a
    use. Raises UnknownCapability, UnknownModel, NotResident, OutsideHours."""
    state.registry.find(event.model_name)
    if error := refusal(state, event.model_name):
        raise error
    name = event.model_name
    for ticket in _tickets(state, name):
        if ticket.state is State.RESIDENT:
            ticket.note_wanted(state.now)
            ticket.try_unload(0)
            state.ledger.touch(ticket)
        elif ticket.state in COMING:
            ticket.settle_when_idle(False)  # takes back an unload, or a lowered floor, until now
    _end_prefetch(state, name)
    if pending := state.asked_loads.get(name):
        state.asked_loads[name] = replace(pending, first_asked_at=state.now)
    load(state, name)


def _end_prefetch(state: CoreState, name: ModelName) -> None:
    """Notes that what loads from now on was asked for, also where a prefetch had begun it or was to
    begin it: others leave for it, and it waits."""
    state.prefetched.pop(name, None)
    for ticket in _tickets(state, name):
        ticket.note_prefetch(ticket.is_prefetch and name in state.registry.optional)


def load(state: CoreState, name: ModelName) -> None:
    """Has a holder of the capability load a model, or, where there is none, the first to join. A
    model with the device floor that a request brings in is asked for as well, because that load
    ends with its client. After a restart a holder that is not back yet may have the model, so it is
    asked for once grants are made. Outside its hours nothing is loaded (C13)."""
    if state.opens_at(name) is not None:
        return
    tickets = _tickets(state, name)
    coming = [t.holder for t in tickets if t.state in COMING]
    stays = state.floor_of(name) is Floor.DEVICE
    if any(t.state is State.RESIDENT for t in tickets) or (coming and not stays):
        return
    if not state.is_settled:
        state.awaiting_holder[name] = None
        state.timers.set(("floors", ""), state.settled_at)
        return
    asleep = [t.holder for t in tickets if t.state is State.ASLEEP]
    able = [h.holder for h in state.holders.values() if h.capability == name.capability]
    if not able:
        state.awaiting_holder[name] = None
        state.note_active(name.capability)
        return
    others = _from_next(dict.fromkeys([*asleep, *able]), state.asked_loads.get(name))
    holder = coming[0] if coming else min(others, key=lambda h: _is_refused(state, h))
    state.asked_loads[name] = AskedLoad(holder, state.now, _first_asked_at(state, name))
    state.decide(LoadModel(holder, name.model))
    if stays:
        state.timers.set(("floors", ""), after(state.now, LOOK_AGAIN))


def _first_asked_at(state: CoreState, name: ModelName) -> Instant:
    """Returns since when a load that is asked for now is tried."""
    last = state.asked_loads.get(name)
    if last is None or since(last.first_asked_at, state.now) >= RETRIED_FOR:
        return state.now
    return last.first_asked_at


def _from_next(holders: Iterable[HolderId], last_load: AskedLoad | None) -> list[HolderId]:
    """Returns holders in the order in which they are asked for a load: from the next on where the
    ticket of the last that was asked was refused, because its node may be too small."""
    order = list(holders)
    if last_load is None or not last_load.is_refused or last_load.holder not in order:
        return order
    first = order.index(last_load.holder) + 1
    return [*order[first:], *order[:first]]


def _is_refused(state: CoreState, holder: HolderId) -> bool:
    """Says whether a holder would be granted nothing now: it is silent, or in quarantine."""
    return state.is_silent(holder) or quarantined_bytes(state, holder) > 0


def enforce(state: CoreState) -> None:
    """Loads again what has the device floor and is not on a device, because its engine, its load or
    its cool-down has ended, as soon as it may be tried; and what is wanted."""
    for name in dict.fromkeys([*state.awaiting_holder, *_on_device(state)]):
        failure = state.failures.get(name)
        if failure and state.now < failure.until:
            state.timers.set(("floors", ""), failure.until)
        elif state.closing_by is None:
            state.awaiting_holder.pop(name, None)
            load(state, name)


def on_join(state: CoreState, event: ev.Joined) -> None:
    """Has a new holder load the models that waited for a holder, and asks again for what it was
    asked to load: that may have been lost with its old connection. Pinned models it loads by
    itself."""
    names = [
        n for n in (*state.awaiting_holder, *_on_device(state)) if n.capability == event.capability
    ]
    names += [
        name
        for name, pending in state.asked_loads.items()
        if pending.holder == event.holder and not pending.is_refused and _is_fresh(state, pending)
    ]
    for name in dict.fromkeys(names):
        state.awaiting_holder.pop(name, None)
        load(state, name)


def on_holder_lost(state: CoreState, lost: HolderId) -> None:
    """Asks another holder, or the next to join, for what the lost one was asked to load: a replica
    that was about to stop takes no load."""
    for name, pending in list(state.asked_loads.items()):
        if pending.holder != lost:
            continue
        del state.asked_loads[name]
        if _is_fresh(state, pending) and state.closing_by is None and is_known(state, name):
            load(state, name)


def _is_fresh(state: CoreState, pending: AskedLoad) -> bool:
    """Says whether a load was asked for so lately that its holder may have yet to begin it."""
    return since(pending.asked_at, state.now) < ASKED_WITHIN


def yet_to_begin(state: CoreState) -> set[ModelName]:
    """Returns the models that are to load without a request and that no holder is known to have
    begun. A prefetch is for no request yet, and a load that was tried long enough is over."""
    asked_at = {
        name: pending.asked_at
        for name, pending in state.asked_loads.items()
        if not pending.is_refused and since(pending.first_asked_at, state.now) < RETRIED_FOR
    }
    asked_at |= dict.fromkeys(state.awaiting_holder, state.now)
    return {name for name, at in asked_at.items() if not state.is_prefetch(name, at)}


def return_freed(state: CoreState) -> None:
    """Loads again what left for a lease of `arbiter free`, once that lease is over (A15)."""
    for ticket_id in list(state.freed_for):
        ticket = state.ledger.find(ticket_id)
        if ticket is not None and ticket.state is not State.RECLAIMING:
            continue
        names = [name for name in state.freed_for.pop(ticket_id) if is_known(state, name)]
        if state.closing_by is not None or not names:
            continue
        models = ", ".join(name.path for name in names)
        state.decide(LogEvent(EventKind.FREED_RETURN, {"models": models}, ticket_id))
        for name in names:
            load(state, name)


def capabilities_wanted(state: CoreState) -> set[str]:
    """Returns the capabilities that need a replica to load what is wanted or has the device
    floor."""
    return {name.capability for name in (*state.awaiting_holder, *_on_device(state))}


def _on_device(state: CoreState) -> list[ModelName]:
    """Returns the models with the device floor, but for those outside their hours. Asked after each
    event, so no model with another floor is walked past."""
    configured = (name for name in state.registry.on_device if name not in state.floors)
    chosen = (name for name, floor in state.floors.items() if floor is Floor.DEVICE)
    return [name for name in (*configured, *chosen) if state.opens_at(name) is None]


def _tickets(state: CoreState, name: ModelName) -> list[Ticket]:
    """Returns the tickets that serve this model by name."""
    return [t for t in state.ledger.of_model(name) if not t.lease]


# -- removal --------------------------------------------------------------------------------------


def note_removed(state: CoreState, before: tuple[types.CapabilitySpec, ...]) -> None:
    """Notes models that are no longer in the table: they have no floor any more, leave once they
    are idle, and are then forgotten."""
    for spec in before:
        for model in spec.models:
            name = ModelName(spec.name, model.name)
            if not is_known(state, name):
                state.removing[name] = None
                state.floors.pop(name, None)
    for name in list(state.removing):
        if is_known(state, name):
            del state.removing[name]  # it is back
    for name in list(state.removed_models):
        if is_known(state, name):
            del state.removed_models[name]


def is_known(state: CoreState, name: ModelName) -> bool:
    """Says whether a model is in the table, or registered."""
    try:
        state.registry.find(name)
    except (UnknownCapability, UnknownModel):
        return False
    return True


def forget_removed(state: CoreState) -> None:
    """Forgets what was learned of removed models whose last ticket is off the books. After a
    restart a holder that is not back yet may have one."""
    if not state.removing or not state.registry.is_set or not state.gave_up_waiting:
        return
    gone = [name for name in state.removing if not _tickets(state, name)]
    if not gone:
        return
    state.estimates.forget_model(*gone)
    forget_uses(state, gone)
    slabs.lately_removed_models(state)  # so that no more are kept than agents are told of
    for name in gone:
        del state.removing[name]
        state.removed_models[name] = state.now
        state.awaiting_holder.pop(name, None)
        state.asked_loads.pop(name, None)
        state.failures.pop(name, None)
        for node in state.nodes:
            state.decide(DropSlabs(node, name.path))
        state.log(EventKind.MODEL_REMOVED, capability=name.capability, model=name.model)


def forget_uses(state: CoreState, gone: list[ModelName]) -> None:
    """Forgets how often models were used, what followed them, and where they were."""
    state.usage.forget(gone)
    for name in gone:
        state.prefetched.pop(name, None)
    names = set(gone)
    for home in [home for home in state.last_home if home[1] in names]:
        del state.last_home[home]
