"""Says when an idle model leaves although no ticket needs its bytes (C8)."""

from arbiter.core.view import IdleModel
from arbiter.units import Instant, after


def goes_at(model: IdleModel) -> Instant | None:
    """Returns the instant at which the model leaves: its keep-warm time after its last use. None:
    it never leaves by itself, because it is pinned or its keep-warm time is negative."""
    if model.pinned or model.keep_warm < 0:
        return None
    return after(model.last_used, model.keep_warm)
