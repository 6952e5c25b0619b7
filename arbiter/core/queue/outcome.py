"""Says what came of one try at a queued ticket, and of one walk through a queue."""

from enum import Enum, auto


class Outcome(Enum):
    """Says what a step has done with a queued ticket. A step that may act returns one of these, so
    that its caller never takes "it was dealt with" for "it may not"."""

    GRANTED = auto()
    REJECTED = auto()  # answered with an error: a new ticket is closed, an asleep one sleeps on
    DEFERRED = auto()  # it keeps its place; what can be done for it has been asked for
    NOT_APPLICABLE = auto()  # the step has nothing to say of it, the next one goes on


class PassEnd(Enum):
    """Says how a walk through a node's queue ended."""

    DONE = auto()
    ORDER_CHANGED = auto()  # a grant made a ticket aged: walk again, from the front
