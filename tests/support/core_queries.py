"""What a test asks of an arbiter's core, so that no test reads its private state."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.core.records.accounts import Account
from arbiter.core.records.estimates import Estimates
from arbiter.core.records.holdings import Holdings
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ledger import audit as audit_books
from arbiter.core.records.request_queue import RequestQueue
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.reports.snapshot import StateView
from arbiter.core.state import CoreState
from arbiter.errors import RequestError
from arbiter.units import GIB, SECOND, DeviceId, HolderId, Instant, NodeId, TicketId

CPU = DeviceId("n/cpu:0")


class CoreQueries:
    def __init__(self, arbiter: Arbiter) -> None:
        self.arbiter = arbiter

    @property
    def state(self) -> CoreState:
        """For rules that take it as their argument; a test reads nothing through it."""
        return self.arbiter._state

    # -- tickets -------------------------------------------------------------------------------

    def find(self, name: str) -> Ticket | None:
        return self.state.ledger.find(TicketId(name))

    def ticket(self, name: str) -> Ticket:
        ticket = self.find(name)
        assert ticket is not None, f"no open ticket {name!r}"
        return ticket

    def tickets(self, *states: State) -> list[Ticket]:
        return self.state.ledger.tickets(*states)

    def tickets_of(self, holder: str) -> list[Ticket]:
        return self.state.ledger.held_by(HolderId(holder))

    def tickets_of_model(self, model: str) -> list[str]:
        """Of a text model."""
        return [e.id for e in self.state.ledger.of_model(types.ModelName("text", model))]

    def state_of(self, name: str) -> str:
        ticket = self.find(name)
        return ticket.state.value if ticket else "closed"

    def queue(self) -> list[TicketId]:
        """In the order of their turns, node by node."""
        return self.state.queue.tickets()

    @property
    def request_queue(self) -> RequestQueue:
        return self.state.queue

    def wasteful(self) -> set[TicketId]:
        """What counts as holding enough beyond its need."""
        return {*self.state.compactions.wasteful}

    def parts_that_name(self, name: str) -> set[str]:
        """The parts of the state that refer to a node, or to a device of it. What people are told
        of past evictions, which are kept in a bounded number, is left out."""
        parts = {part: value for part, value in vars(self.state).items() if part != "evictions"}
        return {part for part, value in parts.items() if name.encode() in pickle.dumps(value)}

    def wrap_policies(self, wrap: Callable[[Any], Any]) -> None:
        """Puts another function in the place of each policy, before the first ticket."""
        state = self.state
        names = ("evict", "admit", "place", "keep_warm", "pressure")
        wrapped = {name: wrap(getattr(state.policies, name)) for name in names}
        state.policies = replace(state.policies, **wrapped)
        state.queue = RequestQueue(state.policies.admit)

    @property
    def turnovers(self) -> float:
        """The clock of what was learned of reuse."""
        return self.state.usage.reuse.clock

    def turn_over(self, turnovers: float) -> None:
        """As if loads elsewhere had ended, a nanosecond later."""
        self.state.usage.reuse.loaded(turnovers)
        self.state.now = Instant(self.state.now + 1)

    def growing(self) -> set[TicketId]:
        return {*self.state.growing}

    def answer(self, name: str) -> RequestError:
        """The final answer to a ticket that was refused."""
        return self.state.answers[TicketId(name)]

    def has_answer(self, name: str) -> bool:
        return name in self.state.answers

    def evictions_of(self, name: str) -> list[object]:
        """What is remembered of why it went."""
        return [*self.state.evictions.about(TicketId(name))]

    def move(self, ticket: Ticket, to: State, at: Instant, **fields: Any) -> None:
        self.state.ledger.move(ticket, to, at, **fields)

    def pin(self, name: str) -> None:
        self.state.ledger.pin(self.ticket(name), True)

    # -- devices -------------------------------------------------------------------------------

    def account(self, device: str = CPU) -> DeviceAccount:
        return self.state.ledger.books[DeviceId(device)]

    def accounts(self) -> dict[DeviceId, DeviceAccount]:
        return {**self.state.ledger.books}

    def devices_of(self, node: str) -> list[DeviceId]:
        return [*self.state.nodes[NodeId(node)].devices]

    def free(self, device: DeviceId = CPU) -> float:
        return self.account(device).free_bytes / GIB

    def charged(self, device: DeviceId = CPU) -> float:
        return self.account(device).charged_bytes / GIB

    def audit(self) -> None:
        audit_books(self.state.ledger)

    @property
    def holdings(self) -> Holdings:
        return self.state.ledger.holdings

    # -- nodes, holders, models ------------------------------------------------------------------

    def nodes(self) -> set[NodeId]:
        return {*self.state.nodes}

    def unclaimed(self, node: str) -> set[TicketId]:
        """Engines on the node that no ticket names."""
        return {*self.state.nodes[NodeId(node)].unclaimed}

    def awaited(self) -> set[HolderId]:
        """Holders of the epoch before that have not joined again."""
        return {*self.state.awaited}

    def is_settled(self) -> bool:
        return self.state.is_settled

    def charged_tickets_of(self, holder: str) -> list[Ticket]:
        return [*self.state.ledger.holding(HolderId(holder)).values()]

    def capabilities(self) -> dict[str, types.CapabilitySpec]:
        return {**self.state.registry.specs}

    def client_account(self, tenant: str) -> Account:
        return self.state.accounts.rows[types.Client(tenant)]

    def floors(self) -> dict[types.ModelName, types.Floor]:
        return {**self.state.floors}

    def usage_rates(self, model: str, at: Instant | None = None) -> tuple[float, float]:
        """Of a text model: within the last window, and within the last days."""
        at, name = self.now if at is None else at, types.ModelName("text", model)
        return self.state.usage.rates.recent(name, at), self.state.usage.lasting_rates.recent(
            name, at
        )

    @property
    def transition_counts(self) -> dict[types.ModelName, dict[types.ModelName, int]]:
        """How often each model was used after which; a test may write it."""
        return self.state.usage.transition_counts

    def last_used(self) -> tuple[types.ModelName, Instant] | None:
        return self.state.usage.last_used

    def forget_prefetches(self) -> None:
        self.state.prefetched.clear()
        self.state.awaiting_holder.clear()

    def evicted_for(self) -> dict[Any, Any]:
        """What is loaded again when the load that it made room for fails."""
        return {**self.state.evicted_for}

    # -- time ------------------------------------------------------------------------------------

    def next_timer(self) -> Instant | None:
        return self.state.timers.next()

    def lose_timers(self, next_audit_s: float | None = None) -> None:
        """All of them, but for an audit."""
        self.state.timers.due(Instant(10**18))
        if next_audit_s is not None:
            self.state.timers.set(("audit", ""), Instant(round(next_audit_s * SECOND)))

    def set_timer(self, name: str, at: Instant) -> None:
        self.state.set_timer(self.ticket(name), at)

    def note_uses(self, name: str, count: int) -> None:
        self.state.note_uses(self.ticket(name), count)

    @property
    def now(self) -> Instant:
        return self.state.now

    @property
    def estimates(self) -> Estimates:
        return self.state.estimates

    def snapshot(self) -> StateView:
        return self.arbiter.snapshot(self.now)

    def holders(self) -> set[HolderId]:
        return {*self.state.holders}
