"""Optional exclusion groups (A11): of a role that is named, one model awake on each node."""

from arbiter.core.records.ticket import AWAKE, Ticket
from arbiter.core.state import CoreState
from arbiter.core.types import ModelName
from arbiter.units import NodeId


def excluded_by(state: CoreState, node: NodeId, role: str, name: ModelName) -> list[Ticket]:
    """Returns the tickets that keep a model off a node: those of its exclusion group that are awake
    there. Replicas of one model do not exclude each other."""
    if role not in state.settings.one_resident_roles:
        return []
    books = (state.ledger.books[d] for d in sorted(state.nodes[node].devices))
    tickets = {t.id: t for b in books for t in b.tickets.values()}
    return [
        t for t in tickets.values() if t.state in AWAKE and t.role == role and t.model_name != name
    ]
