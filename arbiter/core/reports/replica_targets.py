"""Says how many replicas of each capability should exist (H0). Serve executes it.

One while a ticket of it is open, a model of it is pinned, or it was active lately; then none. More
than one is a matter of request load, and Serve adds them by itself.
"""

from arbiter.core.residency.floors import capabilities_wanted
from arbiter.core.state import CoreState
from arbiter.core.types import CapabilitySpec
from arbiter.units import Instant, after


def targets(state: CoreState, now: Instant) -> dict[str, int]:
    """Returns the replicas wanted of each capability, as of `now`. The shell asks after each
    event."""
    wanted = capabilities_wanted(state) | state.registry.pinning
    specs = state.registry.specs
    return {name: _target(state, spec, now, wanted) for name, spec in specs.items()}


def _target(state: CoreState, spec: CapabilitySpec, now: Instant, wanted: set[str]) -> int:
    if state.closing_by is not None:
        return 0
    if spec.name in wanted or state.ledger.open_count[spec.name]:
        return 1
    last = state.active.get(spec.name)
    return int(last is not None and now < after(last, spec.downscale_to_zero))


def on_timer(state: CoreState, capability: str) -> None:
    """Sets the timer of a capability for the moment its target may fall; it may have been due
    early."""
    spec = state.registry.specs.get(capability)
    last = state.active.get(capability)
    if spec and last is not None:
        falls_at = after(last, spec.downscale_to_zero)
        if falls_at > state.now:
            state.timers.set(("scale", capability), falls_at)
