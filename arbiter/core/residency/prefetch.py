"""A model that is likely next is brought in before anybody asks (SPEC C11).

Two guesses: the next in a declared pipeline (voice activity, speech, text, voice), and what most
often followed before. A wrong guess must cost nobody anything, so it is made only while nothing
waits or loads, at nominal pressure, for a model whose size was measured, into room that is free;
and if the room has gone when its request comes, the request goes, not another model. Until it is
used it is batch work without minimum residency, and while it still loads it ends as soon as
somebody waits for its bytes (eviction.make_room).
"""

from dataclasses import dataclass

from arbiter.core.eviction.pressure import is_nominal
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.records.usage_rates import ModelName
from arbiter.core.residency.floors import load, refusal
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets.device_limits import readable_devices
from arbiter.errors import TicketClosed
from arbiter.units import Bytes, NodeId, after, since

NAMES_COUNT = 1_000  # models whose followers are remembered; some 100 bytes each


@dataclass(frozen=True, slots=True)
class Prefetch:
    """What may come next, and why."""

    name: ModelName
    why: str = "pipeline"


def predict_next(mind: CoreState) -> None:
    """After each event: learn from the uses it told of, and guess what comes next."""
    used, mind.just_used = mind.just_used, []
    for name, node in used:
        mind.guesses.pop(name, None)  # somebody asked for it, whether for the guess or not
        if mind.settings.preload == "history":
            _learn(mind, name)
        guess = _declared(mind, name) or _habitual(mind, name)
        if guess and _is_free(mind, node, guess.name):
            mind.guesses[guess.name] = after(mind.now, mind.settings.guess_for)
            capability, model = guess.name
            mind.tell(
                "model_preload", capability=capability, model=model, after=name[1], why=guess.why
            )
            load(mind, guess.name)


def cancel_for(mind: CoreState, entry: Ticket) -> TicketClosed | None:
    """A request that was only a guess, and that others would have to make room for. Whoever wants
    the model by now asks under a ticket of their own."""
    until = mind.guesses.pop((entry.capability, entry.model), None)
    return TicketClosed(entry.ticket) if until is not None and mind.now < until else None


def is_awaited(mind: CoreState, name: ModelName) -> bool:
    """A load of it that is asked for now is the guess."""
    until = mind.guesses.get(name)
    return until is not None and mind.now < until


# -- guessing -------------------------------------------------------------------------------------


def _learn(mind: CoreState, name: ModelName) -> None:
    last, mind.last_used = mind.last_used, (name, mind.now)
    if last is None or last[0] == name or since(last[1], mind.now) > mind.settings.follow_within:
        return
    followers = mind.followers.setdefault(last[0], {})
    followers[name] = followers.get(name, 0) + 1
    if len(mind.followers) > NAMES_COUNT:
        del mind.followers[next(iter(mind.followers))]


def _declared(mind: CoreState, name: ModelName) -> Prefetch | None:
    for pipeline in mind.settings.pipelines:
        if name[0] in pipeline[:-1]:
            spec = mind.registry.specs.get(pipeline[pipeline.index(name[0]) + 1])
            models = [(spec.name, m.name) for m in spec.models] if spec else []
            if models:
                return Prefetch(max(models, key=lambda m: (mind.rates.recent(m, mind.now), m)))
    return None


def _habitual(mind: CoreState, name: ModelName) -> Prefetch | None:
    followers = mind.followers.get(name, {})
    if not followers:
        return None
    likely = max(followers, key=lambda n: (followers[n], n))
    times, of = followers[likely], sum(followers.values())
    settings = mind.settings
    is_habit = times >= settings.habit_least_count and times >= of * settings.habit_fraction
    return Prefetch(likely, "history") if is_habit else None


# -- the guard ------------------------------------------------------------------------------------


def _is_free(mind: CoreState, name: NodeId, wanted: ModelName) -> bool:
    """Nothing is lost by it."""
    node = mind.nodes.get(name)
    size = mind.estimates.proven(*wanted)
    if node is None or size is None or mind.settings.preload == "off":
        return False
    is_quiet = mind.is_settled and mind.closing_by is None and not len(mind.line)
    return (
        is_quiet
        and is_nominal(mind, name)
        and wanted not in mind.failures
        and refusal(mind, *wanted) is None
        and any(h.capability == wanted[0] and h.node == name for h in mind.holders.values())
        and _has_room(mind, node, size)
        and not _is_busy(mind, wanted)
    )


def _has_room(mind: CoreState, node: Node, size: Bytes) -> bool:
    return any(b.free_bytes >= size for b in readable_devices(mind, node))


def _is_busy(mind: CoreState, wanted: ModelName) -> bool:
    """Something loads, or the model is here in some state already."""
    return any(
        e.state is State.LOADING or (e.capability, e.model) == wanted for e in mind.ledger.entries()
    )
