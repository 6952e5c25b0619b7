"""The most urgent ticket first; among equals a ticket that is soon ready, then the ticket whose
tenant asked for the fewest bytes of late, then the first to ask (C6, C10). With one tenant it is
`warm_first`.
"""

from arbiter.core.view import Key, QueuedRequest


def key(w: QueuedRequest) -> Key:
    return (w.priority, not w.is_warm, w.virtual_start_bytes, w.asked_at, w.sequence)
