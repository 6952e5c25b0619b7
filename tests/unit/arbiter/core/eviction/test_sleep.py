"""Sleep and wake (A10, B4, D1). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant, RequestReading
from arbiter.core.records.estimates import ModelKey
from arbiter.core.settings import Settings
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    HOST,
    NODE,
    PLAIN,
    CoreDriver,
    gib,
    granted,
    killed,
    refusal,
    revoked,
    s,
)

KEY = ModelKey("text", "a", "")


def asleep(host: float = 100, settings: Settings = PLAIN) -> CoreDriver:
    """`a` (80) sleeps with 40 in host RAM and a residue of 5; `b` is being loaded."""
    driver = CoreDriver(device=80, host=host, settings=settings)
    driver.resident(0, "a", 80, host=40)
    driver.engines["a"] = {CPU: 80}
    driver.read(1)
    driver.ask(20, "b", 60)
    driver.at(21, ev.Slept(TicketId("a")))
    driver.engines["a"] = {CPU: 5, HOST: 40}
    driver.read(22)
    return driver


def claims_to_sleep() -> CoreDriver:
    """`a` (80) was asked to leave for `b`, and says at 21 that it sleeps; no byte has fallen."""
    driver = CoreDriver(device=80, host=100)
    driver.resident(0, "a", 80, host=40)
    driver.engines["a"] = {CPU: 80}
    driver.read(1)
    driver.ask(20, "b", 60)
    driver.at(21, ev.Slept(TicketId("a")))
    return driver


@pytest.mark.spec("D1", "B4")
def test_a_swapped_model_goes_to_sleep_and_its_weights_are_charged_to_host_ram() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.resident(0, "a", 80, host=40)
    assert revoked(driver.ask(20, "b", 60)) == [("a", "swap", "asleep")]
    assert driver.charged(HOST) == 40  # reserved before it is told to go


@pytest.mark.spec("D1", "D8")
def test_unload_by_hand_that_waits_for_a_heartbeat_ends_with_a_sleep() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.resident(0, "a", 80, host=40)
    driver.engines["a"] = {CPU: 80}
    driver.read(1)
    driver.beat(2, "a", inflight=1)
    driver.at(3, ev.UnloadAsked(TicketId("a")))
    assert revoked(driver.ask(20, "b", 60)) == [("a", "swap", "asleep")]
    driver.at(21, ev.Slept(TicketId("a")))
    driver.engines["a"] = {CPU: 5, HOST: 40}
    driver.read(22)
    driver.at(23, ev.LoadBroke(TicketId("b"), "x", False))
    driver.gone(24, "b")
    assert granted(driver.ask(25, "a", 80, host=40)) == ["a"]
    driver.at(26, ev.Loaded(TicketId("a"), seconds(1)))
    assert revoked(driver.beat(27, "a")) == []
    assert driver.state_of("a") == "resident"


@pytest.mark.spec("B4")
def test_model_is_unloaded_when_host_ram_has_no_room_for_its_sleep() -> None:
    driver = CoreDriver(device=80, host=39)
    driver.resident(0, "a", 80, host=40)
    assert revoked(driver.ask(20, "b", 60)) == [("a", "swap", "gone")]
    assert driver.charged(HOST) == 0


@pytest.mark.spec("D1")
def test_sleep_is_believed_only_once_it_is_measured() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.resident(0, "a", 80, host=40)
    driver.engines["a"] = {CPU: 80}
    driver.read(1)
    driver.ask(20, "b", 60)
    assert driver.at(21, ev.Slept(TicketId("a"))) == [RequestReading(NODE)]
    assert driver.state_of("a") == "draining"
    assert granted(driver.read(21.5)) == []
    driver.engines["a"] = {CPU: 9, HOST: 40}  # fell by 71 of 80: not yet nine tenths
    assert granted(driver.read(22)) == []
    driver.engines["a"] = {CPU: 8, HOST: 40}
    assert granted(driver.read(23)) == ["b"]
    assert driver.state_of("a") == "asleep"
    assert (driver.charged(CPU), driver.charged(HOST)) == (68, 40)
    assert driver.last("model_unload").data["to"] == "asleep"


@pytest.mark.spec("A21", "D1")
def test_end_long_after_a_sleep_is_no_part_of_the_time_that_the_sleep_took() -> None:
    driver = asleep()
    assert driver.estimates.turnover("text") == seconds(2)
    driver.at(23, ev.Released(TicketId("b"), "manual"))
    driver.gone(24, "b")
    driver.ask(25, "a", 80, host=40)
    driver.at(26, ev.Loaded(TicketId("a"), seconds(1)))
    driver.beat(26, "a", inflight=1)
    driver.gone(7200, "a")
    assert driver.state_of("a") == "closed"
    assert driver.estimates.turnover("text") == seconds(2)


@pytest.mark.spec("D1")
def test_a_sleep_that_is_not_seen_ends_the_engine() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.resident(0, "a", 80, host=40)
    driver.engines["a"] = {CPU: 80}
    driver.ask(20, "b", 60)
    driver.at(21, ev.Slept(TicketId("a")))
    assert driver.fire_timer(25.9) == []
    decisions = driver.fire_timer(26)
    assert killed(decisions) == ["a"]
    assert revoked(decisions) == [("a", "swap", "gone")]
    assert "not_asleep" in driver.kinds()


@pytest.mark.spec("D1")
def test_a_sleep_without_a_fall_is_doubted_before_a_sleep_that_still_falls() -> None:
    driver = claims_to_sleep()
    for t, held in (21.2, 80), (22.2, 40), (23.2, 20):
        driver.engines["a"] = {CPU: held, HOST: 40}
        assert killed(driver.read(t)) == []
    assert killed(driver.read(24.6)) == []
    assert killed(driver.read(24.7)) == ["a"]  # 1.5 s after the last fall
    assert "not_asleep" in driver.kinds()


@pytest.mark.spec("D1", "B1")
def test_a_late_reading_that_was_taken_before_the_sleep_does_not_end_it() -> None:
    driver = claims_to_sleep()
    assert killed(driver.read(22.6)) == [], "it may be as old as the bound is long"
    driver.engines["a"] = {CPU: 5, HOST: 40}
    assert granted(driver.read(22.7)) == ["b"] and driver.state_of("a") == "asleep"
    driver = claims_to_sleep()
    assert killed(driver.read(22.6)) == killed(driver.read(24.0)) == []
    assert killed(driver.read(24.1)) == ["a"], "the second was taken after the first was heard"


@pytest.mark.spec("D1")
def test_a_model_whose_sleep_was_not_seen_is_not_put_to_sleep_again() -> None:
    driver = claims_to_sleep()
    driver.fire_timer(26)
    driver.gone(27, "a")
    driver.at(28, ev.Released(TicketId("b"), "manual"))
    driver.gone(28, "b")
    driver.resident(30, "a2", 80, host=40)
    assert revoked(driver.ask(50, "c", 60)) == [("a2", "swap", "gone")]


@pytest.mark.spec("D1", "A18")
def test_asleep_ticket_that_rejoins_with_device_memory_is_killed() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.host_sizes["a"] = 40
    held = driver.held("a", types.Phase.ASLEEP, size=40)
    driver.join(0, "h", held)
    driver.engines["a"] = {CPU: 40}
    assert killed(driver.read(1)) == ["a"]
    assert "not_asleep" in driver.kinds()


@pytest.mark.spec("C6", "A9")
def test_asleep_ticket_behind_in_the_queue_gives_its_residue_to_the_head() -> None:
    """`c` needs what the sleeper `a` still holds; `a` asked to be woken meanwhile."""
    driver = asleep()
    driver.at(23, ev.Loaded(TicketId("b"), seconds(0)))
    assert driver.ask(23.5, "c", 80) == []  # `b` is within its minimum residency
    assert driver.ask(23.6, "a", 80, host=40, priority=types.Priority.LOW) == []
    decisions = driver.fire_timer(24.1)
    assert killed(decisions) == ["a"]
    assert isinstance(refusal(decisions), errors.TicketClosed)
    assert ("b", "swap", "gone") in revoked(decisions)
    driver.gone(24.2, "a")
    driver.at(24.3, ev.Released(TicketId("b"), "swap"))
    assert granted(driver.gone(24.4, "b")) == ["c"]


def test_sleep_without_a_host_reservation_kills_the_engine() -> None:
    driver = CoreDriver(device=80, host=0)
    driver.resident(0, "a", 80, host=40)
    driver.ask(20, "b", 60)
    assert killed(driver.at(21, ev.Slept(TicketId("a")))) == ["a"]


@pytest.mark.spec("A9")
def test_a_refused_sleep_gives_the_reserved_host_ram_back() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.resident(0, "a", 80, host=40)
    driver.ask(20, "b", 60)
    driver.at(30, ev.BarrierDropped(TicketId("a"), 1))
    assert driver.charged(HOST) == 0


@pytest.mark.spec("D1")
def test_wake_waits_in_the_queue_and_is_granted_beside_its_residue() -> None:
    driver = asleep()
    assert driver.ask(30, "a", 80, host=40) == []
    assert len(driver.queue()) == 1
    driver.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    [grant] = [d for d in driver.gone(32, "b") if isinstance(d, Grant)]
    assert (grant.ticket, grant.devices) == ("a", (types.DeviceBytes(CPU, gib(80)),))
    assert driver.state_of("a") == "loading"
    assert (driver.charged(CPU), driver.charged(HOST)) == (80, 40)


@pytest.mark.spec("D1", "A10")
def test_host_bytes_stay_charged_after_a_wake_until_measured_back() -> None:
    driver = asleep()
    driver.ask(30, "a", 80, host=40)
    driver.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    driver.gone(32, "b")
    driver.at(33, ev.Loaded(TicketId("a"), seconds(1)))
    assert driver.state_of("a") == "resident"
    assert driver.charged(HOST) == 40
    driver.engines["a"] = {CPU: 80}
    driver.read(34)
    assert driver.charged(HOST) == 0
    assert driver.last("model_wake").ticket == "a"


@pytest.mark.spec("A9")
def test_a_wake_makes_room_like_any_request() -> None:
    driver = asleep()
    driver.at(23, ev.Loaded(TicketId("b"), seconds(1)))
    driver.beat(24, "b")
    assert revoked(driver.ask(30, "a", 80, host=40)) == [("b", "swap", "gone")]
    driver.at(31, ev.Released(TicketId("b"), "swap"))
    assert granted(driver.gone(32, "b")) == ["a"]


@pytest.mark.spec("A8")
def test_withdrawn_wake_leaves_its_ticket_asleep_and_one_under_way_finishes() -> None:
    driver = asleep()
    driver.ask(30, "a", 80, host=40)
    assert driver.at(31, ev.Withdrawn(TicketId("a"))) == []
    assert (driver.state_of("a"), len(driver.queue())) == ("asleep", 0)
    driver.at(32, ev.LoadBroke(TicketId("b"), "x", False))
    driver.gone(33, "b")
    assert granted(driver.ask(34, "a", 80, host=40)) == ["a"]
    assert driver.at(35, ev.Withdrawn(TicketId("a"))) == []
    assert driver.state_of("a") == "loading"


def test_wake_requested_while_falling_asleep_is_granted_once_asleep() -> None:
    driver = claims_to_sleep()
    driver.at(21.1, ev.Withdrawn(TicketId("b")))
    assert driver.ask(21.2, "a", 80, host=40) == []
    driver.engines["a"] = {CPU: 5, HOST: 40}
    assert granted(driver.read(22)) == ["a"]


def test_wake_requested_before_a_refused_sleep_is_granted_as_resident() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.resident(0, "a", 80, host=40)
    driver.ask(20, "b", 60)
    assert driver.ask(21, "a", 80, host=40) == []
    assert granted(driver.at(30, ev.BarrierDropped(TicketId("a"), 1))) == ["a"]
    assert driver.state_of("a") == "resident"


def test_a_wake_past_its_deadline_is_refused_and_may_be_asked_again() -> None:
    driver = asleep()
    driver.ask(30, "a", 80, host=40, deadline_s=5)
    assert isinstance(refusal(driver.fire_timer(35)), errors.DeadlineUnmet)
    assert driver.state_of("a") == "asleep"
    driver.at(36, ev.LoadBroke(TicketId("b"), "x", False))
    driver.gone(36, "b")
    assert granted(driver.ask(37, "a", 80, host=40)) == ["a"]


@pytest.mark.spec("C8")
def test_asleep_ticket_past_its_keep_warm_is_killed_at_once() -> None:
    driver = asleep()
    driver.ticket("a").keep_warm = seconds(100)
    driver.set_timer("a", s(22))
    driver.fire_timer(23)
    last_used = driver.ticket("a").last_used
    assert driver.fire_timer(99.9) == []
    decisions = driver.fire_timer(100)
    assert last_used == s(0)
    assert killed(decisions) == ["a"]
    assert revoked(decisions) == [("a", "idle", "gone")]
    assert driver.charged(HOST) == 40  # until seen back
    driver.gone(101, "a")
    assert driver.charged(HOST) == 0


def test_queued_wake_gets_ticket_closed_when_its_engine_is_gone() -> None:
    driver = asleep()
    driver.ask(30, "a", 80, host=40)
    assert refusal(driver.gone(31, "a")) == errors.TicketClosed(TicketId("a"))
    assert len(driver.queue()) == 0


@pytest.mark.spec("A18")
def test_a_lost_slept_heals_by_heartbeat() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.resident(0, "a", 80, host=40)
    driver.engines["a"] = {CPU: 80}
    driver.read(1)
    driver.ask(20, "b", 60)
    held = driver.held("a", types.Phase.ASLEEP)
    assert driver.at(22, ev.Renewed(HolderId("h"), (held,))) == [RequestReading(NODE)]
    driver.engines["a"] = {CPU: 0, HOST: 40}
    assert granted(driver.read(23)) == ["b"]


@pytest.mark.spec("B4")
def test_overcommitted_host_ram_kills_asleep_engines() -> None:
    driver = asleep(host=50)
    driver.foreign[HOST] = 20
    decisions = driver.read(40)
    assert killed(decisions) == ["a"]
    assert revoked(decisions) == [("a", "fit", "gone")]


def test_a_wake_that_pinned_models_leave_no_room_for_is_refused() -> None:
    driver = asleep()
    driver.at(23, ev.Loaded(TicketId("b"), seconds(1)))
    driver.pin("b")
    assert refusal(driver.ask(30, "a", 80, host=40)) == errors.NeverFits(
        TicketId("a"), gib(80), gib(20)
    )
    assert driver.state_of("a") == "asleep"


@pytest.mark.spec("A18")
def test_wake_of_a_ticket_whose_node_is_not_back_waits() -> None:
    driver = CoreDriver(device=80, host=80, holders=())
    held = ev.HeldTicket(
        TicketId("z"), "a", types.Phase.ASLEEP, 0, seconds(0),
        (types.DeviceBytes("m/cpu:0", 7),), types.Need(7, host_bytes=7),
    )  # fmt: skip
    driver.at(0, ev.Joined(HolderId("h"), "m", "text", (held,)))
    assert driver.ask(1, "z", 0) == []
    driver.see_node(2, 80, 80, node="m")
    assert granted(driver.read(3, node="m")) == ["z"]


def test_repeated_wake_request_is_queued_once() -> None:
    driver = asleep()
    driver.ask(30, "a", 80, host=40)
    driver.ask(31, "a", 80, host=40)
    assert driver.queue() == ["a"]
    assert driver.request_queue.count(types.ModelName("text", "a")) == 1


@pytest.mark.spec("B4")
def test_host_reservation_stays_charged_in_full_during_a_wake() -> None:
    driver = asleep()
    driver.engines["a"] = {CPU: 5, HOST: 30}
    driver.read(29)
    driver.ask(30, "a", 80, host=40)
    driver.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    assert granted(driver.gone(32, "b")) == ["a"]
    assert driver.charged(HOST) == 40


def being_woken() -> CoreDriver:
    """`a` was asleep, and its wake was granted at 33."""
    driver = asleep()
    driver.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    driver.gone(32, "b")
    assert granted(driver.ask(33, "a", 80, host=40)) == ["a"]
    return driver


@pytest.mark.spec("A8")
def test_a_wake_whose_caller_left_before_the_grant_arrived_is_given_up() -> None:
    driver = being_woken()
    driver.at(33.1, ev.Withdrawn(TicketId("a")))
    beat = ev.Renewed(HolderId("h"), (driver.held("a", types.Phase.ASLEEP),))
    driver.at(37, beat)
    assert driver.state_of("a") == "loading"  # it may have been sent before the grant arrived
    driver.at(38, beat)
    assert (driver.state_of("a"), driver.charged(HOST)) == ("asleep", 40)
    assert driver.charged(CPU) == driver.engines["a"].get(CPU, 0)
    told = driver.kinds()
    driver.fire_timer(700)
    assert "wake_given_up" in told
    assert driver.kinds().count("load_failed") == told.count("load_failed")
    assert granted(driver.ask(701, "a", 80, host=40)) == ["a"]


@pytest.mark.spec("D6")
def test_a_wake_that_was_not_verified_is_an_event_and_teaches_no_seconds() -> None:
    driver = being_woken()
    driver.at(35, ev.Loaded(TicketId("a"), seconds(2), verified=False))
    assert driver.last("wake_unverified").ticket == "a"
    assert driver.estimates.wake_time(KEY) == 0


@pytest.mark.spec("C3", "D6")
@pytest.mark.parametrize("is_restored", [False, True])
def test_a_wake_that_was_not_verified_is_a_use_only_once_its_holder_says_so(
    is_restored: bool,
) -> None:
    """A holder ends an engine that was not mended in place, and loads the model anew for the same
    request."""
    driver = being_woken()
    before = driver.usage_rates("a")
    driver.at(33, ev.Loaded(TicketId("a"), seconds(2), verified=False))
    assert driver.ticket("a").inflight == 1 and driver.usage_rates("a") == before
    if is_restored:
        said = driver.held("a", inflight=1)
        said = replace(said, uses_count=said.uses_count + 1)
        driver.at(33, ev.Renewed(HolderId("h"), (said,)))
    else:
        driver.at(33, ev.Released(TicketId("a"), "failed"))
        driver.gone(33, "a")
        assert granted(driver.ask(33, "a2", 80, host=40)) == ["a2"]
        driver.at(33, ev.Loaded(TicketId("a2"), seconds(2)))
    recent, lasting = driver.usage_rates("a")
    assert (recent - before[0], lasting - before[1]) == pytest.approx((1, 1))


@pytest.mark.spec("A17")
def test_the_seconds_of_a_wake_are_predicted_from_wakes() -> None:
    driver = being_woken()
    driver.estimates.loaded(KEY, seconds(30))
    driver.at(35, ev.Loaded(TicketId("a"), seconds(2)))
    assert driver.estimates.wake_time(KEY) == seconds(2)
    assert driver.estimates.load_time(KEY) > seconds(2)
    driver.engines["a"] = {CPU: 80}
    driver.read(36)
    driver.beat(37, "a")
    driver.ask(60, "c", 60)
    driver.at(61, ev.Slept(TicketId("a")))
    driver.engines["a"] = {CPU: 5, HOST: 40}
    assert granted(driver.read(62)) == ["c"]
    driver.at(63, ev.LoadBroke(TicketId("c"), "x", False))
    driver.gone(64, "c")
    [grant] = [d for d in driver.ask(65, "a", 80, host=40) if isinstance(d, Grant)]
    assert grant.predicted == seconds(2)


@pytest.mark.spec("A10")
def test_wake_for_a_quarantined_holder_is_refused() -> None:
    driver = asleep()
    driver.at(23, ev.LoadBroke(TicketId("b"), "x", False))
    driver.fire_timer(29)
    error = refusal(driver.ask(30, "a", 80, host=40))
    assert error == errors.HolderQuarantined(HolderId("h"), gib(60))
    driver.gone(31, "b")
    assert granted(driver.ask(32, "a", 80, host=40)) == ["a"]


@pytest.mark.spec("K2")
def test_wait_of_a_wake_is_told_from_its_request_on() -> None:
    driver = asleep()
    driver.ask(30, "a", 80, host=40)
    driver.at(31, ev.LoadBroke(TicketId("b"), "x", False))
    driver.gone(32, "b")
    told = [e for e in driver.logged if e.kind == "ticket_granted"][-1]
    assert (told.ticket, told.took) == ("a", seconds(2))


@pytest.mark.spec("A21", "D1")
def test_told_wait_of_a_wake_counts_how_long_what_has_its_place_stays() -> None:
    driver = asleep(settings=replace(PLAIN, min_residency=seconds(10)))
    driver.at(23, ev.Loaded(TicketId("b"), seconds(3)))
    driver.beat(24, "b")
    driver.ask(24, "a", 80, host=40)
    [told] = [q for q in driver.queued if q.ticket == "a"]
    assert told.predicted >= seconds(9)
    driver.at(25, ev.Withdrawn(TicketId("a")))
    late = refusal(driver.ask(26, "a", 80, host=40, deadline_s=5))
    assert isinstance(late, errors.DeadlineUnmet)
