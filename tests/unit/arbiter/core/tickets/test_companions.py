"""A drafter's ticket lives in its target's process: granted with it, it goes where that goes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter import units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, Refuse
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.settings import Settings, TenantLimits, Watermarks
from arbiter.errors import NeverFits
from arbiter.units import HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import MODELS, PLAIN, capability, gib, granted, refusal, revoked
from tests.unit.arbiter.core.queue.test_gangs import GPUS, GpuDriver

pytestmark = pytest.mark.spec("A13")
A, B = TicketId("a"), TicketId("b")
SERVES = (State.LOADING, State.RESIDENT, State.DRAINING)


class CompanionDriver(GpuDriver):
    """Target `a` of 50 GiB and its drafter `b` of 10."""

    def __init__(self, *sizes: float, settings: Settings = PLAIN, pinned: str = "") -> None:
        super().__init__(*sizes, settings=settings)
        self.pin(0, pinned)

    def pin(self, t: float, name: str) -> None:
        """The table says so."""
        self.at(t, ev.CapabilitiesSet((capability("text", "text", tuple(MODELS), pinned=name),)))

    def ask_both(
        self, t: float, target: float = 50, drafter: float = 10, *, drafter_first: bool = False,
        tenant: str = "default",
    ) -> list[object]:  # fmt: skip
        asks = [
            ev.Requested(
                name, HolderId("k"), "text", name, types.Need(gib(size)), "", True,
                gang=(A, B), shares_process_with=primary, client=types.Client(tenant),
            )
            for name, size, primary in ((A, target, None), (B, drafter, A))
        ]  # fmt: skip
        return [said for ask in (asks[::-1] if drafter_first else asks) for said in self.at(t, ask)]

    def resident(
        self, t: float, sizes: tuple[float, float] = (50, 10), took_s: float = 0,
        tenant: str = "default",
    ) -> None:  # fmt: skip
        assert granted(self.ask_both(t, *sizes, tenant=tenant)) == ["a", "b"]
        self.at(t, ev.Loaded(A, seconds(took_s)))
        self.say(t)

    def account(self, inflight: int = 0, user: str = "") -> tuple[ev.HeldTicket, ...]:
        """What its holder says of it; `user`: the tenant of one more use, of the primary."""
        entries = {e.ticket: e for e in self.state.ledger.held_by(HolderId("k"))}
        uses = entries[A].uses_count if A in entries else 0
        tenant = entries[A].client.tenant if A in entries else "default"
        return tuple(
            ev.HeldTicket(
                ticket, ticket, types.Phase.RESIDENT, inflight, units.Span(0),
                (types.DeviceBytes(GPUS[0], gib(size)),), types.Need(gib(size)),
                shares_process_with=primary,
                uses_count=0 if primary else uses + bool(user), client=types.Client(user or tenant),
            )
            for ticket, size, primary in ((A, 50, None), (B, 10, A))
        )  # fmt: skip

    def say(self, t: float, inflight: int = 0, user: str = "") -> None:
        """Its holder's heartbeat. Of others that it holds it says what is believed."""
        entries = self.state.ledger.held_by(HolderId("k"))
        others = (e for e in entries if e.ticket not in (A, B) and e.state in SERVES)
        held = (*self.account(inflight, user), *(self.held(e.ticket, t=t) for e in others))
        self.at(t, ev.Renewed(HolderId("k"), held))

    def see(self, t: float, size: float, foreign: float = 0) -> list[Decision]:
        """The kernel measures their one process, and others' memory."""
        readings = tuple(ev.DeviceReading(s.device, s.total_bytes, gib(foreign)) for s in self.gpus)
        found = ev.EngineReading(A, (types.DeviceBytes(GPUS[0], gib(size)),))
        return self.at(t, ev.Measured(NodeId("g"), readings, (found,)))

    def of(self, ticket: TicketId) -> Ticket:
        found = self.state.ledger.find(ticket)
        assert found is not None
        return found

    @property
    def taken(self) -> float:
        return self.state.ledger.books[GPUS[0]].charged_bytes / gib(1)


def test_companion_serves_when_primary_does() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    assert (d.state_of("a"), d.state_of("b"), d.taken) == ("resident", "resident", 60)


def test_companion_is_granted_on_the_primarys_device_though_another_fits_better() -> None:
    d = CompanionDriver(80, 12)
    assert granted(d.ask_both(0)) == ["a", "b"]
    assert d.home("a").keys() == d.home("b").keys()


def test_primary_and_companion_that_fit_on_no_single_device_are_refused() -> None:
    d = CompanionDriver(55, 55)
    refused = [s for s in d.ask_both(0) if isinstance(s, Refuse)]
    assert [r.ticket for r in refused] == ["a", "b"]
    assert all(isinstance(r.error, NeverFits) for r in refused)


def test_bytes_of_a_shared_process_are_charged_once_and_split_over_both_tickets() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.see(1, 72)
    assert d.of(A).measured[GPUS[0]] == gib(60) and d.of(B).measured[GPUS[0]] == gib(12)
    assert d.taken == 72


def test_companion_is_no_victim_by_itself_and_its_bytes_count_for_the_primary() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    asked = d.want(30, "c", 75)  # 20 are free, 50 of the target would not do
    assert revoked(asked) == [("a", "swap", "gone")]
    assert d.state_of("b") == "draining"
    d.at(31, ev.Released(A, "swap"))
    assert d.state_of("b") == "reclaiming" and d.taken == 60
    assert granted(d.at(32, ev.EngineGone(NodeId("g"), A, True))) == ["c"]
    assert d.state_of("a") == d.state_of("b") == "closed"


def test_primary_and_companion_withdrawn_before_their_load_are_not_charged() -> None:
    d = CompanionDriver(80)
    assert granted(d.ask_both(0)) == ["a", "b"] and d.taken == 60
    d.at(1, ev.Withdrawn(A))
    assert d.state_of("a") == d.state_of("b") == "reclaiming"
    d.at(2, ev.EngineGone(NodeId("g"), A, True))
    assert d.state_of("a") == d.state_of("b") == "closed" and d.taken == 0


def test_bytes_that_leave_with_a_companion_are_not_asked_of_others() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.want(1, "c", 20)
    d.done(1, "c")
    assert revoked(d.want(40, "e", 60)) == [("a", "swap", "gone")]
    d.see(41, 60)
    assert d.state_of("c") == "resident"


def test_companion_serves_on_with_its_primary_when_the_barrier_drops() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.want(30, "c", 75)
    d.at(31, ev.BarrierDropped(A, 1))
    assert (d.state_of("a"), d.state_of("b")) == ("resident", "resident")


def test_broken_load_ends_primary_and_companion() -> None:
    d = CompanionDriver(80)
    d.ask_both(0)
    d.at(1, ev.LoadBroke(A, "no such file", False))
    assert d.state_of("b") == "reclaiming"
    d.at(2, ev.EngineGone(NodeId("g"), A, True))
    assert d.taken == 0


@pytest.mark.parametrize("primary_first", [True, False])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_companion_rejoins_with_its_primary_after_an_arbiter_restart(
    primary_first: bool, is_pinned: bool
) -> None:
    d = CompanionDriver(80)
    d.resident(0)
    again = CompanionDriver(80, pinned="a" if is_pinned else "")
    account = d.account() if primary_first else d.account()[::-1]
    again.at(1, ev.Joined(HolderId("k"), NodeId("g"), "text", account))
    assert again.taken == 60
    assert pins(again) == (is_pinned, is_pinned)
    if is_pinned:
        return
    assert revoked(again.want(30, "c", 75)) == [("a", "swap", "gone")]
    assert again.state_of("b") == "draining"


def test_companion_without_its_primary_is_reclaimed() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    orphan = ev.HeldTicket(
        TicketId("o"), "o", types.Phase.RESIDENT, 0, units.Span(0),
        (types.DeviceBytes(GPUS[0], gib(5)),), types.Need(gib(5)),
        shares_process_with=TicketId("x"),
    )  # fmt: skip
    d.at(1, ev.Joined(HolderId("k2"), NodeId("g"), "text", (orphan,)))
    assert d.state_of("o") == "reclaiming"
    d.at(2, ev.EngineGone(NodeId("g"), TicketId("o"), True))
    assert d.taken == 60


def test_companion_is_not_unloaded_by_hand_without_its_primary() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.at(30, ev.UnloadAsked(B))
    assert d.state_of("b") == "resident" and d.last("unload_refused").ticket == B
    d.at(31, ev.UnloadAsked(A))
    assert d.state_of("b") == "draining"


def test_primary_and_companion_are_closed_when_their_node_is_lost() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.at(1, ev.NodeLost(NodeId("g")))
    assert d.state_of("a") == d.state_of("b") == "closed"


def test_primary_and_companion_end_at_shutdown() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.say(1, inflight=1)
    d.at(2, ev.ClosingDown())
    assert d.state_of("b") == "resident"  # in use, for as long as that may take
    d.woke(600)
    assert d.state_of("a") == d.state_of("b") == "reclaiming"


# -- what leaves with its primary -----------------------------------------------------------------


@pytest.mark.spec("A14")
def test_growth_counts_on_the_bytes_of_a_companion() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.want(1, "c", 15)
    d.done(1, "c")
    asked = d.at(40, ev.GrowthAsked(TicketId("c"), gib(60), seconds(30)))
    assert revoked(asked) == [("a", "swap", "gone")]


@pytest.mark.spec("A16")
def test_overcommitted_device_counts_companion_bytes_as_leaving_with_the_primary() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.want(1, "c", 15)
    d.done(1, "c")
    d.say(2)
    assert revoked(d.see(40, 60, foreign=60)) == [("a", "fit", "gone")]  # 55 too much


@pytest.mark.spec("C4")
def test_watermark_counts_companion_bytes_as_leaving_with_the_primary() -> None:
    d = CompanionDriver(100, settings=replace(PLAIN, device_marks=Watermarks(0.9, 0.5)))
    d.resident(0, sizes=(2, 38), took_s=100)
    for name, size, took_s in (("e", 25, 0), ("c", 30, 200)):  # the cheapest, and the dearest
        d.want(100, name, size)
        d.at(100, ev.Loaded(TicketId(name), seconds(took_s)))
        d.beat(100, name, holder="k")
    asked = revoked(d.want(300, "d", 30))  # 5 are free
    assert asked == [("e", "swap", "gone"), ("a", "swap", "gone")]  # 95, 70, and 30


@pytest.mark.spec("C10")
def test_tenant_at_its_maximum_counts_on_companion_bytes() -> None:
    d = CompanionDriver(80, settings=replace(PLAIN, tenants=(TenantLimits("x", gib(70)),)))
    d.resident(0, tenant="x")
    assert revoked(d.ask(40, "c", 65, holder="k", tenant="x")) == [("a", "swap", "gone")]


# -- whose it is, and what is learned of it -------------------------------------------------------


@pytest.mark.spec("C10")
def test_companion_is_billed_to_the_tenant_of_its_primary() -> None:
    terms = (TenantLimits("z", gib(55)), TenantLimits("x", reserved_bytes=gib(20)))
    d = CompanionDriver(80, settings=replace(PLAIN, tenants=terms))
    d.resident(0, tenant="y")
    held = d.state.ledger.holdings.by_tenant
    d.say(1, user="v")
    assert (held["v"], held["y"]) == (gib(60), 0)
    d.say(2, user="z")  # the primary alone would do
    assert (held["v"], held["z"]) == (gib(60), 0)
    d.say(3, user="x")
    assert granted(d.ask(4, "c", 15, holder="k", tenant="x")) == ["c"]
    d.say(5, user="v")  # without the primary x would have its 20 yet, without both not
    assert (held["x"], held["v"]) == (gib(75), 0)


@pytest.mark.spec("A17")
def test_estimate_error_of_a_pair_is_reported_once_for_the_primary() -> None:
    d = CompanionDriver(80)
    d.resident(0, took_s=5)
    for t in (1, 2, 3):
        d.see(t, 66)
    told = [t for t in d.told if t.kind == "estimate_error"]
    assert [(t.ticket, t.took) for t in told] == [(A, seconds(5))]


# -- pinned ---------------------------------------------------------------------------------------


def pins(d: CompanionDriver) -> tuple[bool, bool]:
    return d.of(A).pinned, d.of(B).pinned


@pytest.mark.spec("B6", "C8")
def test_companion_of_a_pinned_primary_never_makes_room() -> None:
    d = CompanionDriver(80, pinned="a")
    d.resident(0)
    assert isinstance(refusal(d.want(1, "c", 25)), NeverFits)
    assert granted(d.want(2, "d", 20)) == ["d"]


@pytest.mark.spec("C8")
def test_pinned_companion_leaves_with_an_unpinned_primary() -> None:
    d = CompanionDriver(80, pinned="b")
    d.resident(0)
    assert pins(d) == (False, False)
    assert revoked(d.want(30, "c", 75)) == [("a", "swap", "gone")]


@pytest.mark.spec("C8")
@pytest.mark.parametrize("drafter_first", [False, True])
def test_companion_is_pinned_as_its_primary_whichever_asks_first(drafter_first: bool) -> None:
    d = CompanionDriver(80, pinned="a")
    assert granted(d.ask_both(0, drafter_first=drafter_first))
    assert pins(d) == (True, True)
    assert d.state.ledger.books[GPUS[0]].pinned_bytes == gib(60)


@pytest.mark.spec("C8", "D8")
def test_table_and_floors_pin_primary_and_companion_or_neither() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    d.pin(1, "a")
    assert pins(d) == (True, True)
    d.pin(2, "b")
    assert pins(d) == (False, False)
    d.at(3, ev.FloorSet("text", "a", types.Floor.DEVICE))
    assert pins(d) == (True, True)
    d.at(4, ev.FloorSet("text", "a", types.Floor.COLD))
    assert pins(d) == (False, False)


@pytest.mark.spec("C8")
def test_primary_and_companion_pinned_beyond_the_cap_are_victims_like_others() -> None:
    d = CompanionDriver(80, settings=replace(PLAIN, pinned_most_fraction=0.7), pinned="a")  # 56
    d.resident(0)
    assert pins(d) == (False, False)
    assert revoked(d.want(30, "c", 75)) == [("a", "swap", "gone")]


@pytest.mark.spec("A14")
def test_companion_bytes_are_no_room_for_its_primary_to_grow_into() -> None:
    d = CompanionDriver(80)
    d.resident(0)
    error = refusal(d.at(1, ev.GrowthAsked(A, gib(25), seconds(30))))
    assert error == NeverFits(A, gib(75), gib(70))
    assert granted(d.at(2, ev.GrowthAsked(A, gib(20), seconds(30)))) == ["a"]


HAPPENS = {
    "ask": lambda d, t: d.ask_both(t),
    "loaded": lambda d, t: d.at(t, ev.Loaded(A, units.Span(0))),
    "broke": lambda d, t: d.at(t, ev.LoadBroke(A, "no such file", False)),
    "no memory": lambda d, t: d.at(t, ev.LoadBroke(A, "no memory", True)),
    "withdrawn": lambda d, t: d.at(t, ev.Withdrawn(A)),
    "companion withdrawn": lambda d, t: d.at(t, ev.Withdrawn(B)),
    "released": lambda d, t: d.at(t, ev.Released(A, "swap")),
    "gone": lambda d, t: d.at(t, ev.EngineGone(NodeId("g"), A, True)),
    "companion gone": lambda d, t: d.at(t, ev.EngineGone(NodeId("g"), B, True)),
    "dead": lambda d, t: d.at(t, ev.EngineGone(NodeId("g"), A, False)),
    "says idle": lambda d, t: d.say(t),
    "says in use": lambda d, t: d.say(t, inflight=1),
    "says nothing": lambda d, t: d.at(t, ev.Renewed(HolderId("k"), ())),
    "dropped": lambda d, t: d.at(t, ev.BarrierDropped(A, 1)),
    "busy": lambda d, t: d.at(t, ev.Busy(A, 1)),
    "slept": lambda d, t: d.at(t, ev.Slept(A)),
    "seen": lambda d, t: d.see(t, 72),
    "another asks": lambda d, t: d.want(t, f"c{t}", 75),
    "unload": lambda d, t: d.at(t, ev.UnloadAsked(A)),
    "unload the companion": lambda d, t: d.at(t, ev.UnloadAsked(B)),
    "holder lost": lambda d, t: d.at(t, ev.HolderLost(HolderId("k"))),
    "holder back": lambda d, t: d.join(t, "k", node="g"),
    "grows": lambda d, t: d.at(t, ev.GrowthAsked(A, gib(5), units.Span(10**9))),
    "long after": lambda d, t: d.woke(t),
    "closing": lambda d, t: d.at(t, ev.ClosingDown()),
    "node lost": lambda d, t: d.at(t, ev.NodeLost(NodeId("g"))),
}


@given(
    st.sampled_from([CompanionDriver.ask_both, CompanionDriver.resident]),
    st.lists(st.tuples(st.sampled_from(sorted(HAPPENS)), st.sampled_from([0.1, 6, 70]))),
)
def test_any_events_keep_the_books_and_no_companion_outlives_its_primary(
    begin: Callable[[CompanionDriver, float], object], events: list[tuple[str, float]]
) -> None:
    d, t = CompanionDriver(80), 0.0
    begin(d, 0)
    for name, later in events:
        t += later
        HAPPENS[name](d, t)
        primary, companion = (d.state.ledger.find(x) for x in (A, B))
        if companion and companion.state in SERVES:
            assert primary and primary.state is companion.state
    ends = t + 1_000
    d.at(t, ev.EngineGone(NodeId("g"), A, True))
    d.woke(ends)
    primary, companion = (d.state.ledger.find(x) for x in (A, B))
    assert primary is None or primary.state is not State.RECLAIMING
    if primary is None and companion is not None:
        assert companion.state is State.QUEUED
