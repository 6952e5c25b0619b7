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
from tests.unit.desk import MODELS, PLAIN, capability, gib, granted, refusal, revoked
from tests.unit.test_gangs import GPUS, Gpus

pytestmark = pytest.mark.spec("A13")
A, B = TicketId("a"), TicketId("b")
SERVES = (State.LOADING, State.RESIDENT, State.DRAINING)


class Pairs(Gpus):
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
                gang=(A, B), shares_process_with=host, client=types.Client(tenant),
            )
            for name, size, host in ((A, target, None), (B, drafter, A))
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
        """What its holder says of it; `user`: the tenant of one more use, of the host."""
        entries = {e.ticket: e for e in self.state.ledger.held_by(HolderId("k"))}
        uses = entries[A].uses_count if A in entries else 0
        tenant = entries[A].client.tenant if A in entries else "default"
        return tuple(
            ev.HeldTicket(
                ticket, ticket, types.Phase.RESIDENT, inflight, units.Span(0),
                (types.DeviceBytes(GPUS[0], gib(size)),), types.Need(gib(size)),
                shares_process_with=host,
                uses_count=0 if host else uses + bool(user), client=types.Client(user or tenant),
            )
            for ticket, size, host in ((A, 50, None), (B, 10, A))
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


def test_it_serves_when_its_host_does() -> None:
    d = Pairs(80)
    d.resident(0)
    assert (d.state_of("a"), d.state_of("b"), d.taken) == ("resident", "resident", 60)


def test_both_are_granted_on_one_device_though_another_would_fit_the_drafter_better() -> None:
    d = Pairs(80, 12)
    assert granted(d.ask_both(0)) == ["a", "b"]
    assert d.home("a").keys() == d.home("b").keys()


def test_a_pair_that_fits_on_no_one_device_is_refused() -> None:
    d = Pairs(55, 55)
    refused = [s for s in d.ask_both(0) if isinstance(s, Refuse)]
    assert [r.ticket for r in refused] == ["a", "b"]
    assert all(isinstance(r.error, NeverFits) for r in refused)


def test_what_their_process_holds_is_on_the_books_once_and_on_both() -> None:
    d = Pairs(80)
    d.resident(0)
    d.see(1, 72)
    assert d.of(A).measured[GPUS[0]] == gib(60) and d.of(B).measured[GPUS[0]] == gib(12)
    assert d.taken == 72


def test_it_is_no_victim_by_itself_and_its_bytes_count_for_its_host() -> None:
    d = Pairs(80)
    d.resident(0)
    asked = d.want(30, "c", 75)  # 20 are free, 50 of the target would not do
    assert revoked(asked) == [("a", "swap", "gone")]
    assert d.state_of("b") == "draining"
    d.at(31, ev.Released(A, "swap"))
    assert d.state_of("b") == "reclaiming" and d.taken == 60
    assert granted(d.at(32, ev.EngineGone(NodeId("g"), A, True))) == ["c"]
    assert d.state_of("a") == d.state_of("b") == "closed"


def test_granted_and_given_up_before_their_load_began_neither_stays_charged() -> None:
    d = Pairs(80)
    assert granted(d.ask_both(0)) == ["a", "b"] and d.taken == 60
    d.at(1, ev.Withdrawn(A))
    assert d.state_of("a") == d.state_of("b") == "reclaiming"
    d.at(2, ev.EngineGone(NodeId("g"), A, True))
    assert d.state_of("a") == d.state_of("b") == "closed" and d.taken == 0


def test_nobody_else_is_asked_for_bytes_that_leave_with_its_host() -> None:
    d = Pairs(80)
    d.resident(0)
    d.want(1, "c", 20)
    d.done(1, "c")
    assert revoked(d.want(40, "e", 60)) == [("a", "swap", "gone")]
    d.see(41, 60)
    assert d.state_of("c") == "resident"


def test_when_the_barrier_drops_both_serve_on() -> None:
    d = Pairs(80)
    d.resident(0)
    d.want(30, "c", 75)
    d.at(31, ev.BarrierDropped(A, 1))
    assert (d.state_of("a"), d.state_of("b")) == ("resident", "resident")


def test_a_load_that_breaks_ends_both() -> None:
    d = Pairs(80)
    d.ask_both(0)
    d.at(1, ev.LoadBroke(A, "no such file", False))
    assert d.state_of("b") == "reclaiming"
    d.at(2, ev.EngineGone(NodeId("g"), A, True))
    assert d.taken == 0


@pytest.mark.parametrize("host_first", [True, False])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_after_a_restart_of_the_arbiter_they_still_belong_together(
    host_first: bool, is_pinned: bool
) -> None:
    d = Pairs(80)
    d.resident(0)
    again = Pairs(80, pinned="a" if is_pinned else "")
    account = d.account() if host_first else d.account()[::-1]
    again.at(1, ev.Joined(HolderId("k"), NodeId("g"), "text", account))
    assert again.taken == 60
    assert pins(again) == (is_pinned, is_pinned)
    if is_pinned:
        return
    assert revoked(again.want(30, "c", 75)) == [("a", "swap", "gone")]
    assert again.state_of("b") == "draining"


def test_one_whose_host_is_off_the_books_is_given_back() -> None:
    d = Pairs(80)
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


def test_by_hand_it_is_not_unloaded_without_its_host() -> None:
    d = Pairs(80)
    d.resident(0)
    d.at(30, ev.UnloadAsked(B))
    assert d.state_of("b") == "resident" and d.last("unload_refused").ticket == B
    d.at(31, ev.UnloadAsked(A))
    assert d.state_of("b") == "draining"


def test_when_its_node_is_lost_both_leave() -> None:
    d = Pairs(80)
    d.resident(0)
    d.at(1, ev.NodeLost(NodeId("g")))
    assert d.state_of("a") == d.state_of("b") == "closed"


def test_at_shutdown_both_end() -> None:
    d = Pairs(80)
    d.resident(0)
    d.say(1, inflight=1)
    d.at(2, ev.ClosingDown())
    assert d.state_of("b") == "resident"  # in use, for as long as that may take
    d.woke(600)
    assert d.state_of("a") == d.state_of("b") == "reclaiming"


# -- what leaves with its host --------------------------------------------------------------------


@pytest.mark.spec("A14")
def test_who_wants_to_grow_counts_on_it() -> None:
    d = Pairs(80)
    d.resident(0)
    d.want(1, "c", 15)
    d.done(1, "c")
    asked = d.at(40, ev.GrowthAsked(TicketId("c"), gib(60), seconds(30)))
    assert revoked(asked) == [("a", "swap", "gone")]


@pytest.mark.spec("A16")
def test_on_an_overcommitted_device_nobody_else_goes_for_what_it_brings() -> None:
    d = Pairs(80)
    d.resident(0)
    d.want(1, "c", 15)
    d.done(1, "c")
    d.say(2)
    assert revoked(d.see(40, 60, foreign=60)) == [("a", "fit", "gone")]  # 55 too much


@pytest.mark.spec("C4")
def test_above_a_mark_nobody_else_goes_for_what_it_brings() -> None:
    d = Pairs(100, settings=replace(PLAIN, device_marks=Watermarks(0.9, 0.5)))
    d.resident(0, sizes=(2, 38), took_s=100)
    for name, size, took_s in (("e", 25, 0), ("c", 30, 200)):  # the cheapest, and the dearest
        d.want(100, name, size)
        d.at(100, ev.Loaded(TicketId(name), seconds(took_s)))
        d.beat(100, name, holder="k")
    asked = revoked(d.want(300, "d", 30))  # 5 are free
    assert asked == [("e", "swap", "gone"), ("a", "swap", "gone")]  # 95, 70, and 30


@pytest.mark.spec("C10")
def test_at_its_maximum_a_tenant_counts_on_it() -> None:
    d = Pairs(80, settings=replace(PLAIN, tenants=(TenantLimits("x", gib(70)),)))
    d.resident(0, tenant="x")
    assert revoked(d.ask(40, "c", 65, holder="k", tenant="x")) == [("a", "swap", "gone")]


# -- whose it is, and what is learned of it -------------------------------------------------------


@pytest.mark.spec("C10")
def test_it_is_on_its_hosts_account_and_both_change_hands_or_neither() -> None:
    terms = (TenantLimits("z", gib(55)), TenantLimits("x", reserved_bytes=gib(20)))
    d = Pairs(80, settings=replace(PLAIN, tenants=terms))
    d.resident(0, tenant="y")
    held = d.state.ledger.holdings.by_tenant
    d.say(1, user="v")
    assert (held["v"], held["y"]) == (gib(60), 0)
    d.say(2, user="z")  # the host alone would do
    assert (held["v"], held["z"]) == (gib(60), 0)
    d.say(3, user="x")
    assert granted(d.ask(4, "c", 15, holder="k", tenant="x")) == ["c"]
    d.say(5, user="v")  # without the host x would have its 20 yet, without both not
    assert (held["x"], held["v"]) == (gib(75), 0)


@pytest.mark.spec("A17")
def test_of_a_load_one_estimate_is_judged_its_hosts() -> None:
    d = Pairs(80)
    d.resident(0, took_s=5)
    for t in (1, 2, 3):
        d.see(t, 66)
    told = [t for t in d.told if t.kind == "estimate_error"]
    assert [(t.ticket, t.took) for t in told] == [(A, seconds(5))]


# -- pinned ---------------------------------------------------------------------------------------


def pins(d: Pairs) -> tuple[bool, bool]:
    return d.of(A).pinned, d.of(B).pinned


@pytest.mark.spec("B6", "C8")
def test_what_lives_in_a_pinned_process_is_nothing_that_waiting_brings() -> None:
    d = Pairs(80, pinned="a")
    d.resident(0)
    assert isinstance(refusal(d.want(1, "c", 25)), NeverFits)
    assert granted(d.want(2, "d", 20)) == ["d"]


@pytest.mark.spec("C8")
def test_a_pinned_drafter_goes_with_a_target_that_is_not() -> None:
    d = Pairs(80, pinned="b")
    d.resident(0)
    assert pins(d) == (False, False)
    assert revoked(d.want(30, "c", 75)) == [("a", "swap", "gone")]


@pytest.mark.spec("C8")
@pytest.mark.parametrize("drafter_first", [False, True])
def test_whichever_asks_first_it_is_pinned_as_its_host_is(drafter_first: bool) -> None:
    d = Pairs(80, pinned="a")
    assert granted(d.ask_both(0, drafter_first=drafter_first))
    assert pins(d) == (True, True)
    assert d.state.ledger.books[GPUS[0]].pinned_bytes == gib(60)


@pytest.mark.spec("C8", "D8")
def test_the_table_and_floors_pin_both_or_neither() -> None:
    d = Pairs(80)
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
def test_beyond_what_may_be_pinned_both_are_victims_like_others() -> None:
    d = Pairs(80, settings=replace(PLAIN, pinned_most_fraction=0.7), pinned="a")  # 56
    d.resident(0)
    assert pins(d) == (False, False)
    assert revoked(d.want(30, "c", 75)) == [("a", "swap", "gone")]


@pytest.mark.spec("A14")
def test_what_lives_in_its_own_process_is_no_room_to_grow_into() -> None:
    d = Pairs(80)
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
    st.sampled_from([Pairs.ask_both, Pairs.resident]),
    st.lists(st.tuples(st.sampled_from(sorted(HAPPENS)), st.sampled_from([0.1, 6, 70]))),
)
def test_whatever_happens_the_books_hold_and_no_lodger_outlives_its_host(
    begin: Callable[[Pairs, float], object], events: list[tuple[str, float]]
) -> None:
    d, t = Pairs(80), 0.0
    begin(d, 0)
    for name, later in events:
        t += later
        HAPPENS[name](d, t)
        host, companion = (d.state.ledger.find(x) for x in (A, B))
        if companion and companion.state in SERVES:
            assert host and host.state is companion.state
    ends = t + 1_000
    d.at(t, ev.EngineGone(NodeId("g"), A, True))
    d.woke(ends)
    host, companion = (d.state.ledger.find(x) for x in (A, B))
    assert host is None or host.state is not State.RECLAIMING
    if host is None and companion is not None:
        assert companion.state is State.QUEUED
