"""The most urgent first; among equals those that are soon ready, then the first to ask (C6).

Warm: its weights lie in host RAM already, or another load of them is reading them.
"""

from arbiter.core.view import Key, QueuedRequest


def key(w: QueuedRequest) -> Key:
    return (w.priority, not w.is_warm, w.asked_at, w.sequence)
