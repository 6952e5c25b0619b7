"""The first ticket to ask comes first: on its device no later ticket is granted before it, so none
can starve."""

from arbiter.core.view import Key, QueuedRequest


def key(request: QueuedRequest) -> Key:
    """Returns the place of a queued ticket in the grant order; the lowest is granted first."""
    return (request.asked_at, request.sequence)
