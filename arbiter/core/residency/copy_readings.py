"""What the core knows of copies of models' files that engines of a node share in host RAM (D4).

The node agent holds each of them under a lease of its own (queue/copy_grants.py). While an engine
has a copy open it is in use; otherwise it is the first to leave when host RAM is short.
"""

from arbiter.core import events as ev
from arbiter.core.records.ticket import Ticket
from arbiter.core.state import CoreState, Node
from arbiter.units import Instant


def note_use(state: CoreState, ticket: Ticket, held: ev.HeldTicket) -> None:
    """Takes the agent's word on how many engines have a copy open. Any other lease is never in
    use."""
    if not ticket.is_host_copy:
        return
    if (ticket.inflight == 0) != (held.inflight == 0):
        state.mark_dirty(ticket.node)  # it may leave now, or no longer
    last_used = state.now if held.inflight else ticket.last_used
    ticket.note_use(held.inflight, ticket.priority, Instant(last_used))
    state.ledger.touch(ticket)


def note_copies(state: CoreState, node: Node, event: ev.Measured) -> None:
    """Takes what a node tells of its copies: tickets for their models are warm there (C6)."""
    if node.copies != event.copies:
        node.copies = event.copies
        models = (model for copy in event.copies for model in copy.models)
        state.queue.note_copies(node.node, frozenset(models))
