"""The arbiter's core, a deterministic state machine: `handle(event, now)` applies one event and
returns the decisions that follow.

The clock, the network and randomness are the caller's. Every call runs the same twelve steps in
this order: apply the event, fire the timers that are due, evict on overcommitted devices, grant
growth, run the grant pass over dirty nodes, take compactions further, estimate the wait of new
tickets, forget removed models, load again what had left for a lease of `arbiter free`, prefetch
what comes next, settle the clients' accounts, check the books of the devices that were touched.
Then it says when it wants to be called next.

A message about a ticket that has moved on is normal, because holders race with revokes and the
network repeats messages; the core counts it in `stale_count` and ignores it otherwise. An identity
that does not hold is a bug and raises LedgerBroken, after which the actor must crash.

The rules stand in folders by subject: `queue/` (admission, grants, placement), `eviction/`
(victims, sleep, pressure), `residency/` (heartbeats, readings, floors, growth, prefetch),
`tickets/` (loads, reclaim, leases, quotas); `records/` holds their data, `state.py` all of it.
"""

from collections.abc import Sequence
from typing import Any

from arbiter.core import events as ev
from arbiter.core import timeouts, types
from arbiter.core.decisions import Compacted, Decision, SetTimer
from arbiter.core.dispatch import apply
from arbiter.core.eviction import compaction, eviction
from arbiter.core.histogram import HistogramCounts
from arbiter.core.queue import grant_pass, wait_estimate
from arbiter.core.records.estimates import ModelKey
from arbiter.core.records.ticket import State
from arbiter.core.reports import dry_run, replica_targets
from arbiter.core.reports.explain import Explanation, explain
from arbiter.core.reports.plan import Plan, PlanQuestion
from arbiter.core.reports.snapshot import StateView, view_of
from arbiter.core.residency import (
    floors,
    growth,
    prefetch,
)
from arbiter.core.settings import Settings
from arbiter.core.state import CoreState, Foresight
from arbiter.core.tickets import lessees
from arbiter.core.view import Policies
from arbiter.units import Epoch, HolderId, Instant, NodeId, Span, TicketId, after, seconds

NEXT = Span(1)  # least time to the next step, which looks at what this step has left due


class Arbiter:
    """Runs one life of the arbiter. `known_holders` are the holders of the last epoch, which are
    expected back; `foresight` says when a model is next used, in a replay that knows."""

    def __init__(
        self,
        settings: Settings,
        policies: Policies,
        epoch: Epoch,
        known_holders: frozenset[HolderId],
        now: Instant,
        foresight: Foresight | None = None,
    ) -> None:
        self._state = state = CoreState(settings, policies, epoch, known_holders, now)
        state.foresight = foresight
        state.timers.set(("queue", ""), state.settled_at)
        state.timers.set(("audit", ""), after(now, settings.timeouts.audit))

    def handle(self, event: ev.Event, now: Instant) -> list[Decision]:
        """Applies one event and returns the decisions that follow from it. Raises RequestError,
        having changed nothing, for an event that cannot be: a capability that differs from the
        known one of its name, and what events/operators.py names for each. `now` never goes
        back."""
        state = self._state
        assert now >= state.now, "time went back"
        state.now = now
        state.decisions = []
        apply.registry.get(type(event), apply)(event, state)  # its own look-up takes 0.5 us
        timeouts.fire_due(state)
        eviction.evict_overcommitted(state)
        growth.grant_waiting(state)
        grant_pass.run(state)
        compaction.advance(state)
        wait_estimate.estimate_new(state)
        floors.forget_removed(state)
        floors.return_freed(state)
        prefetch.predict_next(state)
        state.accounts.settle(state.ledger.holdings, state.now)
        state.ledger.check_touched()
        if (at := state.timers.next()) is not None:
            state.decide(SetTimer(max(at, after(now, NEXT))))
        return state.decisions

    # -- reading -------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        """Returns the number of this life of the arbiter."""
        return self._state.epoch

    @property
    def settings(self) -> Settings:
        """Returns the settings that this life began with."""
        return self._state.settings

    @property
    def stale_count(self) -> int:
        """Returns how many messages were ignored because their ticket had moved on."""
        return self._state.stale_count

    def has_joined(self, holder: HolderId) -> bool:
        """Says whether a holder has joined this epoch and has not been lost since."""
        return holder in self._state.holders

    @property
    def awaited(self) -> frozenset[HolderId]:
        """Returns the holders of the last epoch that are expected back and have not joined."""
        return frozenset(self._state.awaited)

    @property
    def gave_up_waiting(self) -> bool:
        """Says whether holders that are not back by now count as dead."""
        return self._state.gave_up_waiting

    def state_of(self, ticket_id: TicketId) -> str:
        """Returns the state of a ticket; `closed` for a ticket that is not on the books."""
        ticket = self._state.ledger.find(ticket_id)
        return ticket.state.value if ticket else State.CLOSED.value

    def holder_of(self, ticket_id: TicketId) -> HolderId | None:
        """Returns the holder of a ticket; None for a ticket that is not on the books."""
        ticket = self._state.ledger.find(ticket_id)
        return ticket.holder if ticket else None

    def lease_history(self, ticket_id: TicketId) -> types.LeaseHistory:
        """Returns what the next epoch must know of a lease; `NO_HISTORY` for a ticket that is not
        on the books."""
        ticket = self._state.ledger.find(ticket_id)
        return lessees.history_of(self._state, ticket) if ticket else types.NO_HISTORY

    def check_grant(self, ticket_id: TicketId, node: NodeId) -> types.GrantCheck:
        """Says whether an engine may be spawned under this ticket on this node (A3). Under a lease
        none may."""
        state = self._state
        ticket = self._state.ledger.find(ticket_id)
        if ticket is None:
            if ticket_id in state.answers:
                return types.GrantCheck.ENDED
            may_rejoin = state.holders_may_rejoin
            return types.GrantCheck.SETTLING if may_rejoin else types.GrantCheck.NOT_GRANTED
        is_lease = ticket.lease is not None
        if ticket.state is State.QUEUED or ticket.node != node or is_lease:
            return types.GrantCheck.NOT_GRANTED
        is_ending = ticket.state is State.RECLAIMING
        return types.GrantCheck.ENDED if is_ending else types.GrantCheck.GRANTED

    @property
    def open_tickets_count(self) -> int:
        """Returns how many tickets are on the books."""
        return self._state.ledger.tickets_count

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Returns the nodes whose agents have introduced themselves, sorted."""
        return tuple(sorted(self._state.nodes))

    def nodes_with_copy(self, key: str) -> tuple[NodeId, ...]:
        """Returns the nodes whose agents have told of a copy of model files with that key."""
        nodes = self._state.nodes.items()
        return tuple(n for n, node in sorted(nodes) if any(c.key == key for c in node.copies))

    def snapshot(self, now: Instant) -> StateView:
        """Returns what people and the dashboard see, as of `now`."""
        return view_of(self._state, now)

    def explain(self, ticket_id: TicketId, now: Instant) -> Explanation:
        """Returns why a ticket waits, or why it went. Raises UnknownTicket."""
        return explain(self._state, ticket_id, now)

    def plan(self, question: PlanQuestion, now: Instant) -> Plan:
        """Returns what a request would bring about; changes nothing (K3)."""
        return dry_run.plan(self._state, question, now, _handle_on)

    def compaction(self, request: str) -> Compacted | None:
        """Returns how far a compaction has come; None when none of this name is under way."""
        return compaction.progress(self._state, request)

    def replica_targets(self, now: Instant) -> dict[str, int]:
        """Returns the replicas wanted of each capability. SetTimer also comes when a target
        changes."""
        return replica_targets.targets(self._state, now)

    @property
    def hours(self) -> frozenset[str]:
        """Returns the hours, as text, of all models and of batch work (C13): the shell tells the
        core by `HoursRead` which are open."""
        registry = self._state.registry
        named = {
            *registry.hours.values(),
            *registry.batch_hours.values(),
            self.settings.batch_hours,
        }
        return frozenset(named - {""})

    @property
    def registered(self) -> tuple[types.CapabilitySpec, ...]:
        """Returns the capabilities registered from Python, in that order (A2)."""
        return tuple(self._state.registry.registered.values())

    @property
    def model_names(self) -> tuple[types.ModelName, ...]:
        """Returns all models of the table and of Python."""
        specs = self._state.registry.specs.values()
        return tuple(types.ModelName(spec.name, m.name) for spec in specs for m in spec.models)

    @property
    def request_times(self) -> dict[tuple[str, str], HistogramCounts]:
        """Returns how long the requests took that have ended in this epoch (K2), by capability and
        outcome."""
        return {name: taken.read() for name, taken in self._state.request_times.items()}

    # -- across restarts -----------------------------------------------------------------------

    def export_learned(self) -> list[dict[str, Any]]:
        """Returns what was learned of models as plain rows; `restore_learned` reads them back."""
        return self._state.estimates.export()

    @property
    def learned_changes_count(self) -> int:
        """Returns a count that rises with each change of what `export_learned` returns."""
        return self._state.estimates.changes_count

    def learned_since(self, count: int) -> tuple[list[dict[str, Any]], list[ModelKey]]:
        """Returns the rows of `export_learned` that have changed since `learned_changes_count` was
        `count`, and the keys of those that it has no more."""
        return self._state.estimates.changed_since(count)

    def restore_learned(self, rows: list[dict[str, Any]]) -> None:
        """Takes back the rows of `export_learned`."""
        self._state.estimates.restore(rows)

    @property
    def used_models(self) -> list[types.ModelName]:
        """Returns the models of which `export_usage` has anything, the first used first."""
        return self._state.usage.models()

    def export_usage(self, names: Sequence[types.ModelName] | None = None) -> dict[str, Any]:
        """Returns how often, at which hours and after which others models are used (C11), as plain
        values; of these models only, where they are named. `restore_usage` reads them back."""
        return self._state.usage.export(names, self._state.now)

    def restore_usage(self, exported: dict[str, Any]) -> None:
        """Takes back the values of `export_usage`."""
        self._state.usage.restore(exported, self._state.now)

    def export_accounts(self) -> list[list[Any]]:
        """Returns what clients have used (C10) as plain rows; `restore_accounts` reads them
        back."""
        return self._state.accounts.export()

    def restore_accounts(self, rows: list[list[Any]]) -> None:
        """Takes back the rows of `export_accounts`."""
        self._state.accounts.restore(rows, self._state.now)

    def export_floors(self) -> list[list[str]]:
        """Returns rows of capability, model and floor; `restore_floors` reads them back."""
        return [[*name, floor.value] for name, floor in sorted(self._state.floors.items())]

    def restore_floors(self, rows: list[list[str]]) -> None:
        """Takes back the rows of `export_floors`. Raises ValueError for an unknown floor."""
        for capability, model, floor in rows:
            self._state.floors[types.ModelName(capability, model)] = types.Floor(floor)

    def export_removing(self) -> list[list[str]]:
        """Returns rows of capability and model, of models that were removed and are still held;
        `restore_removing` reads them back."""
        return [list(name) for name in sorted(self._state.removing)]

    def restore_removing(self, rows: list[list[str]]) -> None:
        """Takes back the rows of `export_removing`."""
        for capability, model in rows:
            self._state.removing[types.ModelName(capability, model)] = None

    def export_asked(self) -> list[list[str]]:
        """Returns rows of capability and model, of loads without a request that may yet begin, but
        for prefetches; `restore_asked` reads them back."""
        return [list(name) for name in sorted(floors.yet_to_begin(self._state))]

    def restore_asked(self, rows: list[list[str]]) -> None:
        """Takes back the rows of `export_asked`. What has been loaded since is not loaded again,
        because a holder that has it rejoins before grants are made."""
        for capability, model in rows:
            self._state.awaiting_holder[types.ModelName(capability, model)] = None
        if rows:
            self._state.timers.set(("floors", ""), self._state.settled_at)

    def restore_removed(self, ages_s: dict[str, float]) -> None:
        """Takes back how many seconds ago each tenant of `ages_s` was removed (E6)."""
        for tenant, age_s in ages_s.items():
            self._state.accounts.note_removed(tenant, after(self._state.now, seconds(-age_s)))

    def export_removed_models(self) -> list[list[Any]]:
        """Returns rows of capability, model and the instant of its removal, of models that agents
        which appear are told of (D9); `restore_removed_models` reads them back. Instants are as in
        `export_usage`."""
        return [[*name, at] for name, at in sorted(self._state.removed_models.items())]

    def restore_removed_models(self, rows: list[list[Any]]) -> None:
        """Takes back the rows of `export_removed_models`. An instant later than now is of a clock
        that has begun anew since, and counts as now. Called after `restore_usage`, whose rows may
        be older than the removal."""
        for capability, model, at in rows:
            name = types.ModelName(capability, model)
            self._state.removed_models[name] = min(Instant(at), self._state.now)
        floors.forget_uses(self._state, list(self._state.removed_models))


def _handle_on(copied: CoreState, event: ev.Event, now: Instant) -> list[Decision]:
    """Handles an event on a copy of the state, for a dry run."""
    twin = object.__new__(Arbiter)
    twin._state = copied
    return twin.handle(event, now)
