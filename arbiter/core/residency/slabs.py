"""What nodes keep in their pools beyond the engines that wrote it (E1, E4, E6)."""

from arbiter.core import events as ev
from arbiter.core.decisions import DropSlabs, DropTenant, EventKind, ForgetTenant, PurgeCaches
from arbiter.core.records.ticket import State
from arbiter.core.state import CoreState, Node
from arbiter.core.types import ModelName
from arbiter.units import SECOND, HolderId, NodeId, Span, since

# An agent or a holder that appears is told for so long of a removed tenant or model: no row and no
# file outlives its last use by more (the class `extended`, G4).
TOLD_AGAIN = Span(24 * 3_600 * SECOND)


def note_slabs(state: CoreState, node: Node, event: ev.Measured) -> None:
    """Takes what a node tells of its pool, and has writers do what is theirs: a model whose slab
    has more than it may shrinks it, and a model with rows of a removed tenant erases them. Asleep
    it does so as well, because that needs no weights."""
    node.slabs, node.contents = event.slabs, event.contents
    for slab in event.slabs:
        ticket = state.ledger.find(slab.ticket) if slab.ticket else None
        has_work = slab.allocated_bytes > slab.limit_bytes or slab.must_erase
        if ticket and ticket.state in (State.RESIDENT, State.ASLEEP) and has_work:
            state.decide(PurgeCaches(ticket.id, ticket.holder, only_slabs=True))
    for gone in event.dropped:
        state.log(
            EventKind.SLAB_DROPPED,
            node=node.node,
            slab=gone.slab,
            content=gone.content,
            owner=gone.owner,
            size=gone.size_bytes,
            reason=gone.reason,
            saved=gone.was_saved,
        )


def on_tenant_removed(state: CoreState, event: ev.TenantRemoved) -> None:
    """Has every node erase what the tenant's requests left, also nodes whose agent is away now. The
    holders forget its prefixes first, so that none brings them back."""
    state.accounts.note_removed(event.tenant, state.now)
    for holder in state.holders:
        state.decide(ForgetTenant(holder, event.tenant))
    for node in state.nodes:
        state.decide(DropTenant(node, event.tenant, Span(0)))
    state.log(EventKind.TENANT_REMOVED, tenant=event.tenant, nodes=len(state.nodes))


def on_holder_joined(state: CoreState, holder: HolderId) -> None:
    """Has a holder forget the tenants that were removed lately: it may have been away when all were
    told, and would bring their prefixes back into the pool."""
    for tenant in state.accounts.lately_removed(TOLD_AGAIN, state.now):
        state.decide(ForgetTenant(holder, tenant))


def on_agent_seen(state: CoreState, node: NodeId) -> None:
    """Tells an agent that has just appeared of the tenants and models that were removed lately: it
    may have been away when all were told (E6, D9)."""
    for tenant, ago in state.accounts.lately_removed(TOLD_AGAIN, state.now).items():
        state.decide(DropTenant(node, tenant, ago))
    for name in lately_removed_models(state):
        state.decide(DropSlabs(node, name.path))


def lately_removed_models(state: CoreState) -> list[ModelName]:
    """Returns the models that were removed so lately that agents are told of it. Forgets the
    others."""
    removed = state.removed_models.items()
    lately = {name: at for name, at in removed if since(at, state.now) < TOLD_AGAIN}
    state.removed_models = lately
    return list(lately)
