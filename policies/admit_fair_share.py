"""The most urgent ticket first; among equals a ticket that is soon ready, then the ticket whose
tenant asked for the fewest bytes of late, then the first to ask (C6, C10). With one tenant it is
`warm_first`.
"""

from arbiter.core.view import Key, QueuedRequest


def key(request: QueuedRequest) -> Key:
    """Returns the place of a queued ticket in the grant order; the lowest is granted first."""
    return (
        request.priority,
        not request.is_warm,
        request.virtual_start_bytes,
        request.asked_at,
        request.sequence,
    )
