"""Brings in a model that is likely next, before any request asks for it (C11).

A model is likely next if it is the next in a declared pipeline (voice activity, speech, text,
voice) that is not resident, or what most often followed before. A stage that is ready leads to the
stage behind it, used or not, so that a pipeline comes in ahead of its requests; a habit leads on
only once its model is used.

A wrong prefetch must cost no request anything. So it is made only while nothing waits or loads, at
nominal pressure, for a model whose size was measured, into room that is free; and if the room has
gone when its request comes, the request goes, not another model. Until it is used it is batch work
without minimum residency, and while it still loads it ends as soon as a ticket waits for its bytes
(eviction.make_room).
"""

from dataclasses import dataclass

from arbiter.core.decisions import EventKind
from arbiter.core.eviction.pressure import is_nominal
from arbiter.core.records.ticket import State
from arbiter.core.residency.floors import load, refusal
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets.exclusion import excluded_by
from arbiter.core.tickets.lendable_devices import readable_devices
from arbiter.core.types import ModelName
from arbiter.units import Bytes, NodeId, after


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Names what may come next, and why."""

    name: ModelName
    why: str = "pipeline"


def predict_next(state: CoreState) -> None:
    """Learns from the uses that this event told of, and prefetches what comes next."""
    used, ready = state.uses_this_event, state.prefetched_this_event
    state.uses_this_event, state.prefetched_this_event = [], []
    for name, node in used:
        state.prefetched.pop(name, None)  # a request asked for it, prefetched or not
        if state.settings.preload == "history":
            state.usage.note_order(name, state.now, state.settings.follow_within)
        _bring_in(state, node, name, _declared(state, name) or _habitual(state, name))
    for name, node in ready:
        _bring_in(state, node, name, _declared(state, name))


def _bring_in(
    state: CoreState, node: NodeId, previous: ModelName, candidate: Prefetch | None
) -> None:
    """Prefetches a model that is likely next after another, if nothing is lost by it."""
    if candidate is None or not _is_free(state, node, candidate.name):
        return
    state.prefetched[candidate.name] = after(state.now, state.settings.prefetch_for)
    capability, model = candidate.name
    state.log(
        EventKind.MODEL_PRELOAD,
        capability=capability,
        model=model,
        after=previous.model,
        why=candidate.why,
    )
    load(state, candidate.name)


def forget(state: CoreState, name: ModelName) -> None:
    """Notes that the prefetch of a model is over without a load."""
    state.prefetched.pop(name, None)


def takes_free_room(state: CoreState, name: ModelName) -> bool:
    """Says whether a load of the model that is asked for now is its prefetch, or as one because
    requests are served without the model too, as by the base of a merged copy (F7)."""
    return name in state.registry.optional or state.is_prefetch(name, state.now)


# -- predicting -----------------------------------------------------------------------------------


def _declared(state: CoreState, name: ModelName) -> Prefetch | None:
    """Returns the model of the next stage of a pipeline. A stage that is resident already leads to
    the stage behind it."""
    for pipeline in state.settings.pipelines:
        if name.capability not in pipeline:
            continue
        for capability in pipeline[pipeline.index(name.capability) + 1 :]:
            likely = _most_used(state, capability)
            if likely and not _is_resident(state, likely):
                return Prefetch(likely)
    return None


def _most_used(state: CoreState, capability: str) -> ModelName | None:
    """Returns the model of a capability that was used the most of late."""
    spec = state.registry.specs.get(capability)
    models = {ModelName(spec.name, m.name) for m in spec.models} if spec else set()
    needed = models - state.registry.optional
    return max(needed, key=lambda m: (state.usage.rates.recent(m, state.now), m), default=None)


def _is_resident(state: CoreState, name: ModelName) -> bool:
    return any(t.state is State.RESIDENT for t in state.ledger.of_model(name))


def _habitual(state: CoreState, name: ModelName) -> Prefetch | None:
    """Returns the model that most often followed this one, if that is a habit."""
    followers = state.usage.transition_counts.get(name, {})
    if not followers:
        return None
    likely = max(followers, key=lambda n: (followers[n], n))
    times = followers[likely]
    of = sum(followers.values())
    settings = state.settings
    is_habit = times >= settings.habit_least_count and times >= of * settings.habit_fraction
    return Prefetch(likely, "history") if is_habit else None


# -- the guard ------------------------------------------------------------------------------------


def _is_free(state: CoreState, name: NodeId, model: ModelName) -> bool:
    """Says whether nothing is lost by a prefetch."""
    node = state.nodes.get(name)
    size, spec = state.estimates.proven(model), state.registry.specs.get(model.capability)
    if node is None or size is None or spec is None or state.settings.preload == "off":
        return False
    is_quiet = state.is_settled and state.closing_by is None and not state.queue.has_free()
    return (
        is_quiet
        and is_nominal(state, name)
        and model not in state.failures
        and model not in state.registry.optional  # its holder knows when it is of use
        and refusal(state, model) is None
        and any(h.capability == model.capability and h.node == name for h in state.holders.values())
        and not excluded_by(state, name, spec.role, model)
        and _has_room(state, node, size)
        and not _is_busy(state, model)
    )


def _has_room(state: CoreState, node: Node, size: Bytes) -> bool:
    return any(b.free_bytes >= size for b in readable_devices(state, node))


def _is_busy(state: CoreState, model: ModelName) -> bool:
    """Says whether something loads, or the model is here in some state already."""
    loads = any(book.loading for book in state.ledger.books.values())
    return loads or bool(state.ledger.of_model(model))
