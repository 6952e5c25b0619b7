"""Says when an idle model leaves although no ticket needs its bytes (C8)."""

from arbiter.core.view import IdleModel
from arbiter.units import Instant, after


def goes_at(idler: IdleModel) -> Instant | None:
    """Returns the instant at which the model leaves: its keep-warm time after its last use. None:
    it never leaves by itself, because it is pinned or its keep-warm time is negative."""
    if idler.pinned or idler.keep_warm < 0:
        return None
    return after(idler.last_used, idler.keep_warm)
