"""Where somebody wants a model to be (D1, D2, D8), and models that were removed (D9).

A floor is how far a model may fall: `device`, loaded now and never a victim; `host`, asleep at
least; `cold`, anywhere. In a capability that is managed from outside nothing else brings a model
in: a request for one without the device floor is answered NotResident, at once. Leaving the device
floor releases the device as soon as the model is idle.
"""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import LoadModel, Reason
from arbiter.core.eviction.eviction import revoke
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.device_limits import cap_pins
from arbiter.core.types import Floor
from arbiter.errors import NotResident, UnknownCapability, UnknownModel

ModelName = tuple[str, str]  # capability and model
HERE = (State.QUEUED, State.LOADING, State.RESIDENT)
AWAKE = (State.LOADING, State.RESIDENT, State.DRAINING)  # one that drains may refuse to go


# -- floors ---------------------------------------------------------------------------------------


def floor_of(state: CoreState, entry: Ticket) -> Floor:
    return state.floors.get((entry.capability, entry.model), Floor.COLD)


def on_set(state: CoreState, event: ev.FloorSet) -> None:
    """Raises UnknownCapability, UnknownModel, having changed nothing."""
    spec = state.registry.find(event.capability, event.model)
    name = (event.capability, event.model)
    state.floors[name] = event.floor
    state.log("floor_set", capability=name[0], model=name[1], floor=event.floor.value)
    entries = _entries(state, name)
    for entry in entries:
        state.ledger.pin(entry, spec.pinned or event.floor is Floor.DEVICE)
        entry.settles = event.floor is not Floor.DEVICE and entry.state in AWAKE
        state.set_timer(entry, state.now)
        cap_pins(state, entry.home)
    if event.floor is Floor.DEVICE:
        load(state, name)
        if failure := state.failures.get(name):
            state.timers.set(("floors", ""), failure.until)
    elif event.floor is Floor.COLD:
        state.wanted.pop(name, None)
        for entry in entries:
            entry.settles = entry.state in (*AWAKE, State.ASLEEP)


def apply_lowered_floor(state: CoreState, entry: Ticket) -> bool:
    """It is idle, and its floor was lowered: it goes down to it. A holder that is busy after all
    refuses, and is asked again. False: it is where it may be."""
    if entry.settles and entry.state is State.ASLEEP and floor_of(state, entry) is Floor.HOST:
        entry.settles = False
    if not entry.settles:
        return False
    if state.now < entry.declined_until:
        state.set_timer(entry, entry.declined_until)
    else:
        revoke(state, entry, Reason.MANUAL, None)
    return True


def refusal(state: CoreState, capability: str, model: str) -> NotResident | None:
    """In a capability managed from outside only what has the device floor is loaded."""
    spec = state.registry.specs.get(capability)
    if spec is None or not spec.is_external:
        return None
    floor = state.floors.get((capability, model), Floor.COLD)
    return None if floor is Floor.DEVICE else NotResident(model, capability, floor.value)


# -- loading with nobody waiting ------------------------------------------------------------------


def on_load_asked(state: CoreState, event: ev.LoadAsked) -> None:
    """By hand, once; one that is here has just been wanted, and stays warm as long as after a use.
    Raises UnknownCapability, UnknownModel, NotResident."""
    state.registry.find(event.capability, event.model)
    if error := refusal(state, event.capability, event.model):
        raise error
    name = event.capability, event.model
    for entry in _entries(state, name):
        if entry.state is State.RESIDENT:
            entry.last_used = state.now
            state.ledger.touch(entry)
    load(state, name)


def load(state: CoreState, name: ModelName) -> None:
    """By a holder of the capability, or, where there is none, by the first to join."""
    if any(e.state in HERE for e in _entries(state, name)):
        return
    able = [h for h in state.holders.values() if h.capability == name[0]]
    if not able:
        state.wanted[name] = None
        state.note_active(name[0])
        return
    asleep = [e.holder for e in _entries(state, name) if e.state is State.ASLEEP]
    state.decide(LoadModel(asleep[0] if asleep else able[0].holder, name[1]))


def enforce(state: CoreState) -> None:
    """An engine with the device floor has ended, or a cool-down has: what should be on the device
    and is not is brought in again, as soon as it may be tried."""
    for name in [n for n, floor in state.floors.items() if floor is Floor.DEVICE]:
        failure = state.failures.get(name)
        if failure and state.now < failure.until:
            state.timers.set(("floors", ""), failure.until)
        elif state.closing_by is None:
            load(state, name)


def on_join(state: CoreState, capability: str) -> None:
    """A holder has joined: what nobody could load before it may now. What is pinned it loads
    anyway."""
    names = [n for n, floor in state.floors.items() if floor is Floor.DEVICE]
    for name in dict.fromkeys([*state.wanted, *names]):
        if name[0] == capability:
            state.wanted.pop(name, None)
            load(state, name)


def wants_replica(state: CoreState, capability: str) -> bool:
    kept = (n for n, floor in state.floors.items() if floor is Floor.DEVICE)
    return any(name[0] == capability for name in (*state.wanted, *kept))


def _entries(state: CoreState, name: ModelName) -> list[Ticket]:
    return [e for e in state.ledger.entries() if _is_of(e, name)]


def _is_of(entry: Ticket, name: ModelName) -> bool:
    """Whoever lives in the process of another model serves nobody who asks for it by name."""
    own = not entry.lease
    return own and (entry.capability, entry.model) == name


# -- removal --------------------------------------------------------------------------------------


def note_removed(state: CoreState, before: tuple[types.CapabilitySpec, ...]) -> None:
    """The table has changed: what is no longer in it has no floor any more, goes once it is idle,
    and then what was learned of it."""
    for spec in before:
        for model in spec.models:
            if not _is_known(state, spec.name, model.name):
                state.removing[(spec.name, model.name)] = None
                state.floors.pop((spec.name, model.name), None)
    for name in list(state.removing):
        if _is_known(state, *name):
            del state.removing[name]  # it is back


def _is_known(state: CoreState, capability: str, model: str) -> bool:
    try:
        state.registry.find(capability, model)
    except (UnknownCapability, UnknownModel):
        return False
    return True


def forget_removed(state: CoreState) -> None:
    """Once its last ticket is off the books."""
    for name in list(state.removing):
        if _entries(state, name):
            continue
        del state.removing[name]
        state.wanted.pop(name, None)
        state.failures.pop(name, None)
        state.estimates.forget_model(*name)
        _forget_uses(state, name)
        state.log("model_removed", capability=name[0], model=name[1])


def _forget_uses(state: CoreState, name: ModelName) -> None:
    """How often it was used, what followed it, and where it was."""
    state.rates.forget(name)
    state.lasting_rates.forget(name)
    state.hours.forget(name)
    state.prefetched.pop(name, None)
    state.transition_counts.pop(name, None)
    for followers in state.transition_counts.values():
        followers.pop(name, None)
    if state.last_used and state.last_used[0] == name:
        state.last_used = None
    for home in [home for home in state.last_home if home[1:] == name]:
        del state.last_home[home]
