"""Says when an idle model leaves though no ticket needs its bytes (C8)."""

from arbiter.core.view import IdleModel
from arbiter.units import Instant, after


def goes_at(idler: IdleModel) -> Instant | None:
    """Counted from its last use; never for a pinned model or a negative term."""
    if idler.pinned or idler.keep_warm < 0:
        return None
    return after(idler.last_used, idler.keep_warm)
