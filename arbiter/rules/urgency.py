"""How urgent a model is (SPEC C2): as its last request, for its keep-warm seconds; then batch."""

from arbiter.events import Priority
from arbiter.ledger import Entry
from arbiter.rules.mind import Mind
from arbiter.units import Instant, after


def of(mind: Mind, entry: Entry) -> Priority:
    fades_at = fading(mind, entry)
    return entry.priority if fades_at is None or mind.now < fades_at else Priority.BATCH


def fading(mind: Mind, entry: Entry) -> Instant | None:
    """When it begins to count as batch; None while it is in use. Kept warm for ever does not mean
    urgent for ever: it would never make room for anything."""
    if entry.inflight > 0:
        return None
    most = mind.settings.carry_most
    return after(entry.last_used, most if entry.keep_warm < 0 else min(entry.keep_warm, most))
