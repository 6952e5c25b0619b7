"""Optional exclusion groups (SPEC A11): of a role that is named, one resident model on each node.

The one that asks swaps with the one that is there, as lawfully as for want of bytes.
"""

from arbiter.decisions import Reason
from arbiter.events import Priority
from arbiter.ledger import Entry, State
from arbiter.rules.eviction import may_swap, revoke
from arbiter.rules.loads import displace
from arbiter.rules.mind import Mind

AWAKE = frozenset({State.LOADING, State.RESIDENT, State.DRAINING})


def stands_in_the_way(mind: Mind, entry: Entry, urgent: Priority) -> bool:
    """Another model of its role is awake on its node; if it lawfully may, it is asked to leave."""
    if entry.role not in mind.settings.one_resident_roles:
        return False
    others = [e for e in _awake_on(mind, entry) if _excludes(e, entry)]
    residents = [e for e in others if e.state is State.RESIDENT]
    if residents and all(may_swap(mind, e, entry, urgent) for e in residents):
        for victim in residents:
            displace(mind, entry, victim)
            revoke(mind, victim, Reason.SWAP, entry)
    return bool(others)


def _awake_on(mind: Mind, entry: Entry) -> list[Entry]:
    node = mind.nodes[entry.node]
    books = (mind.ledger.books[d] for d in sorted(node.devices))
    found = {e.ticket: e for b in books for e in b.entries.values()}
    return [e for e in found.values() if e.lives_in is None]


def _excludes(one: Entry, other: Entry) -> bool:
    """Replicas of one model do not exclude each other."""
    same_model = (one.capability, one.model) == (other.capability, other.model)
    return one.state in AWAKE and one.role == other.role and not same_model
