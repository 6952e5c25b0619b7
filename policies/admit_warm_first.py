"""The most urgent ticket first; among equals a ticket that is soon ready, then the first to ask
(C6).

A ticket is soon ready (warm) when its weights lie in host RAM already, or when another load of its
model is under way, which reads the same files.
"""

from arbiter.core.view import Key, QueuedRequest


def key(request: QueuedRequest) -> Key:
    """Returns the place of a queued ticket in the grant order; the lowest is granted first."""
    return (request.priority, not request.is_warm, request.asked_at, request.sequence)
