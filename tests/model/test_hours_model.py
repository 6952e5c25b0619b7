"""Whatever happens in whatever order: no load begins outside the hours of its model, batch work
begins within its own, and nothing is left waiting once all hours are open (C13)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.core import events as ev
from arbiter.core.decisions import Decision, Grant
from arbiter.core.types import Priority
from arbiter.units import SECOND, TicketId, seconds
from tests.support.core_driver import NODE, PLAIN, CoreDriver

pytestmark = pytest.mark.spec("C13")
MODELS = "abcd"
HOURS = {"a": "night", "b": "day"}  # the texts say nothing to the core
BATCH_OF_C, BATCH = "weekend", "evening"
EVERY = ("night", "day", "weekend", "evening")

turn = st.tuples(st.just("turn"), st.sampled_from(EVERY), st.booleans(), st.integers(1, 60))
ask = st.tuples(
    st.just("ask"),
    st.sampled_from(MODELS),
    st.sampled_from([Priority.NORMAL, Priority.BATCH]),
    st.sampled_from([None, 20, 400]),
)
use = st.tuples(st.just("use"), st.sampled_from(["idle", "busy"]))
wait = st.tuples(st.just("wait"), st.integers(1, 40))


class Day:
    """An arbiter whose holders do what they are asked at once."""

    def __init__(self) -> None:
        self.driver = CoreDriver(device=50, settings=replace(PLAIN, batch_hours=BATCH))
        text, embedding = self.driver.table
        models = tuple(
            replace(m, hours=HOURS.get(m.name, ""), batch_hours=BATCH_OF_C * (m.name == "c"))
            for m in text.models
        )
        self.driver.at(0, ev.CapabilitiesSet((replace(text, models=models), embedding)))
        self.is_open = dict.fromkeys(EVERY, True)
        self.t = 0.0
        self.asked: dict[str, Priority] = {}

    def do(self, event: ev.Event) -> None:
        self.follow(self.driver.at(self.t, event))

    def follow(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Grant):
                self.check(decision.ticket)
                self.do(ev.Loaded(decision.ticket, seconds(1)))
        for ticket in self.driver.tickets():
            if ticket.state.value == "draining":
                self.do(ev.Released(ticket.id, "asked"))
                self.follow(self.driver.gone(self.t, ticket.id))
                return

    def check(self, ticket: str) -> None:
        model = ticket[0]
        assert self.is_open.get(HOURS.get(model, ""), True), f"{ticket} outside its hours"
        if self.asked[ticket] is Priority.BATCH:
            assert self.is_open[BATCH_OF_C if model == "c" else BATCH], f"{ticket} is batch work"

    def turn(self, hours: str, is_open: bool, left_s: int) -> None:
        self.is_open[hours] = is_open
        self.do(ev.HoursRead((ev.HoursReading(hours, is_open, seconds(left_s)),)))

    def ask(self, model: str, priority: Priority, deadline_s: int | None) -> None:
        name = f"{model}{len(self.asked)}"
        self.asked[name] = priority
        self.follow(
            self.driver.ask(self.t, name, 20, model=model, priority=priority, deadline_s=deadline_s)
        )

    def use(self, how: str) -> None:
        names = [e.id for e in self.driver.tickets() if e.state.value == "resident"]
        self.follow(self.driver.beat(self.t, *names, inflight=int(how == "busy")))

    def wait(self, span_s: int) -> None:
        until = self.t + span_s
        while self.driver.timers and self.driver.timers[0] < until * SECOND:
            self.t = max(self.t, self.driver.timers[0] / SECOND)
            self.do(ev.TimerFired())
        self.t = until
        self.do(ev.TimerFired())

    def held(self) -> list[TicketId]:
        queued = [self.driver.request_queue.find(t) for t in self.driver.queue()]
        held = [w.request.ticket for w in queued if w and w.is_held]
        assert self.driver.request_queue.stats(NODE).held_count == len(held)
        return held


@given(st.lists(st.one_of(turn, ask, use, wait), max_size=40))
def test_loads_begin_within_hours_and_none_waits_for_ever(steps: list[tuple[object, ...]]) -> None:
    day = Day()
    for name, *given_ in steps:
        getattr(day, str(name))(*given_)
        day.driver.audit()
        day.held()
    for hours in EVERY:
        day.turn(hours, True, 3600)
    assert day.held() == []
    for _ in range(60):
        day.use("idle")
        day.wait(20)
    assert day.driver.queue() == []


@given(st.lists(st.one_of(turn, ask, use, wait), max_size=25))
def test_an_idle_model_outside_its_hours_is_gone(steps: list[tuple[object, ...]]) -> None:
    day = Day()
    for name, *given_ in steps:
        getattr(day, str(name))(*given_)
    day.turn("night", False, 3600)
    day.use("idle")
    day.wait(30)
    assert [e for e in day.driver.tickets() if e.model == "a" and e.state.value != "queued"] == []
