"""Out of the line with an answer (SPEC C7): a new ticket is closed, a sleeper sleeps on."""

from arbiter.errors import RequestError
from arbiter.ledger import Entry, State
from arbiter.rules.mind import Mind


def turn_away(mind: Mind, entry: Entry, error: RequestError) -> None:
    """A sleeper may ask again under the same ticket."""
    mind.displaced.pop((entry.holder, entry.model), None)
    if entry.state is State.QUEUED:
        mind.refuse(entry.ticket, error)
        mind.close(entry)
    else:
        mind.unqueue(entry)
        mind.say_no(entry.ticket, error)
