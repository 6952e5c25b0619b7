"""Where somebody wants a model to be (SPEC D1, D2, D8), and models that were removed (D9).

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


def floor_of(mind: CoreState, entry: Ticket) -> Floor:
    return mind.floors.get((entry.capability, entry.model), Floor.COLD)


def on_set(mind: CoreState, event: ev.FloorSet) -> None:
    """Raises UnknownCapability, UnknownModel, having changed nothing."""
    spec = mind.registry.find(event.capability, event.model)
    name = (event.capability, event.model)
    mind.floors[name] = event.floor
    mind.tell("floor_set", capability=name[0], model=name[1], floor=event.floor.value)
    entries = _entries(mind, name)
    for entry in entries:
        mind.pin(entry, spec.pinned or event.floor is Floor.DEVICE)
        entry.settles = event.floor is not Floor.DEVICE and entry.state in AWAKE
        mind.watch(entry, mind.now)
        cap_pins(mind, entry.home)
    if event.floor is Floor.DEVICE:
        load(mind, name)
        if failure := mind.failures.get(name):
            mind.alarms.set(("floors", ""), failure.until)
    elif event.floor is Floor.COLD:
        mind.wanted.pop(name, None)
        for entry in entries:
            entry.settles = entry.state in (*AWAKE, State.ASLEEP)


def apply_lowered_floor(mind: CoreState, entry: Ticket) -> bool:
    """It is idle, and its floor was lowered: it goes down to it. A holder that is busy after all
    refuses, and is asked again. False: it is where it may be."""
    if entry.settles and entry.state is State.ASLEEP and floor_of(mind, entry) is Floor.HOST:
        entry.settles = False
    if not entry.settles:
        return False
    if mind.now < entry.refused_until:
        mind.watch(entry, entry.refused_until)
    else:
        revoke(mind, entry, Reason.MANUAL, None)
    return True


def refusal(mind: CoreState, capability: str, model: str) -> NotResident | None:
    """In a capability managed from outside only what has the device floor is loaded."""
    spec = mind.registry.specs.get(capability)
    if spec is None or not spec.is_external:
        return None
    floor = mind.floors.get((capability, model), Floor.COLD)
    return None if floor is Floor.DEVICE else NotResident(model, capability, floor.value)


# -- loading with nobody waiting ------------------------------------------------------------------


def on_load_asked(mind: CoreState, event: ev.LoadAsked) -> None:
    """By hand, once; one that is here has just been wanted, and stays warm as long as after a use.
    Raises UnknownCapability, UnknownModel, NotResident."""
    mind.registry.find(event.capability, event.model)
    if error := refusal(mind, event.capability, event.model):
        raise error
    name = event.capability, event.model
    for entry in _entries(mind, name):
        if entry.state is State.RESIDENT:
            entry.last_used = mind.now
            mind.ledger.touch(entry)
    load(mind, name)


def load(mind: CoreState, name: ModelName) -> None:
    """By a holder of the capability, or, where there is none, by the first to join."""
    if any(e.state in HERE for e in _entries(mind, name)):
        return
    able = [h for h in mind.holders.values() if h.capability == name[0]]
    if not able:
        mind.wanted[name] = None
        mind.note_active(name[0])
        return
    asleep = [e.holder for e in _entries(mind, name) if e.state is State.ASLEEP]
    mind.say(LoadModel(asleep[0] if asleep else able[0].holder, name[1]))


def enforce(mind: CoreState) -> None:
    """An engine with the device floor has ended, or a cool-down has: what should be on the device
    and is not is brought in again, as soon as it may be tried."""
    for name in [n for n, floor in mind.floors.items() if floor is Floor.DEVICE]:
        failure = mind.failures.get(name)
        if failure and mind.now < failure.until:
            mind.alarms.set(("floors", ""), failure.until)
        elif mind.closing_by is None:
            load(mind, name)


def on_join(mind: CoreState, capability: str) -> None:
    """A holder has joined: what nobody could load before it may now. What is pinned it loads
    anyway."""
    names = [n for n, floor in mind.floors.items() if floor is Floor.DEVICE]
    for name in dict.fromkeys([*mind.wanted, *names]):
        if name[0] == capability:
            mind.wanted.pop(name, None)
            load(mind, name)


def wants_replica(mind: CoreState, capability: str) -> bool:
    kept = (n for n, floor in mind.floors.items() if floor is Floor.DEVICE)
    return any(name[0] == capability for name in (*mind.wanted, *kept))


def _entries(mind: CoreState, name: ModelName) -> list[Ticket]:
    return [e for e in mind.ledger.entries() if _is_of(e, name)]


def _is_of(entry: Ticket, name: ModelName) -> bool:
    """Whoever lives in the process of another model serves nobody who asks for it by name."""
    own = not entry.lease and entry.lives_in is None
    return own and (entry.capability, entry.model) == name


# -- removal --------------------------------------------------------------------------------------


def note_removed(mind: CoreState, before: tuple[types.CapabilitySpec, ...]) -> None:
    """The table has changed: what is no longer in it has no floor any more, goes once it is idle,
    and then what was learned of it."""
    for spec in before:
        for model in spec.models:
            if not _is_known(mind, spec.name, model.name):
                mind.removing[(spec.name, model.name)] = None
                mind.floors.pop((spec.name, model.name), None)
    for name in list(mind.removing):
        if _is_known(mind, *name):
            del mind.removing[name]  # it is back


def _is_known(mind: CoreState, capability: str, model: str) -> bool:
    try:
        mind.registry.find(capability, model)
    except (UnknownCapability, UnknownModel):
        return False
    return True


def forget_removed(mind: CoreState) -> None:
    """Once its last ticket is off the books."""
    for name in list(mind.removing):
        if _entries(mind, name):
            continue
        del mind.removing[name]
        mind.wanted.pop(name, None)
        mind.failures.pop(name, None)
        mind.estimates.forget_model(*name)
        _forget_uses(mind, name)
        mind.tell("model_removed", capability=name[0], model=name[1])


def _forget_uses(mind: CoreState, name: ModelName) -> None:
    """How often it was used, what followed it, and where it was."""
    mind.rates.forget(name)
    mind.lasting_rates.forget(name)
    mind.hours.forget(name)
    mind.guesses.pop(name, None)
    mind.followers.pop(name, None)
    for followers in mind.followers.values():
        followers.pop(name, None)
    if mind.last_used and mind.last_used[0] == name:
        mind.last_used = None
    for home in [home for home in mind.last_home if home[1:] == name]:
        del mind.last_home[home]
