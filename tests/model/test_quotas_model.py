"""Tenants under anything that may happen (C10): a maximum is never exceeded, what is reserved
stays free for whom it is reserved, nobody leaves for another who would get nothing, and accounts
add up to what an onlooker integrates who reads the books now and then."""

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import LogEvent, Reason
from arbiter.core.records.ticket import LEAVING, State
from arbiter.core.settings import TenantLimits
from arbiter.units import GIB, Bytes, HolderId, TicketId, seconds
from tests.support.core_driver import CPU, PATIENT, PLAIN, CoreDriver, gib
from tests.support.examples import examples

DEVICE, MOST, RESERVED = 40, 15, 12
TENANTS = ("bounded", "keeper", "else")
TERMS = (
    TenantLimits("bounded", gib(MOST)),
    TenantLimits("keeper", None, gib(RESERVED)),
    TenantLimits("slow", None, Bytes(0), gib(1)),
)
SETTINGS = replace(PLAIN, tenants=TERMS, timeouts=replace(PATIENT, barrier=seconds(4)))


class Tenants(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.driver = CoreDriver(DEVICE, 20, SETTINGS, holders=("h0", "h1"))
        self.number = 0
        self.integral = 0.0  # GiB seconds
        self.waiting: dict[str, str] = {}  # ticket to tenant

    def feed(self, event: ev.Event) -> None:
        told = len(self.driver.logged)
        before = {t: self.staying(t) for t in TENANTS}
        owners = {e.id: e.client.tenant for e in self.driver.tickets()}
        self.driver.at(self.now, event)
        # One event can grow a ticket and then evict it: what counts is held at the eviction.
        for tell in self.driver.logged[told:]:
            if tell.kind == "growth_granted":
                before[owners[tell.ticket or TicketId("")]] += int(tell.size_bytes or 0)
            elif tell.kind == "eviction":
                self.judge(tell, before, owners)

    def judge(self, tell: LogEvent, before: dict[str, int], owners: dict[TicketId, str]) -> None:
        whose, waiting = owners.get(tell.ticket or TicketId("")), tell.data["waiting"]
        if whose != "keeper" or tell.data["reason"] != Reason.SWAP.value:
            return
        if self.waiting.get(str(waiting)) != "keeper":
            assert before["keeper"] > gib(RESERVED)

    def held(self, tenant: str) -> int:
        books = self.driver.accounts()
        return sum(e.charge(CPU) for e in books[CPU].tickets.values() if e.client.tenant == tenant)

    def staying(self, tenant: str) -> int:
        entries = self.driver.account().tickets.values()
        mine = [e for e in entries if e.client.tenant == tenant and e.state not in LEAVING]
        return sum(e.charge(CPU) for e in mine)

    # -- what may happen -------------------------------------------------------------------------

    @rule(
        model=st.sampled_from("abcde"), size=st.sampled_from([1, 4, 9, 14, 28]),
        holder=st.integers(0, 1), tenant=st.sampled_from(TENANTS), sleeps=st.booleans(),
        priority=st.sampled_from(types.Priority),
    )  # fmt: skip
    def ask(
        self,
        model: str,
        size: int,
        holder: int,
        tenant: str,
        sleeps: bool,
        priority: types.Priority,
    ) -> None:
        self.number += 1
        name = f"{model}{self.number}"
        self.waiting[name] = tenant
        need = types.Need(gib(size), host_bytes=gib(size if sleeps else 0))
        self.feed(ev.Requested(
            TicketId(name), HolderId(f"h{holder}"), "text", model, need, "", True,
            priority=priority, client=types.Client(tenant, model),
        ))  # fmt: skip

    @rule(size=st.sampled_from([1, 5, 10]), tenant=st.sampled_from(TENANTS), may_go=st.booleans())
    def lease(self, size: int, tenant: str, may_go: bool) -> None:
        self.number += 1
        name = f"job{self.number}"
        self.waiting[name] = tenant
        self.feed(ev.Joined(HolderId(name), "n", "lease", ()))  # type: ignore[arg-type]
        terms = types.LeaseConditions(tenant, seconds(500), seconds(2), may_go)
        self.feed(ev.Requested(
            TicketId(name), HolderId(name), "lease", name, types.Need(gib(size)), lease=terms
        ))  # fmt: skip

    def one(self, state: State, pick: int) -> TicketId | None:
        tickets = [e.id for e in self.driver.tickets(state)]
        return tickets[pick % len(tickets)] if tickets else None

    @rule(pick=st.integers(0, 20), ends=st.sampled_from(["loaded", "loaded", "broke"]))
    def load_ends(self, pick: int, ends: str) -> None:
        if ticket := self.one(State.LOADING, pick):
            loaded = ev.Loaded(ticket, seconds(1))
            self.feed(loaded if ends == "loaded" else ev.LoadBroke(ticket, "x", True))

    @rule(pick=st.integers(0, 20), inflight=st.integers(0, 1), tenant=st.sampled_from(TENANTS))
    def is_used(self, pick: int, inflight: int, tenant: str) -> None:
        """By anybody, which may change whose it is."""
        ticket_id = self.one(State.RESIDENT, pick)
        ticket = self.driver.find(ticket_id) if ticket_id else None
        if ticket is None or ticket.lease:
            return
        held = tuple(
            replace(
                self.driver.held(e.id, inflight=inflight, t=self.now),
                client=types.Client(tenant) if e is ticket else e.client,
                uses_count=e.uses_count + (e is ticket),
            )
            for e in self.driver.tickets_of(ticket.holder)
            if e.state.value in ("loading", "resident", "draining", "asleep")
        )
        self.feed(ev.Renewed(ticket.holder, held, usage=(ev.Usage(types.Client(tenant), 1),)))

    @rule(pick=st.integers(0, 20), how=st.sampled_from(["released", "slept", "dropped"]))
    def drained(self, pick: int, how: str) -> None:
        if ticket := self.one(State.DRAINING, pick):
            if how == "slept":
                self.driver.engines[ticket] = {}
                self.feed(ev.Slept(ticket))
                self.read()
            elif how == "released":
                self.feed(ev.Released(ticket, "swap"))
            else:
                self.feed(ev.BarrierDropped(ticket, 1))

    @rule()
    def read(self) -> None:
        devices = tuple(
            ev.DeviceReading(d, Bytes(0), Bytes(0)) for d in self.driver.devices_of("n")
        )
        self.feed(ev.Measured("n", devices, ()))  # type: ignore[arg-type]

    @rule(pick=st.integers(0, 20))
    def bytes_come_back(self, pick: int) -> None:
        if ticket := self.one(State.RECLAIMING, pick):
            self.feed(ev.EngineGone("n", ticket, True))  # type: ignore[arg-type]

    @rule(pick=st.integers(0, 20), tenant=st.sampled_from(TENANTS))
    def wake(self, pick: int, tenant: str) -> None:
        if ticket_id := self.one(State.ASLEEP, pick):
            ticket = self.driver.find(ticket_id)
            self.waiting[ticket_id] = tenant
            self.feed(ev.Requested(
                ticket_id, ticket.holder, "text", ticket.model, ticket.need, "", True,
                client=types.Client(tenant),
            ))  # fmt: skip

    @rule(pick=st.integers(0, 20), more=st.integers(1, 6))
    def grow(self, pick: int, more: int) -> None:
        if ticket := self.one(State.RESIDENT, pick):
            self.waiting[ticket] = self.driver.find(ticket).client.tenant
            self.feed(ev.GrowthAsked(ticket, gib(more), seconds(5)))

    @rule(tenths=st.integers(1, 120))
    def time_passes(self, tenths: int) -> None:
        self.integral += self.driver.charged() * tenths / 10
        self.now += tenths / 10
        self.feed(ev.TimerFired())

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def maximum_of_a_tenant_is_never_exceeded(self) -> None:
        assert self.held("bounded") <= gib(MOST)

    @invariant()
    def reserved_bytes_not_held_are_free(self) -> None:
        lacking = max(0, gib(RESERVED) - self.held("keeper"))
        assert self.driver.account().free_bytes >= lacking

    @invariant()
    def holdings_add_up(self) -> None:
        holdings = self.driver.holdings
        assert sum(holdings.by_client.values()) == self.driver.account().charged_bytes
        for tenant in TENANTS:
            assert holdings.by_tenant[tenant] == self.held(tenant)

    def teardown(self) -> None:
        self.feed(ev.TimerFired())
        seen = self.driver.snapshot().clients
        total = sum(row.byte_seconds_count for row in seen) / GIB
        assert abs(total - self.integral) < 1e-3 * max(1.0, self.integral)


TestTenants = Tenants.TestCase
TestTenants.settings = settings(
    max_examples=examples(100),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
