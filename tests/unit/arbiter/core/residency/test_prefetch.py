"""What is likely next is brought in, where a wrong guess costs nobody anything."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, LoadModel
from arbiter.core.records.ledger import Ledger
from arbiter.core.records.ticket import State, Ticket
from arbiter.errors import TicketClosed
from arbiter.units import HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    PLAIN,
    CoreDriver,
    capability,
    granted,
    refusal,
    revoked,
)

pytestmark = pytest.mark.spec("C11")
PIPELINE = replace(PLAIN, pipelines=(("embedding", "text"),))
HABIT = replace(PLAIN, preload="history")


def driver(settings: object = PIPELINE) -> CoreDriver:
    """A text model that was measured once and has left, and the holders of both."""
    d = CoreDriver(settings=settings)  # type: ignore[arg-type]
    d.at(0, ev.Joined(HolderId("k"), NodeId("n"), "embedding", ()))
    come_and_go(d, 0, "a", 30)
    return d


def come_and_go(
    d: CoreDriver, t: float, name: str, size: float, model: str = "a", **asked: Any
) -> None:
    d.ask(t, name, size, model=model, **asked)
    d.at(t, ev.Loaded(TicketId(name), seconds(1)))
    d.engines[name] = {CPU: size}
    d.read(t + 1)
    d.read(t + 2)
    d.at(t + 3, ev.Released(TicketId(name), "x"))
    d.gone(t + 3, name)


def use(d: CoreDriver, t: float, name: str = "e1x") -> list[Decision]:
    """Somebody uses the embedding model."""
    d.ask(t, name, 10, capability="embedding", model="e1", holder="k")
    return d.at(t, ev.Loaded(TicketId(name), seconds(1)))


def use_and_leave(d: CoreDriver, t: float, name: str) -> list[Decision]:
    """What its use led to; a second later it has left."""
    decided = use(d, t, name)
    d.at(t + 1, ev.Released(TicketId(name), "x"))
    d.gone(t + 1, name)
    return decided


def test_next_model_of_a_pipeline_is_prefetched_into_free_room() -> None:
    d = driver()
    assert use(d, 10) == [LoadModel(HolderId("h"), "a")]
    assert d.last("model_preload").data["why"] == "pipeline"
    assert granted(d.ask(11, "a2", 30, model="a")) == ["a2"]
    assert d.at(12, ev.Loaded(TicketId("a2"), seconds(1))) == []  # its own load prefetches nothing


def test_a_use_looks_at_no_ticket_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    d = driver()
    use(d, 10)
    d.resident(11, "a2", 30, model="a")
    looked, tickets = [], Ledger.tickets

    def note(ledger: Ledger, *states: State) -> list[Ticket]:
        looked.append(states)
        return tickets(ledger, *states)

    monkeypatch.setattr(Ledger, "tickets", note)
    assert d.at(12, ev.Renewed(HolderId("k"), (used(d, "e1x", 12),))) == []
    assert looked == []


def test_a_prefetch_looks_at_no_ticket_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    d = driver()
    monkeypatch.setattr(Ledger, "tickets", lambda *_: pytest.fail("it walks all tickets"))
    assert use(d, 5) == [LoadModel(HolderId("h"), "a")]


def used(d: CoreDriver, name: str, t: float) -> ev.HeldTicket:
    """What a holder says of a ticket that has served once more."""
    held = d.held(name, t=t, model="e1")
    return replace(held, uses_count=held.uses_count + 1)


def waits(d: CoreDriver) -> None:
    """For what is in use, beside room that it cannot use and the guess could."""
    d.resident(10, "b", 30)
    d.beat(10, "b", inflight=1)
    d.ask(11, "c", 60)


def is_short(d: CoreDriver) -> None:
    d.at(10, ev.PressurePushed(CPU, types.Level.LOW, None, seconds(60)))


def is_full(d: CoreDriver) -> None:
    d.resident(10, "b", 60)


def loads(d: CoreDriver) -> None:
    d.ask(10, "b", 1)


def is_here(d: CoreDriver) -> None:
    d.resident(10, "a5", 30, model="a")


def is_leaving(d: CoreDriver) -> None:
    is_here(d)
    d.at(11, ev.UnloadAsked(TicketId("a5")))
    assert d.state_of("a5") == "draining"


def has_no_holder(d: CoreDriver) -> None:
    d.at(10, ev.HolderLost(HolderId("h")))


def nothing(d: CoreDriver) -> None:
    d.resident(10, "b", 30)


@pytest.mark.parametrize(
    ("why", "prefetched"),
    [(nothing, ["a"])]
    + [(why, []) for why in (waits, is_short, is_full, loads, is_here, is_leaving, has_no_holder)],
)
def test_prefetch_begins_only_where_it_costs_no_other_model(
    why: Callable[[CoreDriver], None], prefetched: list[str]
) -> None:
    d = driver()
    come_and_go(d, 3, "a3", 30)
    come_and_go(d, 6, "a4", 30)  # so it is used most, whatever stands in its way
    why(d)
    said = use(d, 20)
    assert [r.model for r in said if isinstance(r, LoadModel)] == prefetched
    assert d.state_of("e1x") == "resident"  # it was used


def test_model_never_measured_is_not_prefetched() -> None:
    d = CoreDriver(settings=PIPELINE)
    assert use(d, 10) == []


def test_prefetch_whose_room_has_gone_is_dropped_and_evicts_nothing() -> None:
    d = driver()
    use(d, 10)
    d.resident(11, "b", 60)
    error = refusal(d.ask(20, "a2", 30, model="a"))
    assert isinstance(error, TicketClosed) and d.state_of("b") == "resident"
    assert d.ask(21, "a3", 30, model="a") != []  # somebody really wants it: b makes room
    assert d.state_of("b") == "draining"


def test_usual_successor_is_prefetched_and_a_coincidence_is_not() -> None:
    d = driver(HABIT)
    for round_count in range(3):
        t = 20 + 40 * round_count
        assert use_and_leave(d, t, f"e1{round_count}") == []
        come_and_go(d, t + 2, f"a{round_count + 2}", 30)
    assert use(d, 200, "e1y") == [LoadModel(HolderId("h"), "a")]
    assert d.last("model_preload").data["why"] == "history"


def test_use_long_after_another_is_no_transition() -> None:
    d = driver(HABIT)
    for round_count in range(4):
        t = 200 + 400 * round_count
        use_and_leave(d, t, f"e1{round_count}")
        come_and_go(d, t + 100, f"a{round_count + 2}", 30)
    assert use(d, 4000, "e1y") == []


def test_loading_prefetch_ends_as_soon_as_a_request_needs_its_bytes() -> None:
    d = driver()
    use(d, 10)
    assert granted(d.ask(11, "a2", 30, model="a")) == ["a2"]
    assert [r[:2] for r in revoked(d.ask(12, "b", 60))] == [("a2", "withdrawn")]
    assert granted(d.gone(12.1, "a2")) == ["b"]


@pytest.mark.spec("C11", "K4")
@pytest.mark.parametrize(
    "asked", [ev.LoadAsked("text", "a"), ev.FloorSet("text", "a", types.Floor.DEVICE)]
)
def test_load_by_hand_after_a_prefetch_that_ended_is_no_prefetch(asked: ev.Event) -> None:
    """Others leave for it, as they do where nothing was prefetched."""
    d = driver()
    use(d, 10)
    assert granted(d.ask(11, "a2", 30, model="a")) == ["a2"]
    d.ask(12, "b", 60)
    assert granted(d.gone(12.1, "a2")) == ["b"]
    d.at(12.2, ev.Loaded(TicketId("b"), seconds(1)))
    assert d.at(14, asked) == [LoadModel(HolderId("h"), "a")]
    assert [r[:2] for r in revoked(d.ask(14.1, "a3", 30, model="a"))] == [("b", "swap")]


@pytest.mark.spec("C11", "K4")
def test_load_by_hand_of_a_prefetch_under_way_takes_it_over() -> None:
    d = driver()
    use(d, 10)
    assert granted(d.ask(11, "a2", 30, model="a")) == ["a2"]
    assert d.at(11.5, ev.LoadAsked("text", "a")) == []
    assert revoked(d.ask(12, "b", 60)) == []


@pytest.mark.spec("C11", "D8")
def test_load_that_no_request_waits_for_leads_to_no_prefetch() -> None:
    d = driver()
    d.at(30, ev.LoadAsked("embedding", "e1"))
    d.ask(30, "e1x", 10, holder="k", model="e1", capability="embedding")
    done = ev.Loaded(TicketId("e1x"), seconds(1), is_used=False)
    assert d.at(31, done) == d.beat(32, "e1x", holder="k") == []
    told = ev.Renewed(HolderId("k"), (used(d, "e1x", 33),))
    assert d.at(33, told) == [LoadModel(HolderId("h"), "a")]


ONE = replace(PIPELINE, one_resident_roles=frozenset({"text"}))


@pytest.mark.spec("A11")
def test_nothing_is_prefetched_beside_a_model_of_its_exclusion_group() -> None:
    d = driver(ONE)
    d.resident(5, "b", 5)
    assert use(d, 10) == []


@pytest.mark.spec("A11")
def test_prefetch_whose_exclusion_group_has_filled_is_dropped_and_nothing_leaves() -> None:
    d = driver(ONE)
    assert use(d, 10) == [LoadModel(HolderId("h"), "a")]
    d.resident(10, "b", 5)
    asked = d.ask(11, "a2", 30, model="a")
    assert isinstance(refusal(asked), TicketClosed) and revoked(asked) == []
    assert [r[0] for r in revoked(d.ask(12, "a3", 30, model="a"))] == ["b"]  # a request swaps


def test_unused_prefetch_has_no_minimum_residency() -> None:
    d = driver()
    use(d, 10)
    d.ask(11, "a2", 30, model="a")
    d.at(41, ev.Loaded(TicketId("a2"), seconds(30)))
    asked = d.ask(41.1, "b", 60, priority=types.Priority.BATCH)  # no more urgent than a guess is
    assert [r[:2] for r in revoked(asked)] == [("a2", "swap")]


def test_used_prefetch_has_its_minimum_residency() -> None:
    d = driver()
    use(d, 10)
    d.ask(11, "a2", 30, model="a")
    d.at(41, ev.Loaded(TicketId("a2"), seconds(30)))
    d.beat(41.1, "a2", inflight=1)
    d.beat(41.2, "a2")
    assert revoked(d.ask(41.3, "b", 60, priority=types.Priority.BATCH)) == []


VOICE = {"capability": "vad", "holder": "w", "model": "v"}


def three(settings: object) -> CoreDriver:
    """Holders of three capabilities; a text and a vad model were measured once and have left."""
    d = driver(settings)
    d.at(3, ev.CapabilitiesSet((*d.table, capability("vad", "vad", ("v",)))))
    d.at(3, ev.Joined(HolderId("w"), NodeId("n"), "vad", ()))
    come_and_go(d, 4, "v1", 5, **VOICE)
    return d


def chain() -> CoreDriver:
    """Three in a row: `a` is being prefetched, and is followed by `v`."""
    d = three(replace(PLAIN, pipelines=(("embedding", "text", "vad"),)))
    assert use(d, 10) == [LoadModel(HolderId("h"), "a")]
    d.ask(11, "a2", 30, model="a")
    return d


def test_prefetched_stage_leads_to_the_stage_behind_it() -> None:
    d = chain()
    assert d.at(12, ev.Loaded(TicketId("a2"), seconds(1))) == [LoadModel(HolderId("w"), "v")]


def test_stage_that_failed_to_load_leads_nowhere() -> None:
    d = chain()
    decided = d.at(12, ev.LoadBroke(TicketId("a2"), "no such file", False))
    assert not any(isinstance(decision, LoadModel) for decision in decided)


def test_model_prefetched_by_habit_leads_on_only_once_it_is_used() -> None:
    d = three(HABIT)
    for number in range(3):
        t = 20 + 40 * number
        use_and_leave(d, t, f"e1{number}")
        come_and_go(d, t + 2, f"a{number + 2}", 30)
        come_and_go(d, t + 6, f"v{number + 2}", 5, **VOICE)
    assert use(d, 200, "e1y") == [LoadModel(HolderId("h"), "a")]
    d.ask(201, "a9", 30, model="a")
    assert d.at(202, ev.Loaded(TicketId("a9"), seconds(1))) == []
    used = replace(d.held("a9"), uses_count=1)
    assert d.at(203, ev.Renewed(HolderId("h"), (used,))) == [LoadModel(HolderId("w"), "v")]


def test_requested_prefetch_triggers_its_successor_like_any_load() -> None:
    d = chain()
    d.ask(11.5, "a2", 30, model="a")  # a request has joined it
    assert d.at(12, ev.Loaded(TicketId("a2"), seconds(1))) == [LoadModel(HolderId("w"), "v")]


def test_stage_that_is_resident_leads_to_the_stage_behind_it() -> None:
    d = chain()
    d.ask(11.5, "a2", 30, model="a")  # a request has joined it
    d.at(12, ev.Loaded(TicketId("a2"), seconds(1)))
    used = replace(d.held("e1x"), uses_count=2)
    assert d.at(14, ev.Renewed(HolderId("k"), (used,))) == [LoadModel(HolderId("w"), "v")]


def test_model_that_failed_to_load_is_not_prefetched() -> None:
    d = driver()
    d.ask(5, "a2", 30, model="a")
    d.at(6, ev.LoadBroke(TicketId("a2"), "no such file", False))
    d.gone(6, "a2")
    assert use(d, 100) == []  # its cool-down is over; whoever wants it may try


def test_prefetch_that_was_not_taken_up_expires() -> None:
    d = driver()
    use(d, 10)
    d.resident(11, "b", 60)
    asked = d.ask(71, "a2", 30, model="a")  # not for the guess: `b` makes room
    assert [name for name, _, _ in revoked(asked)] == ["b"]


@pytest.mark.parametrize(("others_count", "prefetched"), [(1, ["b"]), (4, [])])
def test_model_that_follows_less_than_every_second_time_is_not_prefetched(
    others_count: int, prefetched: list[str]
) -> None:
    d = driver(HABIT)
    for number, model in enumerate("abbabbab"):  # `b` five times, `a` three times
        t = 20 + 40 * number
        assert use(d, t, f"e1{number}") == [] or number > 3
        d.at(t + 1, ev.Released(TicketId(f"e1{number}"), "x"))
        d.gone(t + 1, f"e1{number}")
        d.forget_prefetches()  # nobody brings it in here
        come_and_go(d, t + 2, f"{model}{number + 2}", 30, model)
    d.transition_counts[("embedding", "e1")][("text", "c")] = others_count
    assert [r.model for r in use(d, 400, "e1y") if isinstance(r, LoadModel)] == prefetched


def test_prefetch_requested_while_it_loads_becomes_an_ordinary_load() -> None:
    d = driver()
    use(d, 10)
    d.ask(11, "a2", 30, model="a")
    d.ask(11.5, "a2", 30, model="a")  # a request has joined it
    assert revoked(d.ask(12, "b", 60)) == [] and d.state_of("a2") == "loading"


def test_habit_that_leads_to_a_removed_capability_prefetches_nothing() -> None:
    d = three(HABIT)
    for number in range(3):
        t = 20 + 40 * number
        use_and_leave(d, t, f"e1{number}")
        come_and_go(d, t + 2, f"v{number + 2}", 5, **VOICE)
    d.at(190, ev.CapabilitiesSet(d.table))
    assert use(d, 200, "e1y") == []


def optional(d: CoreDriver, t: float, name: str) -> None:
    """In the table its model is one without which requests are served too."""
    text, *others = d.table
    models = tuple(replace(m, is_optional=m.name == name) for m in text.models)
    d.at(t, ev.CapabilitiesSet((replace(text, models=models), *others)))


@pytest.mark.spec("F7")
def test_optional_model_gets_free_room_at_any_request_and_never_waits_for_more() -> None:
    d = CoreDriver()
    optional(d, 5, "c")
    assert granted(d.ask(10, "c1", 30, model="c")) == ["c1"]
    assert d.ask(10, "c1", 30, model="c") != [] and d.find("c1").is_prefetch  # asked for twice
    assert [r[:2] for r in revoked(d.ask(11, "b", 60))] == [("c1", "withdrawn")]
    d.gone(12, "c1")
    d.at(13, ev.Loaded(TicketId("b"), seconds(1)))
    again = d.ask(14, "c2", 30, model="c")
    assert isinstance(refusal(again), TicketClosed) and revoked(again) == []
    assert d.state_of("b") == "resident"


@pytest.mark.spec("F7")
def test_optional_model_is_not_prefetched() -> None:
    d = driver()
    come_and_go(d, 3, "a3", 30)
    optional(d, 8, "a")
    assert use(d, 10) == []


@pytest.mark.spec("C11", "D8")
def test_prefetch_that_led_to_no_load_bears_on_no_load_that_is_asked_for_later() -> None:
    d = driver()
    assert use(d, 10) == [LoadModel(HolderId("h"), "a")]
    assert d.arbiter.export_asked() == []
    d.fire_timer(80)
    assert d.arbiter.export_asked() == [], "a prefetch that is over is no load to begin"
    d.arbiter.restore_asked([["text", "a"]])  # as a load that waits for a holder
    assert d.arbiter.export_asked() == [["text", "a"]]
