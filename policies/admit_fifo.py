"""First come, first served: on its device a ticket is never bypassed, so none can starve."""

from arbiter.core.view import Key, QueuedRequest


def key(w: QueuedRequest) -> Key:
    return (w.asked_at, w.sequence)
