"""How many replicas of each capability should exist (SPEC H0). Serve executes it.

One while a ticket of it is open, a model of it is pinned, or it was active lately; then none. More
than one is a request-driven matter that Serve adds by itself.
"""

from arbiter.core.residency.floors import wants_replica
from arbiter.core.state import CoreState
from arbiter.core.types import CapabilitySpec
from arbiter.units import Instant, after


def targets(mind: CoreState, now: Instant) -> dict[str, int]:
    return {name: _target(mind, spec, now) for name, spec in mind.registry.specs.items()}


def _target(mind: CoreState, spec: CapabilitySpec, now: Instant) -> int:
    if mind.closing_by is not None:
        return 0
    if wants_replica(mind, spec.name) or spec.name in mind.registry.pinning:
        return 1
    if mind.ledger.open_count[spec.name]:
        return 1
    last = mind.active.get(spec.name)
    return int(last is not None and now < after(last, spec.downscale_to_zero))


def on_timer(mind: CoreState, capability: str) -> None:
    """The alarm may have rung early; set it for the moment the target may fall."""
    spec, last = mind.registry.specs.get(capability), mind.active.get(capability)
    if spec and last is not None:
        falls_at = after(last, spec.downscale_to_zero)
        if falls_at > mind.now:
            mind.alarms.set(("scale", capability), falls_at)
