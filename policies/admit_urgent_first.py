"""The most urgent first, and among equals whoever came first (SPEC C6)."""

from arbiter.view import Key, Waiter


def key(w: Waiter) -> Key:
    return (w.priority, w.asked, w.turn)
