"""The line under anything that may happen to it (C6): what an onlooker counts who knows only
who asked when, and who was granted. And that looking only where something has changed misses
nothing: a look at everything never finds more to do."""

import copy
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, Grant, Refuse, Revoke
from arbiter.core.queue import grant_pass
from arbiter.core.records.ticket import State
from arbiter.core.settings import Timeouts
from arbiter.units import SECOND, HolderId, Instant, TicketId, seconds
from tests.support.core_driver import NODE, PATIENT, PLAIN, CoreDriver, s
from tests.support.examples import examples

MOST_COUNT, MOST_S = 3, 30
DEVICE = 40
TERMS: Timeouts = replace(PATIENT, barrier=seconds(4))
MODELS = "abcde"


class RequestQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.driver = CoreDriver(
            DEVICE,
            20,
            replace(PLAIN, timeouts=TERMS, bypass_count=MOST_COUNT),
            holders=("h0", "h1", "h2"),
        )
        self.number = 0
        self.asked: dict[str, float] = {}  # when, of those who wait
        self.order: dict[str, int] = {}
        self.bypassed: dict[str, int] = {}

    def feed(self, event: ev.Event) -> list[Decision]:
        states = {e.id: e.state for e in self.driver.tickets()}
        decisions = self.driver.at(self.now, event)
        for decision in decisions:
            match decision:
                case Grant(ticket) if states.get(ticket) in (None, State.QUEUED, State.ASLEEP):
                    self.granted(ticket, states)
                case Refuse(ticket):
                    self.asked.pop(ticket, None)
        return decisions

    def granted(self, ticket: str, states: dict[TicketId, State]) -> None:
        since = self.order.get(ticket, self.number)
        self.asked.pop(ticket, None)
        for other, asked in self.asked.items():
            competes = states.get(TicketId(other)) in (State.QUEUED, State.ASLEEP)
            if competes and self.order[other] < since:
                self.bypassed[other] += 1
                assert self.bypassed[other] <= MOST_COUNT, f"{other} bypassed by {ticket}"
                assert self.now - asked < MOST_S, f"{other} waits for {self.now - asked} s"

    # -- what may happen -------------------------------------------------------------------------

    @rule(
        model=st.sampled_from(MODELS), size=st.sampled_from([1, 2, 5, 15, 40]),
        holder=st.integers(0, 2), priority=st.sampled_from(types.Priority), sleeps=st.booleans(),
    )  # fmt: skip
    def ask(
        self, model: str, size: int, holder: int, priority: types.Priority, sleeps: bool
    ) -> None:
        self.number += 1
        name = f"{model}{self.number}"
        self.asked[name], self.bypassed[name], self.order[name] = self.now, 0, self.number
        self.send_request(name, model, size, holder, priority, sleeps)

    def send_request(
        self, name: str, model: str, size: int, holder: int, priority: types.Priority, sleeps: bool
    ) -> None:
        need = types.Need(size << 30, host_bytes=(size << 30) if sleeps else 0)  # type: ignore[arg-type]
        self.feed(ev.Requested(
            TicketId(name), HolderId(f"h{holder}"), "text", model, need, "", True,
            priority=priority,
        ))  # fmt: skip

    def one(self, state: State, pick: int) -> TicketId | None:
        tickets = [e.id for e in self.driver.tickets(state)]
        return tickets[pick % len(tickets)] if tickets else None

    @rule(pick=st.integers(0, 20), what=st.sampled_from(["loaded", "loaded", "broke", "left"]))
    def load_ends(self, pick: int, what: str) -> None:
        if ticket := self.one(State.LOADING, pick):
            self.feed({
                "loaded": ev.Loaded(ticket, seconds(1)),
                "broke": ev.LoadBroke(ticket, "x", True),
                "left": ev.Withdrawn(ticket),
            }[what])  # fmt: skip

    @rule(pick=st.integers(0, 20), inflight=st.integers(0, 1))
    def beats(self, pick: int, inflight: int) -> None:
        if ticket := self.one(State.RESIDENT, pick):
            holder = self.driver.find(ticket).holder
            held = tuple(
                self.driver.held(e.id, inflight=inflight, t=self.now)
                for e in self.driver.tickets_of(holder)
                if e.state.value in ("loading", "resident", "draining", "asleep")
            )
            self.feed(ev.Renewed(holder, held))

    @rule(
        pick=st.integers(0, 20), how=st.sampled_from(["released", "released", "slept", "dropped"])
    )
    def drained(self, pick: int, how: str) -> None:
        if ticket := self.one(State.DRAINING, pick):
            if how == "slept":
                self.driver.engines[ticket] = {}
                self.feed(ev.Slept(ticket))
                self.read()
            else:
                what = {"released": ev.Released(ticket, "swap")}
                self.feed(what.get(how, ev.BarrierDropped(ticket, 1)))

    @rule()
    def read(self) -> None:
        devices = tuple(
            ev.DeviceReading(d, 0, 0)
            for d in self.driver.devices_of("n")  # type: ignore[arg-type]
        )
        self.feed(ev.Measured("n", devices, ()))  # type: ignore[arg-type]

    @rule(pick=st.integers(0, 20))
    def bytes_come_back(self, pick: int) -> None:
        if ticket := self.one(State.RECLAIMING, pick):
            self.feed(ev.EngineGone("n", ticket, True))  # type: ignore[arg-type]

    @rule(pick=st.integers(0, 20), priority=st.sampled_from(types.Priority))
    def wake(self, pick: int, priority: types.Priority) -> None:
        if (ticket_id := self.one(State.ASLEEP, pick)) and ticket_id not in self.asked:
            self.number += 1
            self.asked[ticket_id], self.bypassed[ticket_id] = self.now, 0
            self.order[ticket_id] = self.number
            ticket = self.driver.find(ticket_id)
            self.feed(ev.Requested(
                ticket_id, ticket.holder, "text", ticket.model, ticket.need, "", True,
                priority=priority,
            ))  # fmt: skip

    @rule(pick=st.integers(0, 20), priority=st.sampled_from(types.Priority))
    def raise_priority(self, pick: int, priority: types.Priority) -> None:
        if ticket_id := self.one(State.QUEUED, pick):
            ticket = self.driver.find(ticket_id)
            self.feed(ev.Requested(
                ticket_id, ticket.holder, "text", ticket.model, ticket.need, "", True,
                priority=priority,
            ))  # fmt: skip

    @rule(tenths=st.integers(1, 120))
    def time_passes(self, tenths: int) -> None:
        """In the steps that the core asked for, as a shell would."""
        until = self.now + tenths / 10
        for _ in range(1000):
            next_at = min(self.driver.timers, default=Instant(10**18))
            if next_at > s(until):
                break
            self.now = max(self.now, next_at / SECOND)
            self.feed(ev.TimerFired())
        self.now = until
        self.feed(ev.TimerFired())

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def queued_tickets_are_in_the_queue(self) -> None:
        assert set(self.driver.queue()) <= set(self.asked)

    @invariant()
    def policy_order_holds_behind_aged_tickets(self) -> None:
        rows = self.driver.request_queue.at(NODE)
        assert [w.key for w in rows] == sorted(w.key for w in rows)
        dues = [w.is_aged for w in rows]
        assert dues == sorted(dues, reverse=True)
        plain = [(w.request.priority, not w.request.is_warm) for w in rows if not w.is_aged]
        assert plain == sorted(plain)

    @precondition(lambda self: self.number % 3 == 0)
    @invariant()
    def full_grant_pass_finds_nothing_more_to_do(self) -> None:
        state = copy.deepcopy(self.driver.state)
        for _ in range(2):  # what was decided last may have opened the way for one more step
            state.decisions = []
            grant_pass.run(state)
        state.decisions = []
        state.mark_dirty(*state.nodes)
        grant_pass.run(state)
        assert not [d for d in state.decisions if isinstance(d, Grant | Revoke)]

    @invariant()
    def no_byte_is_lent_twice(self) -> None:
        assert self.driver.account().free_bytes >= 0
        self.driver.audit()


TestRequestQueue = RequestQueueMachine.TestCase
TestRequestQueue.settings = settings(
    max_examples=examples(120),
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
