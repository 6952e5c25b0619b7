"""A drafter's ticket lives in its target's process: granted with it, it goes where that goes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter import events as ev
from arbiter.decisions import Refuse
from arbiter.errors import NeverFits
from arbiter.ledger import Entry, State
from arbiter.settings import Settings
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
        self, t: float, target: float = 50, drafter: float = 10, drafter_first: bool = False
    ) -> list[object]:
        asks = [
            ev.Requested(
                name, HolderId("k"), "text", name, ev.Need(gib(size)), "", True,
                gang=(A, B), lives_in=host,
            )
            for name, size, host in ((A, target, None), (B, drafter, A))
        ]  # fmt: skip
        return [said for ask in (asks[::-1] if drafter_first else asks) for said in self.at(t, ask)]

    def resident(self, t: float) -> None:
        assert granted(self.ask_both(t)) == ["a", "b"]
        self.at(t, ev.Loaded(A, ev.Span(0)))
        self.say(t)

    def say(self, t: float, inflight: int = 0) -> None:
        """Its holder's heartbeat, with the account that deployments.pairs gives."""
        held = [
            ev.HeldTicket(
                ticket, ticket, ev.Phase.RESIDENT, inflight, ev.Span(0),
                (ev.DeviceBytes(GPUS[0], gib(size)),), ev.Need(gib(size)), lives_in=host,
            )
            for ticket, size, host in ((A, 50, None), (B, 10, A))
        ]  # fmt: skip
        self.at(t, ev.Renewed(HolderId("k"), tuple(held)))

    def see(self, t: float, size: float) -> None:
        """The kernel measures their one process."""
        readings = tuple(ev.DeviceReading(s.device, s.total_bytes, gib(0)) for s in self.gpus)
        found = ev.EngineReading(A, (ev.DeviceBytes(GPUS[0], gib(size)),))
        self.at(t, ev.Measured(NodeId("g"), readings, (found,)))

    def of(self, ticket: TicketId) -> Entry:
        found = self.mind.ledger.find(ticket)
        assert found is not None
        return found

    @property
    def taken(self) -> float:
        return self.mind.ledger.books[GPUS[0]].charged_bytes / gib(1)


def test_it_serves_when_its_host_does() -> None:
    d = Pairs(80)
    d.resident(0)
    assert (d.state("a"), d.state("b"), d.taken) == ("resident", "resident", 60)


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
    assert d.state("b") == "draining"
    d.at(31, ev.Released(A, "swap"))
    assert d.state("b") == "reclaiming" and d.taken == 60
    assert granted(d.at(32, ev.EngineGone(NodeId("g"), A, True))) == ["c"]
    assert d.state("a") == d.state("b") == "closed"


def test_granted_and_given_up_before_their_load_began_neither_stays_charged() -> None:
    d = Pairs(80)
    assert granted(d.ask_both(0)) == ["a", "b"] and d.taken == 60
    d.at(1, ev.Withdrawn(A))
    assert d.state("a") == d.state("b") == "reclaiming"
    d.at(2, ev.EngineGone(NodeId("g"), A, True))
    assert d.state("a") == d.state("b") == "closed" and d.taken == 0


def test_nobody_else_is_asked_for_bytes_that_leave_with_its_host() -> None:
    d = Pairs(80)
    d.resident(0)
    d.want(1, "c", 20)
    d.done(1, "c")
    assert revoked(d.want(40, "e", 60)) == [("a", "swap", "gone")]
    d.see(41, 60)
    assert d.state("c") == "resident"


def test_when_the_barrier_drops_both_serve_on() -> None:
    d = Pairs(80)
    d.resident(0)
    d.want(30, "c", 75)
    d.at(31, ev.BarrierDropped(A, 1))
    assert (d.state("a"), d.state("b")) == ("resident", "resident")


def test_a_load_that_breaks_ends_both() -> None:
    d = Pairs(80)
    d.ask_both(0)
    d.at(1, ev.LoadBroke(A, "no such file", False))
    assert d.state("b") == "reclaiming"
    d.at(2, ev.EngineGone(NodeId("g"), A, True))
    assert d.taken == 0


def test_after_a_restart_of_the_arbiter_they_still_belong_together() -> None:
    d = Pairs(80)
    d.resident(0)
    account = tuple(
        ev.HeldTicket(
            t, t, ev.Phase.RESIDENT, 0, ev.Span(0), (ev.DeviceBytes(GPUS[0], gib(size)),),
            ev.Need(gib(size)), lives_in=host,
        )
        for t, size, host in ((A, 50, None), (B, 10, A))
    )  # fmt: skip
    again = Pairs(80)
    again.at(1, ev.Joined(HolderId("k"), NodeId("g"), "text", account))
    assert again.taken == 60
    assert revoked(again.want(30, "c", 75)) == [("a", "swap", "gone")]
    assert again.state("b") == "draining"


def test_one_whose_host_is_off_the_books_is_given_back() -> None:
    d = Pairs(80)
    d.resident(0)
    orphan = ev.HeldTicket(
        TicketId("o"), "o", ev.Phase.RESIDENT, 0, ev.Span(0),
        (ev.DeviceBytes(GPUS[0], gib(5)),), ev.Need(gib(5)), lives_in=TicketId("x"),
    )  # fmt: skip
    d.at(1, ev.Joined(HolderId("k2"), NodeId("g"), "text", (orphan,)))
    assert d.state("o") == "reclaiming"
    d.at(2, ev.EngineGone(NodeId("g"), TicketId("o"), True))
    assert d.taken == 60


def test_by_hand_it_is_not_unloaded_without_its_host() -> None:
    d = Pairs(80)
    d.resident(0)
    d.at(30, ev.UnloadAsked(B))
    assert d.state("b") == "resident" and d.last("unload_refused").ticket == B
    d.at(31, ev.UnloadAsked(A))
    assert d.state("b") == "draining"


def test_when_its_node_is_lost_both_leave() -> None:
    d = Pairs(80)
    d.resident(0)
    d.at(1, ev.NodeLost(NodeId("g")))
    assert d.state("a") == d.state("b") == "closed"


def test_at_shutdown_both_end() -> None:
    d = Pairs(80)
    d.resident(0)
    d.say(1, inflight=1)
    d.at(2, ev.ClosingDown())
    assert d.state("b") == "resident"  # in use, for as long as that may take
    d.woke(600)
    assert d.state("a") == d.state("b") == "reclaiming"


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
    assert d.mind.ledger.books[GPUS[0]].pinned_bytes == gib(60)


@pytest.mark.spec("C8", "D8")
def test_the_table_and_floors_pin_both_or_neither() -> None:
    d = Pairs(80)
    d.resident(0)
    d.pin(1, "a")
    assert pins(d) == (True, True)
    d.pin(2, "b")
    assert pins(d) == (False, False)
    d.at(3, ev.FloorSet("text", "a", ev.Floor.DEVICE))
    assert pins(d) == (True, True)
    d.at(4, ev.FloorSet("text", "a", ev.Floor.COLD))
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
    "loaded": lambda d, t: d.at(t, ev.Loaded(A, ev.Span(0))),
    "broke": lambda d, t: d.at(t, ev.LoadBroke(A, "no such file", False)),
    "no memory": lambda d, t: d.at(t, ev.LoadBroke(A, "no memory", True)),
    "withdrawn": lambda d, t: d.at(t, ev.Withdrawn(A)),
    "lodger withdrawn": lambda d, t: d.at(t, ev.Withdrawn(B)),
    "released": lambda d, t: d.at(t, ev.Released(A, "swap")),
    "gone": lambda d, t: d.at(t, ev.EngineGone(NodeId("g"), A, True)),
    "lodger gone": lambda d, t: d.at(t, ev.EngineGone(NodeId("g"), B, True)),
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
    "unload the lodger": lambda d, t: d.at(t, ev.UnloadAsked(B)),
    "holder lost": lambda d, t: d.at(t, ev.HolderLost(HolderId("k"))),
    "holder back": lambda d, t: d.join(t, "k", node="g"),
    "grows": lambda d, t: d.at(t, ev.GrowthAsked(A, gib(5), ev.Span(10**9))),
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
        host, lodger = (d.mind.ledger.find(x) for x in (A, B))
        if lodger and lodger.state in SERVES:
            assert host and host.state is lodger.state
    ends = t + 1_000
    d.at(t, ev.EngineGone(NodeId("g"), A, True))
    d.woke(ends)
    host, lodger = (d.mind.ledger.find(x) for x in (A, B))
    assert host is None or host.state is not State.RECLAIMING
    if host is None and lodger is not None:
        assert lodger.state is State.QUEUED
