"""The most urgent ticket first; among equals a ticket that is soon ready, then the first to ask
(C6).

A ticket is soon ready (warm) when its weights lie in host RAM already, or another load reads them.
"""

from arbiter.core.view import Key, QueuedRequest


def key(w: QueuedRequest) -> Key:
    return (w.priority, not w.is_warm, w.asked_at, w.sequence)
