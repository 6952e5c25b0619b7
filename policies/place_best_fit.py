"""Prefers a device where the ticket fits; of such devices one without a copy of the model, then the
device where it was last, then the smallest hole, then the least crowded. Where it fits nowhere, the
device that lacks least.

Copies apart: one device lost or busy leaves the other. Where it was: a model does not wander
because holes of about its size come and go.
"""

from arbiter.core.view import Key, PlacementOption


def key(s: PlacementOption) -> Key:
    left_bytes = s.free_bytes - s.need_bytes
    return (
        left_bytes < 0,
        s.copies_count,
        not s.was_home,
        abs(left_bytes),
        s.tickets_count,
        s.device,
    )
