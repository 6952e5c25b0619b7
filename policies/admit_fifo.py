"""First come, first served: on its device a ticket is never overtaken, so none can starve."""

from arbiter.core.view import Key, Waiter


def key(w: Waiter) -> Key:
    return (w.asked, w.turn)
