"""Feeds a core any sequence of events, and holds a model of its books that is too simple to be
wrong against it."""

import copy
import pickle
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import (
    Compacted,
    Decision,
    Grant,
    KillEngine,
    Reason,
    Refuse,
    Revoke,
    SetTimer,
)
from arbiter.core.eviction.protection import min_residency_ends
from arbiter.core.eviction.ranking import effective_priority
from arbiter.core.records.ticket import CHARGED, State, Ticket
from arbiter.core.settings import DEFAULTS, Timeouts
from arbiter.errors import NEVER_JOINED, StaleEpoch
from arbiter.units import (
    SECOND,
    Bytes,
    DeviceId,
    Epoch,
    HolderId,
    Instant,
    NodeId,
    TicketId,
    seconds,
)
from policies import bundle
from tests.support.core_queries import CoreQueries

NODE, CPU, HOST = NodeId("n"), DeviceId("n/cpu:0"), DeviceId("n/host")
TICKETS = st.sampled_from([TicketId(c) for c in "abcdef"])
HOLDER_OF = {t: HolderId("h1" if t in "abc" else "h2") for t in "abcdef"}
HOLDERS = st.sampled_from([HolderId("h1"), HolderId("h2")])
PINNED = "c"
SETTINGS = replace(
    DEFAULTS,
    arena_fraction=1.0,
    wiggle_fraction=0.0,
    compact_least_bytes=Bytes(1),
    compact_every_loads_count=5,
    timeouts=replace(Timeouts(), reading=seconds(60), silent=seconds(40), lost=seconds(200)),
)
SIZES = st.integers(1, 12)
# The core picks an idle ticket for these; what the holder does when it is busy after all is
# `Reason.only_if_idle`.
PICKED_IDLE = (
    Reason.PRESSURE, Reason.IDLE, Reason.FIT, Reason.MANUAL, Reason.SHUTDOWN, Reason.FREE,
    Reason.COMPACT,
)  # fmt: skip


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = Instant(0)
        self.arbiter = Arbiter(SETTINGS, bundle(SETTINGS), Epoch(1), frozenset({"h2"}), self.now)
        self.core = CoreQueries(self.arbiter)
        self.born = pickle.dumps(self.arbiter)
        self.log: list[tuple[ev.Event, Instant, bytes]] = []
        # The model: granted (or rejoined) and not yet seen back, on which devices how much.
        self.held: dict[TicketId, dict[DeviceId, int]] = {}
        self.measured: dict[TicketId, dict[DeviceId, int]] = {}
        self.asked: set[TicketId] = set()  # and not yet answered
        self.growing: set[TicketId] = set()  # and not yet answered
        self.compacted: set[str] = set()  # requests that were answered
        self.answers: dict[TicketId, Grant | Refuse] = {}
        self.budget = {CPU: 10, HOST: 6}
        self.foreign = {CPU: 0, HOST: 0}
        specs = tuple(types.ModelSpec(m, seconds(20), m == PINNED) for m in "abcdef")
        self.feed(
            ev.CapabilitiesSet(
                (types.CapabilitySpec("text", "embedding", "x", specs, seconds(60)),)
            )
        )
        self.see_node()
        self.feed(ev.Joined(HolderId("h1"), NODE, "text", ()))
        self.reading({}, 0, 0)

    def feed(self, event: ev.Event) -> None:
        before = {e.id: copy.copy(e) for e in self.core.tickets()}
        decisions = self.arbiter.handle(event, self.now)
        self.log.append((event, self.now, pickle.dumps(decisions)))
        for decision in decisions:
            self.judge(decision, event, before)
        self.forget_ended(event)

    def forget_ended(self, event: ev.Event) -> None:
        """Bytes leave the books only when they are seen back, or with their node."""
        for ticket in [t for t in self.held if self.core.find(t) is None]:
            seen_back = event == ev.EngineGone(NODE, ticket, True)
            assert seen_back or isinstance(event, ev.NodeLost), f"{ticket} freed by {event}"
            del self.held[ticket]

    # -- what each decision must satisfy ---------------------------------------------------------

    def judge(self, decision: Decision, event: ev.Event, before: dict[TicketId, Ticket]) -> None:
        match decision:
            case Grant():
                self.judge_grant(decision, event, before)
            case Refuse(ticket):
                self.judge_refusal(decision, event, before)
            case Revoke():
                self.judge_revoke(decision, before.get(decision.ticket))
            case KillEngine(_, ticket):
                on_books = ticket in self.held
                unclaimed = ticket in self.measured and ticket not in self.held
                assert on_books or unclaimed, f"killed {ticket}, which holds nothing"
            case Compacted():
                self.judge_compaction(decision, event)
            case SetTimer(at):
                assert at > self.now

    def judge_grant(self, grant: Grant, event: ev.Event, before: dict[TicketId, Ticket]) -> None:
        ticket = grant.ticket
        if ticket in self.growing and not isinstance(event, ev.Requested):
            self.growing.discard(ticket)
            assert all(self.core.account(p.device).free_bytes >= 0 for p in grant.devices)
            self.held[ticket] = {p.device: int(p.size_bytes) for p in grant.devices}
            return
        if ticket in self.held and before[ticket].state is not State.ASLEEP:
            repeats = isinstance(event, ev.Requested) and event.ticket == ticket
            if repeats and ticket not in self.asked:
                first = self.answers.get(ticket)
                assert not isinstance(first, Grant) or first == grant
            return  # asked again, answered again; or back in service
        assert ticket in self.asked, f"{ticket} was granted without asking"
        assert grant.load_by > self.now
        for part in grant.devices:
            assert self.core.account(part.device).free_bytes >= 0
        self.asked.discard(ticket)
        self.answers[ticket] = grant
        self.held[ticket] = {p.device: int(p.size_bytes) for p in grant.devices}

    def judge_refusal(
        self, refusal: Refuse, event: ev.Event, before: dict[TicketId, Ticket]
    ) -> None:
        ticket = refusal.ticket
        if ticket in self.growing or isinstance(event, ev.GrowthAsked):
            self.growing.discard(ticket)
            return
        asked_now = isinstance(event, ev.Requested) and event.ticket == ticket
        assert ticket in self.asked or asked_now, f"{ticket} was refused without asking"
        first = self.answers.get(ticket)
        if ticket not in before and isinstance(first, Refuse):
            assert first == refusal, "a repeated question got another answer"
        self.asked.discard(ticket)
        for_now = isinstance(refusal.error, StaleEpoch) and refusal.error.sent == NEVER_JOINED
        if self.core.find(ticket) is None and not for_now:
            self.answers[ticket] = refusal

    def judge_compaction(self, answer: Compacted, event: ev.Event) -> None:
        """It says once what came of it, and of no model both that it was freed and spared."""
        assert answer.is_finished and self.arbiter.compaction(answer.request) is None
        assert answer.request not in self.compacted, "it was answered twice"
        if answer.request.startswith(("for ", "loads of ")):
            return  # these may come again
        self.compacted.add(answer.request)
        if isinstance(event, ev.CompactAsked) and event.request == answer.request:
            assert answer.freed_count == 0, "its models were freed in no time"

    def judge_revoke(self, revoke: Revoke, before: Ticket | None) -> None:
        assert revoke.barrier_until >= self.now
        ticket = self.core.find(revoke.ticket)
        if before is None or ticket is None or ticket.state is not State.DRAINING:
            return
        if before.state is State.DRAINING:
            return  # repeated to a holder that joined again
        assert before.state in (State.RESIDENT, State.LOADING)  # loaded by this very heartbeat
        assert not ticket.pinned or revoke.reason in (Reason.MANUAL, Reason.SHUTDOWN)
        if revoke.reason in PICKED_IDLE:
            assert ticket.inflight == 0
        if revoke.reason is Reason.SWAP:
            resident = copy.copy(ticket)
            resident.state = State.RESIDENT
            most_urgent = min(e.priority for e in self.core.tickets() if e is not ticket)
            assert most_urgent <= effective_priority(self.core.state, resident)
            if most_urgent == effective_priority(self.core.state, resident):
                assert self.now >= min_residency_ends(self.core.state, resident)
            assert self.now >= ticket.declined_until

    def state_of(self, ticket_id: TicketId) -> State | None:
        ticket = self.core.find(ticket_id)
        return ticket.state if ticket else None

    # -- anything that may happen ----------------------------------------------------------------

    @rule(
        ticket=TICKETS, size=SIZES, sleeps=st.booleans(), attempt=st.integers(1, 2),
        priority=st.sampled_from(types.Priority),
    )  # fmt: skip
    def request(
        self, ticket: TicketId, size: int, sleeps: bool, attempt: int, priority: types.Priority
    ) -> None:
        self.asked.add(ticket)
        need = types.Need(Bytes(size), host_bytes=Bytes(size if sleeps else 0))
        deadline = seconds(30) if size % 2 else None
        self.feed(ev.Requested(
            ticket, HOLDER_OF[ticket], "text", ticket, need, "", True, deadline, attempt,
            priority,
        ))  # fmt: skip
        if self.core.find(ticket) is None or self.state_of(ticket) in (
            State.LOADING, State.RESIDENT, State.RECLAIMING
        ):  # fmt: skip
            self.asked.discard(ticket)

    @rule(ticket=TICKETS, kind=st.sampled_from(["loaded", "oom", "broke", "busy", "dropped"]))
    def holder_says(self, ticket: TicketId, kind: str) -> None:
        self.feed({
            "loaded": ev.Loaded(ticket, seconds(2)),
            "oom": ev.LoadBroke(ticket, "out of memory", True),
            "broke": ev.LoadBroke(ticket, "x", False),
            "busy": ev.Busy(ticket, 1),
            "dropped": ev.BarrierDropped(ticket, 2),
        }[kind])  # fmt: skip

    @rule(ticket=TICKETS, more=st.integers(0, 6))
    def grow(self, ticket: TicketId, more: int) -> None:
        if self.state_of(ticket) is State.RESIDENT:
            self.growing.add(ticket)
        self.feed(ev.GrowthAsked(ticket, Bytes(more), seconds(10)))

    @rule(ticket_id=TICKETS, less=st.integers(1, 6))
    def give_back(self, ticket_id: TicketId, less: int) -> None:
        has_less = dict(self.held.get(ticket_id, {}))
        if self.state_of(ticket_id) is State.RESIDENT:
            ticket = self.core.find(ticket_id)
            assert len(ticket.home) <= 1
            has_less = {d: max(0, b - less) for d, b in ticket.home.items()}
            # So soon after it grew again its message may be from before that: it stays charged as
            # granted until a heartbeat confirms it.
            if ticket.grown is None or self.now >= ticket.grown.shrinks_from:
                self.held[ticket_id] = has_less
        has = tuple(types.DeviceBytes(d, Bytes(b)) for d, b in has_less.items())
        self.feed(ev.GaveBack(ticket_id, has))
        once = dict(ticket.home) if (ticket := self.core.find(ticket_id)) else {}
        self.feed(ev.GaveBack(ticket_id, has))
        assert once == (ticket.home if ticket else {}), "repeated, it gave back twice"

    @rule(ticket=TICKETS, kind=st.sampled_from(["slept", "released", "withdrawn", "unload"]))
    def holder_leaves(self, ticket: TicketId, kind: str) -> None:
        self.feed({
            "slept": ev.Slept(ticket),
            "released": ev.Released(ticket, "swap"),
            "withdrawn": ev.Withdrawn(ticket),
            "unload": ev.UnloadAsked(ticket),
        }[kind])  # fmt: skip
        if kind in ("withdrawn", "released") and self.state_of(ticket) in (None, State.ASLEEP):
            self.asked.discard(ticket)

    def account(self, holder: HolderId, phase: types.Phase, inflight: int) -> list[ev.HeldTicket]:
        return [
            ev.HeldTicket(
                t, t, phase, inflight, seconds(0 if inflight else 1),
                tuple(types.DeviceBytes(d, Bytes(b)) for d, b in sorted(self.held[t].items())),
                e.need if (e := self.core.find(t)) else types.Need(Bytes(3)),
            )
            for t in sorted(self.held) if HOLDER_OF[t] == holder
        ]  # fmt: skip

    @rule(
        holder=HOLDERS, phase=st.sampled_from(types.Phase), inflight=st.integers(0, 2),
        forgets=st.booleans(),
    )  # fmt: skip
    def renew(self, holder: HolderId, phase: types.Phase, inflight: int, forgets: bool) -> None:
        held = self.account(holder, phase, inflight)
        self.feed(ev.Renewed(holder, tuple(held[forgets:])))

    @rule(
        holder=HOLDERS, ticket=TICKETS, phase=st.sampled_from(types.Phase), size=st.integers(1, 8)
    )
    def join(self, holder: HolderId, ticket: TicketId, phase: types.Phase, size: int) -> None:
        """With one ticket the arbiter may not know: bytes from before a restart."""
        held = self.account(holder, types.Phase.RESIDENT, 0)
        fresh = not self.core.has_answer(ticket) and self.core.find(ticket) is None
        if fresh and HOLDER_OF[ticket] == holder:
            part = (types.DeviceBytes(CPU, Bytes(size)),)
            need = types.Need(Bytes(size), host_bytes=Bytes(2))
            held.append(ev.HeldTicket(ticket, ticket, phase, 0, seconds(0), part, need))
            self.held[ticket] = {CPU: size}
        self.feed(ev.Joined(holder, NODE, "text", tuple(held)))
        self.asked -= {t for t in self.asked if self.core.find(t) is None}

    @rule(holder=HOLDERS)
    def holder_dies(self, holder: HolderId) -> None:
        self.feed(ev.HolderLost(holder))
        self.asked -= {t for t in self.asked if HOLDER_OF[t] == holder}

    @rule(models=st.lists(TICKETS, max_size=3, unique=True))
    def compact(self, models: list[TicketId]) -> None:
        names = tuple(types.ModelName("text", model) for model in models)
        self.feed(ev.CompactAsked(f"c{len(self.log)}", names))

    @rule(ticket=TICKETS, bytes_back=st.booleans())
    def engine_ends(self, ticket: TicketId, bytes_back: bool) -> None:
        if bytes_back:
            self.measured.pop(ticket, None)
        self.feed(ev.EngineGone(NODE, ticket, bytes_back))

    @rule(
        engines=st.dictionaries(
            TICKETS, st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=4
        ),
        cpu=st.integers(0, 5), host=st.integers(0, 3),
    )  # fmt: skip
    def reading(self, engines: dict[TicketId, tuple[int, int]], cpu: int, host: int) -> None:
        if NODE not in self.core.nodes():
            return
        self.foreign = {CPU: cpu, HOST: host}
        self.measured = {t: {CPU: c, HOST: h} for t, (c, h) in engines.items()}
        devices = tuple(
            ev.DeviceReading(d, Bytes(self.budget[d]), Bytes(b))
            for d, b in sorted(self.foreign.items())
        )
        readings = tuple(
            ev.EngineReading(t, tuple(types.DeviceBytes(d, Bytes(b)) for d, b in sorted(m.items())))
            for t, m in sorted(self.measured.items())
        )
        self.feed(ev.Measured(NODE, devices, readings))

    @rule(cpu=st.integers(4, 14))
    def see_node(self, cpu: int = 10) -> None:
        """The agent starts (again), and the device may have changed."""
        self.budget[CPU] = cpu
        if NODE not in self.core.nodes():
            self.foreign = {CPU: 0, HOST: 0}
        self.feed(ev.NodeSeen(NODE, (
            types.DeviceSpec(CPU, types.DeviceKind.CPU, Bytes(cpu)),
            types.DeviceSpec(HOST, types.DeviceKind.HOST, Bytes(self.budget[HOST])),
        )))  # fmt: skip

    @rule(level=st.sampled_from(types.Level), where=st.sampled_from([NODE, CPU, HOST]))
    def pressure(self, level: types.Level, where: str) -> None:
        self.feed(ev.PressurePushed(where, level, None, seconds(10)))

    @precondition(lambda self: len(self.log) % 7 == 0)  # rarely: it ends most of what goes on
    @rule()
    def node_dies(self) -> None:
        self.feed(ev.NodeLost(NODE))
        self.measured.clear()
        self.asked.clear()

    @precondition(lambda self: len(self.log) > 30)
    @rule()
    def close(self) -> None:
        self.feed(ev.ClosingDown())

    @rule(tenths=st.integers(1, 200))
    def time_passes(self, tenths: int) -> None:
        self.now = Instant(self.now + tenths * SECOND // 10)
        self.feed(ev.TimerFired())

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def books_match_the_model(self) -> None:
        charged = {e.id: e for e in self.core.tickets(*CHARGED)}
        assert charged.keys() == self.held.keys()
        for device, book in self.core.accounts().items():
            assert book.budget_bytes == self.budget[device]
            total = sum(e.charge(device) for e in charged.values())
            assert book.charged_bytes == total
            assert book.free_bytes + total + book.foreign_bytes == book.budget_bytes
            unclaimed = self.core.unclaimed(NODE)
            assert self.measured.keys() - self.held.keys() <= unclaimed
            unclaimed_bytes = sum(m[device] for t, m in self.measured.items() if t in unclaimed)
            assert book.foreign_bytes == self.foreign[device] + unclaimed_bytes
        self.core.audit()

    @invariant()
    def each_ticket_is_charged_the_larger_of_grant_and_measure(self) -> None:
        for ticket in self.core.tickets(*CHARGED):
            granted = self.held[ticket.id]
            if ticket.state in (State.LOADING, State.RESIDENT, State.DRAINING):
                for device, size in granted.items():
                    assert ticket.charge(device) == max(size, ticket.measured.get(device, 0))
            if ticket.state is State.ASLEEP:
                assert ticket.charge(HOST) >= ticket.need.host_bytes

    @invariant()
    def queued_tickets_are_in_the_queue_once(self) -> None:
        line = self.core.queue()
        queued = {e.id for e in self.core.tickets(State.QUEUED)}
        assert len(line) == len(set(line)) == len(self.core.request_queue)
        assert queued <= set(line) <= self.asked

    def teardown(self) -> None:
        """Replaying the log, with the state pickled half way, gives the same decisions."""
        twin = pickle.loads(self.born)
        for number, (event, now, decisions) in enumerate(self.log):
            if number == len(self.log) // 2:
                twin = pickle.loads(pickle.dumps(twin))
            assert twin.handle(event, now) == pickle.loads(decisions)
        self.arbiter.snapshot(self.now)
