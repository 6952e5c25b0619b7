"""Outside its hours a model is not loaded and leaves once it is idle; batch work waits (C13)."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import Decision, LoadModel
from arbiter.core.queue.wait_estimate import SAMPLED_COUNT
from arbiter.core.records.request_queue import QueueEntry, RequestQueue
from arbiter.core.reports.dry_run import Answer, PlanQuestion
from arbiter.core.settings import Settings
from arbiter.core.types import Floor, Need, Priority
from arbiter.errors import DeadlineUnmet, OutsideHours
from arbiter.units import HolderId, Instant, NodeId, TicketId, in_seconds, seconds
from tests.support.core_driver import (
    CPU,
    PLAIN,
    CoreDriver,
    gib,
    granted,
    refusal,
    revoked,
    s,
)

pytestmark = pytest.mark.spec("C13")
NIGHT, BATCH = "22:00-07:00", "20:00-06:00"
BATCH_SETTINGS = replace(PLAIN, batch_hours=BATCH)


def read(
    driver: CoreDriver, t: float, hours: str, is_open: bool, left_s: float = 3600
) -> list[Decision]:
    return driver.at(t, ev.HoursRead((ev.HoursReading(hours, is_open, seconds(left_s)),)))


def with_hours(
    settings: Settings = PLAIN, *, is_open: bool = True, left_s: float = 3600, **of_a: object
) -> CoreDriver:
    """A device of 80; `a` has the night, which is open or closed for another hour."""
    driver = CoreDriver(device=80, settings=settings)
    read(driver, 0, NIGHT, is_open, left_s)
    text, embedding = driver.table
    first, *others = text.models
    mine = replace(first, **{"hours": NIGHT, **of_a})
    driver.table = (replace(text, models=(mine, *others)), embedding)
    driver.at(0, ev.CapabilitiesSet(driver.table))
    return driver


def said(driver: CoreDriver, ticket: str, t: float) -> str:
    return " ".join(driver.arbiter.explain(TicketId(ticket), s(t)).sentences)


# -- a model --------------------------------------------------------------------------------------


def test_a_request_outside_the_hours_is_refused_until_they_begin() -> None:
    driver = with_hours(is_open=False, left_s=600)
    error = refusal(driver.ask(60, "a", 10))
    assert error == OutsideHours("a", NIGHT, 540.0)
    assert granted(driver.ask(60, "b", 10)) == ["b"]  # which has no hours
    read(driver, 600, NIGHT, True)
    assert granted(driver.ask(600, "a2", 10)) == ["a2"]


def test_a_request_whose_deadline_is_later_waits_and_is_told_how_long() -> None:
    driver = with_hours(is_open=False, left_s=600)
    assert driver.ask(0, "a", 10, deadline_s=900) == []
    assert in_seconds(driver.queued[0].predicted) >= 600
    assert f"It waits for the hours of its model, {NIGHT}: 590 s." in said(driver, "a", 10)
    assert granted(read(driver, 600, NIGHT, True)) == ["a"]


def test_a_deadline_before_the_hours_is_refused_at_once() -> None:
    driver = with_hours(is_open=False, left_s=600)
    assert refusal(driver.ask(0, "a", 10, deadline_s=599)) == OutsideHours("a", NIGHT, 600.0)


def test_a_clock_that_was_set_refuses_what_its_deadline_allows_no_more() -> None:
    driver = with_hours(is_open=False, left_s=600)
    driver.ask(0, "a", 10, deadline_s=900)
    assert refusal(read(driver, 10, NIGHT, False, 4000)) == OutsideHours("a", NIGHT, 4000.0)


def test_what_is_queued_when_the_hours_end_is_refused() -> None:
    driver = with_hours()
    driver.resident(0, "b", 60)
    driver.beat(0, "b", inflight=1)
    driver.ask(1, "a", 60)
    assert driver.state_of("a") == "queued"
    assert refusal(read(driver, 2, NIGHT, False)) == OutsideHours("a", NIGHT, 3600.0)


def test_a_resident_model_leaves_when_its_hours_end_once_it_is_idle() -> None:
    driver = with_hours()
    driver.resident(0, "a", 10)
    driver.beat(5, "a", inflight=1)
    assert read(driver, 10, NIGHT, False) == []
    assert "outside the hours of its model" in said(driver, "a", 11)
    assert revoked(driver.beat(20, "a", inflight=0)) == [("a", "hours", "gone")]


def test_a_holder_that_is_busy_after_all_is_asked_again() -> None:
    driver = with_hours()
    driver.resident(0, "a", 10)
    assert revoked(read(driver, 10, NIGHT, False)) == [("a", "hours", "gone")]
    driver.at(10, ev.Busy(TicketId("a"), 1))
    driver.beat(11, "a", inflight=0)
    driver.sleep_until(20)
    assert revoked(driver.fire_timer(20)) == [("a", "hours", "gone")]


def test_a_load_that_began_in_time_is_not_broken_off() -> None:
    driver = with_hours()
    driver.ask(0, "a", 10)
    assert read(driver, 5, NIGHT, False) == []
    assert driver.at(8, ev.Loaded(TicketId("a"), seconds(8))) == []
    assert driver.beat(9, "a", inflight=1) == []  # it serves those who waited
    assert revoked(driver.beat(10, "a", inflight=0)) == [("a", "hours", "gone")]


def test_a_sleeping_model_leaves_host_memory_too_and_wakes_for_no_request() -> None:
    driver = CoreDriver(device=80, host=80)
    driver.at(0, ev.CapabilitiesSet(driver.table))
    night = with_hours(floor=Floor.HOST)
    driver.at(0, ev.CapabilitiesSet(night.table))
    driver.resident(0, "a", 60, host=60)
    driver.ask(5, "b", 60)
    driver.at(6, ev.Slept(TicketId("a")))
    driver.engines = {"a": {}}
    driver.read(7)
    assert driver.state_of("a") == "asleep"
    read(driver, 10, NIGHT, False)
    assert driver.state_of("a") == "reclaiming"


def test_pins_and_floors_hold_within_the_hours_only() -> None:
    for pinned in ({"pinned": True}, {"floor": Floor.DEVICE}):
        driver = with_hours(**pinned)
        driver.resident(0, "a", 60)
        assert driver.ticket("a").pinned
        assert revoked(read(driver, 10, NIGHT, False)) == [("a", "hours", "gone")]
        assert not driver.ticket("a").pinned
        driver.at(11, ev.Released(TicketId("a"), "hours"))
        assert driver.gone(11, "a") == []
        assert driver.fire_timer(3000) == []  # the floor is enforced by nothing meanwhile
        assert read(driver, 3610, NIGHT, True) == [LoadModel(HolderId("h"), "a")]


def test_a_floor_set_outside_the_hours_loads_when_they_begin() -> None:
    driver = with_hours(is_open=False)
    assert driver.at(1, ev.FloorSet("text", "a", Floor.DEVICE)) == []
    assert driver.join(2, "h2") == []
    assert LoadModel(HolderId("h"), "a") in read(driver, 3500, NIGHT, True)


def test_a_load_by_hand_outside_the_hours_is_refused() -> None:
    driver = with_hours(is_open=False)
    with pytest.raises(OutsideHours):
        driver.at(0, ev.LoadAsked("text", "a"))


PIPELINE = replace(BATCH_SETTINGS, pipelines=(("embedding", "text"),))


def seen_once(is_open: bool) -> CoreDriver:
    """`a` was measured and has left; `e1`, which comes before it in a pipeline, may be asked for.
    Batch work is held."""
    driver = with_hours(PIPELINE)
    driver.join(0, "k", capability="embedding")
    driver.ask(0, "a", 30)
    driver.at(0, ev.Loaded(TicketId("a"), seconds(1)))
    driver.engines["a"] = {CPU: 30}
    driver.read(1)
    driver.read(2)
    driver.at(3, ev.Released(TicketId("a"), "x"))
    driver.gone(3, "a")
    read(driver, 4, NIGHT, is_open)
    read(driver, 4, BATCH, False)
    driver.ask(5, "b", 10, priority=Priority.BATCH)
    driver.ask(6, "x", 10, holder="k", capability="embedding", model="e1")
    return driver


@pytest.mark.parametrize("is_open", [True, False])
def test_a_model_is_prefetched_within_its_hours_only_also_while_batch_work_waits(
    is_open: bool,
) -> None:
    driver = seen_once(is_open)
    decided = driver.at(7, ev.Loaded(TicketId("x"), seconds(1)))
    assert decided == [LoadModel(HolderId("h"), "a")] * is_open
    if is_open:  # of the lowest priority, and yet no batch work
        assert granted(driver.ask(8, "a2", 30)) == ["a2"]


def test_hours_taken_from_the_table_bind_no_more() -> None:
    driver = with_hours(is_open=False)
    driver.ask(0, "a", 10, deadline_s=9000)
    text, embedding = driver.table
    free = replace(text.models[0], hours="")
    table = (replace(text, models=(free, *text.models[1:])), embedding)
    assert granted(driver.at(1, ev.CapabilitiesSet(table))) == ["a"]


@pytest.mark.parametrize("pinned", [{"pinned": True}, {"floor": Floor.DEVICE}])
def test_a_pinned_model_whose_hours_are_taken_from_the_table_is_loaded(
    pinned: dict[str, object],
) -> None:
    driver = with_hours(is_open=False, **pinned)
    text, embedding = driver.table
    free = replace(text.models[0], hours="")
    table = (replace(text, models=(free, *text.models[1:])), embedding)
    assert driver.at(1, ev.CapabilitiesSet(table)) == [LoadModel(HolderId("h"), "a")]
    driver.at(2, ev.CapabilitiesSet(driver.table))
    removed = (replace(text, models=text.models[1:]), embedding)
    decided = driver.at(3, ev.CapabilitiesSet(removed))
    assert not any(isinstance(d, LoadModel) for d in decided)


# -- batch work -----------------------------------------------------------------------------------


def batch(driver: CoreDriver, t: float, name: str, **how: object) -> list[Decision]:
    return driver.ask(t, name, 10, priority=Priority.BATCH, **how)  # type: ignore[arg-type]


def closed_to_batch(settings: Settings = BATCH_SETTINGS, left_s: float = 600) -> CoreDriver:
    driver = CoreDriver(device=80, settings=settings)
    read(driver, 0, BATCH, False, left_s)
    return driver


def test_batch_work_outside_its_hours_waits_and_is_told_how_long() -> None:
    driver = closed_to_batch()
    assert batch(driver, 0, "a") == []
    assert in_seconds(driver.queued[0].predicted) >= 600
    assert f"Batch work waits for its hours, {BATCH}: 599 s." in said(driver, "a", 1)
    assert granted(driver.ask(1, "b", 10)) == ["b"]  # other work does not
    assert granted(read(driver, 600, BATCH, True)) == ["a"]


def test_a_models_own_hours_of_batch_work_come_before_those_of_all() -> None:
    driver = with_hours(BATCH_SETTINGS, hours="", batch_hours=NIGHT)
    read(driver, 0, BATCH, False)
    assert granted(batch(driver, 0, "a")) == ["a"]  # the night is open
    assert batch(driver, 0, "b") == []


def test_batch_work_that_becomes_urgent_goes_on() -> None:
    driver = closed_to_batch()
    batch(driver, 0, "a")
    assert granted(driver.ask(5, "a", 10)) == ["a"]


def test_batch_work_whose_deadline_is_before_its_hours_is_refused() -> None:
    error = refusal(batch(closed_to_batch(), 0, "a", deadline_s=300))
    assert isinstance(error, DeadlineUnmet) and error.predicted_s and error.predicted_s >= 600


def test_held_tickets_hold_up_none_and_do_not_age_until_they_are_let_go() -> None:
    driver = closed_to_batch()
    batch(driver, 0, "a")
    driver.sleep_until(100)
    for t in range(100, 110):
        driver.resident(t, f"b{t}", 1)
    waiting = driver.request_queue.find(TicketId("a"))
    assert waiting and not waiting.is_aged and waiting.bypassed_count == 0
    driver.ask(110, "large", 75)  # needs the room that the held one could use
    assert "1 wait before it" not in said(driver, "large", 110)
    driver.ask(111, "c", 70)
    read(driver, 600, BATCH, True)
    assert waiting.ages_from == s(600)


def test_held_tickets_before_it_do_not_lengthen_the_estimate_of_another() -> None:
    alone, behind = closed_to_batch(), closed_to_batch()
    for n in range(20):
        behind.ask(0, f"e{n}", 60, priority=Priority.BATCH)
    for driver in (alone, behind):
        driver.ask(1, "b", 60)
        driver.at(1, ev.Loaded(TicketId("b"), seconds(5)))
        driver.beat(1, "b", inflight=1)
        driver.ask(2, "c", 60)
    assert behind.queued[0].predicted == alone.queued[0].predicted


def test_closed_hours_that_left_the_table_have_no_estimate_look_at_the_whole_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = with_hours(is_open=False)
    text, embedding = driver.table
    free = replace(text.models[0], hours="")
    driver.at(1, ev.CapabilitiesSet((replace(text, models=(free, *text.models[1:])), embedding)))
    driver.ask(2, "b", 80)
    looked, first = [], RequestQueue.first

    def count(queue: RequestQueue, node: NodeId, most: int) -> list[QueueEntry]:
        looked.append(most)
        return first(queue, node, most)

    monkeypatch.setattr(RequestQueue, "first", count)
    for n in range(2 * SAMPLED_COUNT):
        driver.ask(3, f"c{n}", 80)
    assert max(looked) == SAMPLED_COUNT


def test_a_lease_waits_for_no_hours() -> None:
    driver = closed_to_batch()
    assert granted(driver.lease(1, "job", 10, preemptible=True)) == ["job"]


# -- shown ----------------------------------------------------------------------------------------


def test_the_state_shows_hours_and_when_they_begin_or_end() -> None:
    driver = with_hours(BATCH_SETTINGS, left_s=500)
    read(driver, 0, BATCH, False, 700)
    rows = driver.arbiter.snapshot(s(100)).hours
    seen = [(r.work, r.model, r.hours, r.is_open, in_seconds(r.left)) for r in rows]
    assert seen == [("model", "a", NIGHT, True, 400), ("batch", "", BATCH, False, 600)]
    assert driver.arbiter.hours == {NIGHT, BATCH}


def test_what_opens_or_closes_is_an_event_and_what_stays_is_none() -> None:
    driver = with_hours()
    read(driver, 10, NIGHT, True, 3000)
    assert "hours" not in driver.kinds()
    read(driver, 20, NIGHT, False)
    assert driver.last("hours").data == {"hours": NIGHT, "is_open": False}


@pytest.mark.parametrize(("priority", "code"), [("NORMAL", "outside_hours"), ("BATCH", None)])
def test_a_dry_run_says_not_before_the_hours(priority: str, code: str | None) -> None:
    own = {"hours": "", "batch_hours": NIGHT} if priority == "BATCH" else {}
    driver = with_hours(is_open=False, left_s=600, **own)
    question = PlanQuestion("text", "a", Need(gib(10)), True, priority=Priority[priority])
    plan = driver.arbiter.plan(question, Instant(s(100)))
    assert (plan.answer, plan.code) == (Answer.NOT_BEFORE, code)
    assert plan.wait is not None and in_seconds(plan.wait) == 500
    assert any("500 s" in line for line in plan.sentences)


@pytest.mark.spec("C8", "C13")
def test_a_pinned_model_that_was_asked_for_before_its_hours_is_pinned_once_they_begin() -> None:
    driver = with_hours(is_open=False, left_s=600, pinned=True)
    driver.ask(0, "a", 10, deadline_s=900)
    assert granted(read(driver, 600, NIGHT, True)) == ["a"]
    assert driver.ticket("a").pinned
