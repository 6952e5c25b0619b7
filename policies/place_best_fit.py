"""Prefers devices on which the ticket fits. Among these it prefers a device without a copy of the
model, then the device where the model was last, then the device with the fewest bytes left, then
the device with the fewest tickets. Where the ticket fits nowhere, the device that lacks the fewest
bytes is best.

Two copies of a model are kept apart, because one device lost or busy leaves the other. A model
returns to its last device, so that it does not wander as gaps of about its size come and go.
"""

from arbiter.core.view import Key, PlacementOption


def key(option: PlacementOption) -> Key:
    """Returns the place of a device among those that may hold the ticket; the lowest is best."""
    left_bytes = option.free_bytes - option.need_bytes
    return (
        left_bytes < 0,
        option.copies_count,
        not option.was_home,
        abs(left_bytes),
        option.tickets_count,
        option.device,
    )
