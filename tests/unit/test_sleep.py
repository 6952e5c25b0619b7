"""Sleep and wake (SPEC A10, B4, D1). Times in seconds, sizes in GiB."""

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant, RequestReading
from arbiter.core.records.estimates import ModelKey
from arbiter.units import HolderId, TicketId, seconds
from tests.unit.desk import CPU, HOST, NODE, Desk, gib, granted, reaped, refusal, revoked, s

KEY = ModelKey("text", "a", "")


def asleep(host: float = 100) -> Desk:
    """`a` (80) sleeps with 40 in host RAM and a residue of 5; `b` is being loaded."""
    desk = Desk(device=80, host=host)
    desk.resident(0, "a", 80, host=40)
    desk.engines["a"] = {CPU: 80}
    desk.read(1)
    desk.ask(20, "b", 60)
    desk.at(21, ev.Slept(TicketId("a")))
    desk.engines["a"] = {CPU: 5, HOST: 40}
    desk.read(22)
    return desk


@pytest.mark.spec("D1", "B4")
def test_a_swapped_model_goes_to_sleep_and_its_weights_are_charged_to_host_ram() -> None:
    desk = Desk(device=80, host=100)
    desk.resident(0, "a", 80, host=40)
    assert revoked(desk.ask(20, "b", 60)) == [("a", "swap", "asleep")]
    assert desk.charged(HOST) == 40  # reserved before it is told to go


@pytest.mark.spec("B4")
def test_without_room_in_host_ram_it_goes_for_good() -> None:
    desk = Desk(device=80, host=39)
    desk.resident(0, "a", 80, host=40)
    assert revoked(desk.ask(20, "b", 60)) == [("a", "swap", "gone")]
    assert desk.charged(HOST) == 0


@pytest.mark.spec("D1")
def test_sleep_is_believed_only_once_it_is_measured() -> None:
    desk = Desk(device=80, host=100)
    desk.resident(0, "a", 80, host=40)
    desk.engines["a"] = {CPU: 80}
    desk.read(1)
    desk.ask(20, "b", 60)
    assert desk.at(21, ev.Slept(TicketId("a"))) == [RequestReading(NODE)]
    assert desk.state_of("a") == "draining"
    assert granted(desk.read(21.5)) == []
    desk.engines["a"] = {CPU: 9, HOST: 40}  # fell by 71 of 80: not yet nine tenths
    assert granted(desk.read(22)) == []
    desk.engines["a"] = {CPU: 8, HOST: 40}
    assert granted(desk.read(23)) == ["b"]
    assert desk.state_of("a") == "asleep"
    assert (desk.charged(CPU), desk.charged(HOST)) == (68, 40)
    assert desk.last("model_unload").data["to"] == "asleep"


@pytest.mark.spec("D1")
def test_a_sleep_that_is_not_seen_ends_the_engine() -> None:
    desk = Desk(device=80, host=100)
    desk.resident(0, "a", 80, host=40)
    desk.engines["a"] = {CPU: 80}
    desk.ask(20, "b", 60)
    desk.at(21, ev.Slept(TicketId("a")))
    assert desk.woke(25.9) == []
    decisions = desk.woke(26)
    assert reaped(decisions) == ["a"]
    assert revoked(decisions) == [("a", "swap", "gone")]
    assert "not_asleep" in desk.kinds()


@pytest.mark.spec("D1")
def test_a_model_whose_sleep_was_not_seen_is_not_put_to_sleep_again() -> None:
    desk = Desk(device=80, host=100)
    desk.resident(0, "a", 80, host=40)
    desk.engines["a"] = {CPU: 80}
    desk.read(1)
    desk.ask(20, "b", 60)
    desk.at(21, ev.Slept(TicketId("a")))
    desk.woke(26)
    desk.gone(27, "a")
    desk.at(28, ev.Released(TicketId("b"), "manual"))
    desk.gone(28, "b")
    desk.resident(30, "a2", 80, host=40)
    assert revoked(desk.ask(50, "c", 60)) == [("a2", "swap", "gone")]


@pytest.mark.spec("D1", "A18")
def test_a_sleeper_that_rejoins_awake_in_memory_is_ended() -> None:
    desk = Desk(device=80, host=100)
    desk.host_sizes["a"] = 40
    held = desk.held("a", types.Phase.ASLEEP, size=40)
    desk.join(0, "h", held)
    desk.engines["a"] = {CPU: 40}
    assert reaped(desk.read(1)) == ["a"]
    assert "not_asleep" in desk.kinds()


@pytest.mark.spec("C6", "A9")
def test_a_sleeper_behind_in_the_line_gives_its_residue_to_the_first() -> None:
    """`c` needs what the sleeper `a` still holds; `a` asked to be woken meanwhile."""
    desk = asleep()
    desk.at(23, ev.Loaded(TicketId("b"), seconds(0)))
    assert desk.ask(23.5, "c", 80) == []  # `b` is within its minimum residency
    assert desk.ask(23.6, "a", 80, host=40, priority=types.Priority.LOW) == []
    decisions = desk.woke(24.1)
    assert reaped(decisions) == ["a"]
    assert isinstance(refusal(decisions), errors.TicketClosed)
    assert ("b", "swap", "gone") in revoked(decisions)
    desk.gone(24.2, "a")
    desk.at(24.3, ev.Released(TicketId("b"), "swap"))
    assert granted(desk.gone(24.4, "b")) == ["c"]


def test_a_sleep_nobody_reserved_host_ram_for_ends_the_engine() -> None:
    desk = Desk(device=80, host=0)
    desk.resident(0, "a", 80, host=40)
    desk.ask(20, "b", 60)
    assert reaped(desk.at(21, ev.Slept(TicketId("a")))) == ["a"]


@pytest.mark.spec("A9")
def test_a_refused_sleep_gives_the_reserved_host_ram_back() -> None:
    desk = Desk(device=80, host=100)
    desk.resident(0, "a", 80, host=40)
    desk.ask(20, "b", 60)
    desk.at(30, ev.BarrierDropped(TicketId("a"), 1))
    assert desk.charged(HOST) == 0


@pytest.mark.spec("D1")
def test_a_wake_waits_in_line_and_is_granted_beside_its_residue() -> None:
    desk = asleep()
    assert desk.ask(30, "a", 80, host=40) == []
    assert len(desk.state.queue) == 1
    desk.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    [grant] = [d for d in desk.gone(32, "b") if isinstance(d, Grant)]
    assert (grant.ticket, grant.devices) == ("a", (types.DeviceBytes(CPU, gib(80)),))
    assert desk.state_of("a") == "loading"
    assert (desk.charged(CPU), desk.charged(HOST)) == (80, 40)


@pytest.mark.spec("D1", "A10")
def test_after_a_wake_host_bytes_stay_charged_until_measured_back() -> None:
    desk = asleep()
    desk.ask(30, "a", 80, host=40)
    desk.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    desk.gone(32, "b")
    desk.at(33, ev.Loaded(TicketId("a"), seconds(1)))
    assert desk.state_of("a") == "resident"
    assert desk.charged(HOST) == 40
    desk.engines["a"] = {CPU: 80}
    desk.read(34)
    assert desk.charged(HOST) == 0
    assert desk.last("model_wake").ticket == "a"


@pytest.mark.spec("A9")
def test_a_wake_makes_room_like_any_request() -> None:
    desk = asleep()
    desk.at(23, ev.Loaded(TicketId("b"), seconds(1)))
    desk.beat(24, "b")
    assert revoked(desk.ask(30, "a", 80, host=40)) == [("b", "swap", "gone")]
    desk.at(31, ev.Released(TicketId("b"), "swap"))
    assert granted(desk.gone(32, "b")) == ["a"]


@pytest.mark.spec("A8")
def test_a_wake_nobody_waits_for_sleeps_on_and_one_under_way_finishes() -> None:
    desk = asleep()
    desk.ask(30, "a", 80, host=40)
    assert desk.at(31, ev.Withdrawn(TicketId("a"))) == []
    assert (desk.state_of("a"), len(desk.state.queue)) == ("asleep", 0)
    desk.at(32, ev.LoadBroke(TicketId("b"), "x", False))
    desk.gone(33, "b")
    assert granted(desk.ask(34, "a", 80, host=40)) == ["a"]
    assert desk.at(35, ev.Withdrawn(TicketId("a"))) == []
    assert desk.state_of("a") == "loading"


def test_a_wake_asked_while_it_falls_asleep_is_granted_once_it_sleeps() -> None:
    desk = Desk(device=80, host=100)
    desk.resident(0, "a", 80, host=40)
    desk.engines["a"] = {CPU: 80}
    desk.read(1)
    desk.ask(20, "b", 60)
    desk.at(21, ev.Slept(TicketId("a")))
    desk.at(21.1, ev.Withdrawn(TicketId("b")))
    assert desk.ask(21.2, "a", 80, host=40) == []
    desk.engines["a"] = {CPU: 5, HOST: 40}
    assert granted(desk.read(22)) == ["a"]


def test_a_wake_asked_before_a_refused_sleep_is_answered_as_it_is_resident() -> None:
    desk = Desk(device=80, host=100)
    desk.resident(0, "a", 80, host=40)
    desk.ask(20, "b", 60)
    assert desk.ask(21, "a", 80, host=40) == []
    assert granted(desk.at(30, ev.BarrierDropped(TicketId("a"), 1))) == ["a"]
    assert desk.state_of("a") == "resident"


def test_a_wake_past_its_deadline_is_refused_and_may_be_asked_again() -> None:
    desk = asleep()
    desk.ask(30, "a", 80, host=40, deadline_s=5)
    assert isinstance(refusal(desk.woke(35)), errors.DeadlineUnmet)
    assert desk.state_of("a") == "asleep"
    desk.at(36, ev.LoadBroke(TicketId("b"), "x", False))
    desk.gone(36, "b")
    assert granted(desk.ask(37, "a", 80, host=40)) == ["a"]


@pytest.mark.spec("C8")
def test_a_sleeper_past_its_keep_warm_is_ended_without_asking() -> None:
    desk = asleep()
    desk.state.ledger.find(TicketId("a")).keep_warm = seconds(100)
    desk.state.set_timer(desk.state.ledger.find(TicketId("a")), s(22))
    desk.woke(23)
    last_used = desk.state.ledger.find(TicketId("a")).last_used
    assert desk.woke(99.9) == []
    decisions = desk.woke(100)
    assert last_used == s(0)
    assert reaped(decisions) == ["a"]
    assert revoked(decisions) == [("a", "idle", "gone")]
    assert desk.charged(HOST) == 40  # until seen back
    desk.gone(101, "a")
    assert desk.charged(HOST) == 0


def test_who_waits_to_wake_learns_that_its_engine_is_gone() -> None:
    desk = asleep()
    desk.ask(30, "a", 80, host=40)
    assert refusal(desk.gone(31, "a")) == errors.TicketClosed(TicketId("a"))
    assert len(desk.state.queue) == 0


@pytest.mark.spec("A18")
def test_a_lost_slept_heals_by_heartbeat() -> None:
    desk = Desk(device=80, host=100)
    desk.resident(0, "a", 80, host=40)
    desk.engines["a"] = {CPU: 80}
    desk.read(1)
    desk.ask(20, "b", 60)
    held = desk.held("a", types.Phase.ASLEEP)
    assert desk.at(22, ev.Renewed(HolderId("h"), (held,))) == [RequestReading(NODE)]
    desk.engines["a"] = {CPU: 0, HOST: 40}
    assert granted(desk.read(23)) == ["b"]


@pytest.mark.spec("B4")
def test_overcommitted_host_ram_ends_sleepers() -> None:
    desk = asleep(host=50)
    desk.foreign[HOST] = 20
    decisions = desk.read(40)
    assert reaped(decisions) == ["a"]
    assert revoked(decisions) == [("a", "fit", "gone")]


def test_a_wake_that_pinned_models_leave_no_room_for_is_refused() -> None:
    desk = asleep()
    desk.at(23, ev.Loaded(TicketId("b"), seconds(1)))
    desk.state.ledger.pin(desk.state.ledger.find(TicketId("b")), True)
    assert refusal(desk.ask(30, "a", 80, host=40)) == errors.NeverFits(
        TicketId("a"), gib(80), gib(20)
    )
    assert desk.state_of("a") == "asleep"


@pytest.mark.spec("A18")
def test_a_sleeper_whose_node_is_not_back_yet_waits() -> None:
    desk = Desk(device=80, host=80, holders=())
    held = ev.HeldTicket(
        TicketId("z"), "a", types.Phase.ASLEEP, 0, seconds(0),
        (types.DeviceBytes("m/cpu:0", 7),), types.Need(7, host_bytes=7),
    )  # fmt: skip
    desk.at(0, ev.Joined(HolderId("h"), "m", "text", (held,)))
    assert desk.ask(1, "z", 0) == []
    desk.see_node(2, 80, 80, node="m")
    assert granted(desk.read(3, node="m")) == ["z"]


def test_a_wake_asked_twice_waits_once() -> None:
    desk = asleep()
    desk.ask(30, "a", 80, host=40)
    desk.ask(31, "a", 80, host=40)
    assert desk.state.queue.tickets() == ["a"]
    assert desk.state.queue.count("text/a") == 1


@pytest.mark.spec("B4")
def test_during_a_wake_all_of_the_bed_stays_charged_however_little_of_it_is_measured() -> None:
    desk = asleep()
    desk.engines["a"] = {CPU: 5, HOST: 30}
    desk.read(29)
    desk.ask(30, "a", 80, host=40)
    desk.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    assert granted(desk.gone(32, "b")) == ["a"]
    assert desk.charged(HOST) == 40


def being_woken() -> Desk:
    """`a` was asleep, and its wake was granted at 33."""
    desk = asleep()
    desk.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    desk.gone(32, "b")
    assert granted(desk.ask(33, "a", 80, host=40)) == ["a"]
    return desk


@pytest.mark.spec("A8")
def test_a_wake_whose_caller_left_before_the_grant_arrived_is_given_up() -> None:
    desk = being_woken()
    desk.at(33.1, ev.Withdrawn(TicketId("a")))
    beat = ev.Renewed(HolderId("h"), (desk.held("a", types.Phase.ASLEEP),))
    desk.at(37, beat)
    assert desk.state_of("a") == "loading"  # it may have been sent before the grant arrived
    desk.at(38, beat)
    assert (desk.state_of("a"), desk.charged(HOST)) == ("asleep", 40)
    assert desk.charged(CPU) == desk.engines["a"].get(CPU, 0)
    told = desk.kinds()
    desk.woke(700)
    assert "wake_given_up" in told
    assert desk.kinds().count("load_failed") == told.count("load_failed")
    assert granted(desk.ask(701, "a", 80, host=40)) == ["a"]


@pytest.mark.spec("D6")
def test_a_wake_that_was_not_verified_is_an_event_and_teaches_no_seconds() -> None:
    desk = being_woken()
    desk.at(35, ev.Loaded(TicketId("a"), seconds(2), verified=False))
    assert desk.last("wake_unverified").ticket == "a"
    assert desk.state.estimates.wake_time(KEY) == 0


@pytest.mark.spec("A17")
def test_the_seconds_of_a_wake_are_predicted_from_wakes() -> None:
    desk = being_woken()
    desk.state.estimates.loaded(KEY, seconds(30))
    desk.at(35, ev.Loaded(TicketId("a"), seconds(2)))
    assert desk.state.estimates.wake_time(KEY) == seconds(2)
    assert desk.state.estimates.load_time(KEY) > seconds(2)
    desk.engines["a"] = {CPU: 80}
    desk.read(36)
    desk.beat(37, "a")
    desk.ask(60, "c", 60)
    desk.at(61, ev.Slept(TicketId("a")))
    desk.engines["a"] = {CPU: 5, HOST: 40}
    assert granted(desk.read(62)) == ["c"]
    desk.at(63, ev.LoadBroke(TicketId("c"), "x", False))
    desk.gone(64, "c")
    [grant] = [d for d in desk.ask(65, "a", 80, host=40) if isinstance(d, Grant)]
    assert grant.predicted == seconds(2)


@pytest.mark.spec("A10")
def test_a_holder_that_keeps_bytes_wakes_nothing() -> None:
    desk = asleep()
    desk.at(23, ev.LoadBroke(TicketId("b"), "x", False))
    desk.woke(29)
    error = refusal(desk.ask(30, "a", 80, host=40))
    assert error == errors.HolderQuarantined(HolderId("h"), gib(60))
    desk.gone(31, "b")
    assert granted(desk.ask(32, "a", 80, host=40)) == ["a"]
