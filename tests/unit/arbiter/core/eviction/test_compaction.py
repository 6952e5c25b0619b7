"""Idle models that hold more than they need are freed and loaded again (D7)."""

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Compacted, Decision, LoadModel, SparedModel
from arbiter.core.records.ledger import Ledger
from arbiter.core.reports.plan import PlanQuestion
from arbiter.core.settings import Settings
from arbiter.errors import UnknownModel
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
    revoked,
)

pytestmark = pytest.mark.spec("D7")
COMPACTING = replace(PLAIN, compact_least_bytes=gib(4), min_residency=seconds(0))


def driver(settings: Settings = COMPACTING, **how: object) -> CoreDriver:
    return CoreDriver(settings=settings, **how)  # type: ignore[arg-type]


def settle(d: CoreDriver, t: float, name: str, size: float, **how: object) -> None:
    """A load whose first use is over: its process holds what was granted."""
    d.resident(t, name, size, **how)
    d.engines[name] = {CPU: size}
    d.read(t)
    d.read(t)


def bloat(d: CoreDriver, t: float, name: str, held: float) -> None:
    d.engines[name] = {CPU: held}
    d.read(t)


def ask_compaction(d: CoreDriver, t: float, *models: str) -> list[Decision]:
    names = tuple(types.ModelName("text", model) for model in models)
    return d.at(t, ev.CompactAsked("by hand", names))


def unload(d: CoreDriver, t: float, name: str) -> list[Decision]:
    """Its holder lets go, and the agent sees the bytes back."""
    assert killed(d.at(t, ev.Released(TicketId(name), "compact"))) == [name]
    return d.gone(t, name)


def load_again(
    d: CoreDriver, t: float, name: str, model: str, computed: float, holder: str = "h"
) -> list[Decision]:
    """Its holder asks as the decision told it to, is granted, and loads."""
    asked = d.ask(t, name, computed, model=model, explicit=False, holder=holder)
    assert granted(asked) == [name]
    return d.at(t, ev.Loaded(TicketId(name), seconds(1)))


def test_named_models_are_found_without_a_walk_over_all_tickets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d = driver()
    settle(d, 0, "a", 20)
    monkeypatch.setattr(Ledger, "tickets", lambda *_: pytest.fail("it walks all tickets"))
    assert revoked(ask_compaction(d, 6, "a")) == [("a", "compact", "gone")]


def test_named_idle_model_is_freed_and_loaded_again_and_the_count_is_returned() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    bloat(d, 5, "a", 30)
    assert d.account(CPU).charged_bytes == gib(30)
    assert revoked(ask_compaction(d, 6, "a")) == [("a", "compact", "gone")]
    assert unload(d, 7, "a") == [LoadModel(HolderId("h"), "a")]
    done = load_again(d, 8, "a2", "a", computed=20)
    assert done == [Compacted("by hand", 1, gib(10), (), True)]
    assert d.account(CPU).charged_bytes == gib(20)
    assert d.ticket("a2").is_prefetch, "it comes into free room and gives way to requests"
    told = d.last("model_compacted")
    assert (told.size_bytes, told.data["model"], told.data["compacted"]) == (gib(10), "a", "a")
    assert d.last("compaction").data["count"] == 1


def test_named_model_without_waste_is_freed_and_loaded_again_all_the_same() -> None:
    d = driver()
    d.resident(0, "a", 20)
    assert revoked(ask_compaction(d, 1, "a")) == [("a", "compact", "gone")]
    unload(d, 2, "a")
    assert load_again(d, 3, "a2", "a", computed=20) == [Compacted("by hand", 1, gib(0), (), True)]


def test_without_names_only_models_with_enough_waste_go_one_at_a_time() -> None:
    d = driver()
    for name in "abc":
        settle(d, 0, name, 10, explicit=False)
    for name, held in (("a", 14), ("b", 13), ("c", 16)):
        bloat(d, 1, name, held)
    assert revoked(ask_compaction(d, 2)) == [("a", "compact", "gone")]
    assert unload(d, 3, "a") == [LoadModel(HolderId("h"), "a")]
    assert revoked(load_again(d, 4, "a2", "a", computed=10)) == [("c", "compact", "gone")]
    assert unload(d, 5, "c") == [LoadModel(HolderId("h"), "c")]
    assert load_again(d, 6, "c2", "c", computed=10) == [Compacted("by hand", 2, gib(10), (), True)]
    assert d.state_of("b") == "resident"


def sleeps(d: CoreDriver) -> None:
    d.resident(0, "a", 20, host=20)
    d.engines["a"] = {CPU: 20}
    d.read(1)
    d.ask(2, "b", 70)
    d.engines["a"] = {HOST: 20}
    d.at(3, ev.Slept(TicketId("a")))
    d.read(3)
    assert d.state_of("a") == "asleep"


def is_used(d: CoreDriver) -> None:
    d.resident(0, "a", 20)
    d.beat(1, "a", inflight=1)


def is_pinned(d: CoreDriver) -> None:
    d.resident(0, "a", 20)
    d.at(1, ev.FloorSet("text", "a", types.Floor.DEVICE))


def may_only_sleep(d: CoreDriver) -> None:
    d.at(0, ev.FloorSet("text", "a", types.Floor.HOST))
    d.resident(1, "a", 20)


def has_grown(d: CoreDriver) -> None:
    d.resident(0, "a", 20)
    d.at(1, ev.GrowthAsked(TicketId("a"), gib(5), seconds(10)))


def loads(d: CoreDriver) -> None:
    d.ask(0, "a", 20)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (sleeps, "it is asleep, and its copy in host RAM stays"),
        (is_used, "it is in use"),
        (is_pinned, "it is pinned"),
        (may_only_sleep, "it is pinned"),
        (has_grown, "it has grown"),
        (loads, "it is not resident"),
    ],
)
def test_what_is_asleep_in_use_or_pinned_stays_and_the_answer_says_why(
    prepare: Callable[[CoreDriver], None], why: str
) -> None:
    d = driver(host=60)
    prepare(d)
    before = d.state_of("a")
    spared = (SparedModel("a", TicketId("a"), why),)
    assert ask_compaction(d, 5, "a") == [Compacted("by hand", 0, gib(0), spared, True)]
    assert d.state_of("a") == before


@pytest.mark.spec("C2")
def test_no_other_ticket_takes_the_room_of_a_compacted_model() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    d.resident(0, "b", 30)
    bloat(d, 5, "a", 45)
    assert revoked(d.ask(6, "c", 60, priority=types.Priority.BATCH)) == []
    why = "another ticket waits on its node, and would take its room"
    spared = (SparedModel("a", TicketId("a"), why),)
    assert ask_compaction(d, 7, "a") == [Compacted("by hand", 0, gib(0), spared, True)]


def test_model_that_is_used_after_all_is_spared_and_the_next_goes() -> None:
    d = driver()
    d.resident(0, "a", 20)
    d.resident(0, "b", 20)
    assert revoked(ask_compaction(d, 1, "a", "b")) == [("a", "compact", "gone")]
    assert revoked(d.at(2, ev.Busy(TicketId("a"), 1))) == [("b", "compact", "gone")]
    unload(d, 3, "b")
    spared = (SparedModel("a", TicketId("a"), "it was in use after all"),)
    assert load_again(d, 4, "b2", "b", computed=20) == [
        Compacted("by hand", 1, gib(0), spared, True)
    ]


def test_compaction_tells_of_a_model_that_is_not_loaded_and_refuses_an_unknown_model() -> None:
    d = driver()
    spared = (SparedModel("a", None, "it is not loaded"),)
    assert ask_compaction(d, 1, "a") == [Compacted("by hand", 0, gib(0), spared, True)]
    with pytest.raises(UnknownModel):
        ask_compaction(d, 2, "a", "missing")


def test_bytes_that_do_not_come_back_are_not_waited_for() -> None:
    d = driver()
    d.resident(0, "a", 20)
    ask_compaction(d, 1, "a")
    d.at(2, ev.Released(TicketId("a"), "compact"))
    late = seconds(2) + d.arbiter.settings.timeouts.reclaim_overdue
    done = [x for x in d.fire_timer(late / 1e9 + 0.1) if isinstance(x, Compacted)]
    spared = (SparedModel("a", TicketId("a"), "its bytes have not come back"),)
    assert done == [Compacted("by hand", 0, gib(0), spared, True)]


def test_load_that_its_holder_never_asks_for_ends_the_compaction() -> None:
    d = driver()
    d.resident(0, "a", 20)
    ask_compaction(d, 1, "a")
    unload(d, 2, "a")
    until = d.arbiter.settings.prefetch_for / 1e9
    assert not [x for x in d.fire_timer(1.9 + until) if isinstance(x, Compacted)]
    assert d.arbiter.compaction("by hand") == Compacted("by hand", 1, gib(0), (), False)
    assert d.fire_timer(2.1 + until) == [Compacted("by hand", 1, gib(0), (), True)]
    assert d.arbiter.compaction("by hand") is None


def test_model_whose_last_load_failed_may_be_compacted_once_its_cool_down_is_over() -> None:
    d = driver(holders=("h", "g"))
    d.resident(0, "a", 20)
    d.ask(1, "a2", 20, holder="g")
    d.at(2, ev.LoadBroke(TicketId("a2"), "bad weights", False))
    d.gone(2, "a2")
    [answer] = ask_compaction(d, 3, "a")
    assert isinstance(answer, Compacted)
    assert [spared.why for spared in answer.spared] == ["it could not be loaded again now"]
    assert revoked(ask_compaction(d, 4.1, "a")) == [("a", "compact", "gone")]


def test_lost_holder_does_not_load_again_and_its_model_is_not_counted() -> None:
    d = driver()
    d.resident(0, "a", 20)
    ask_compaction(d, 1, "a")
    d.at(2, ev.HolderLost(HolderId("h")))
    spared = SparedModel("a", TicketId("a"), "its replica has gone")
    assert d.gone(3, "a") == [Compacted("by hand", 0, gib(0), (spared,), True)]


def test_a_closing_arbiter_loads_nothing_again() -> None:
    d = driver()
    d.resident(0, "a", 20)
    ask_compaction(d, 1, "a")
    d.at(2, ev.ClosingDown())
    assert not any(isinstance(e, LoadModel) for e in unload(d, 3, "a"))


def test_a_ticket_that_has_left_is_no_longer_held_wasteful() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    bloat(d, 5, "a", 45)
    d.at(6, ev.Released(TicketId("a"), "manual"))
    d.gone(7, "a")
    assert not d.wasteful()


# -- for a queued ticket ---------------------------------------------------------------------------


def test_load_that_fits_beside_a_smaller_model_has_it_compacted_before_any_leaves() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    d.resident(0, "b", 30)  # the cheapest victim, were bytes evicted
    bloat(d, 5, "a", 45)
    assert revoked(d.ask(6, "c", 20)) == [("a", "compact", "gone")]
    assert said(d, "a")[1].startswith("It is unloaded to be loaded again")
    assert granted(unload(d, 7, "a")) == ["c"]
    assert granted(load_again_for(d, 8)) == ["a2"]
    states = {name: d.state_of(name) for name in ("a2", "b", "c")}
    assert states == {"a2": "loading", "b": "resident", "c": "loading"}
    assert d.account(CPU).free_bytes == gib(10)
    assert "loaded again smaller: a (25.0 GiB" in " ".join(said(d, "a"))
    assert "loaded again smaller: a (25.0 GiB" in " ".join(said(d, "c"))


def test_a_dry_run_says_that_a_model_would_be_compacted() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    d.resident(0, "b", 30)
    bloat(d, 5, "a", 45)
    question = PlanQuestion("text", "c", types.Need(gib(20)), True)
    plan = d.arbiter.plan(question, d.now)
    assert [(v.ticket, v.goes) for v in plan.victims] == [("a", "compacted")]
    assert "is unloaded and loaded again, smaller" in plan.sentences[0]


@pytest.mark.spec("A15")
def test_arbiter_free_takes_whole_models_which_return_after_it() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    d.resident(0, "b", 30)
    bloat(d, 5, "a", 45)
    terms = types.LeaseConditions("ops", seconds(60), seconds(0), frees=True)
    holder = HolderId("lease:free")
    d.at(6, ev.Joined(holder, NODE, "lease", ()))
    need = types.Need(gib(20))
    asked = ev.Requested(TicketId("free"), holder, "lease", "gpu", need, lease=terms)
    assert {reason for _, reason, _ in revoked(d.at(6, asked))} == {"free"}


def said(d: CoreDriver, name: str) -> tuple[str, ...]:
    return d.arbiter.explain(TicketId(name), d.now).sentences


def load_again_for(d: CoreDriver, t: float) -> list[Decision]:
    return d.ask(t, "a2", 20, model="a", explicit=False)


def test_model_is_loaded_again_only_once_the_asker_has_its_answer() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    settle(d, 0, "b", 20, explicit=False)
    bloat(d, 5, "a", 35)
    bloat(d, 5, "b", 35)
    both = revoked(d.ask(6, "c", 35))
    assert sorted(both) == [("a", "compact", "gone"), ("b", "compact", "gone")]
    decided = unload(d, 7, "a")
    assert granted(decided) == ["c"] and LoadModel(HolderId("h"), "a") not in decided
    assert unload(d, 8, "b") == [LoadModel(HolderId("h"), "a")]
    assert load_again(d, 9, "a2", "a", computed=20) == [LoadModel(HolderId("h"), "b")]
    assert load_again(d, 10, "b2", "b", computed=20)[-1] == Compacted("for c", 2, gib(30), (), True)
    assert d.account(CPU).free_bytes == gib(5)


def test_waste_that_does_not_suffice_leaves_the_choice_to_the_policy() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    d.resident(0, "b", 30)
    bloat(d, 5, "a", 30)
    assert {reason for _, reason, _ in revoked(d.ask(6, "c", 40))} == {"swap"}


def test_model_whose_other_process_would_teach_its_peak_again_is_not_compacted_for_others() -> None:
    d = driver(holders=("h", "k"))
    settle(d, 0, "a", 20, explicit=False)
    settle(d, 0, "a2", 20, model="a", holder="k", explicit=False)
    bloat(d, 5, "a", 40)
    assert {reason for _, reason, _ in revoked(d.ask(6, "c", 30))} == {"swap"}


def test_the_same_holds_for_a_process_on_another_node() -> None:
    d = driver()
    d.see_node(0, 80, 0, node="n2")
    d.read(0, node="n2")
    d.join(0, "k", node="n2")
    settle(d, 0, "a", 20, explicit=False)
    d.resident(0, "a2", 20, model="a", holder="k", explicit=False)
    bloat(d, 5, "a", 70)
    assert {reason for _, reason, _ in revoked(d.ask(6, "c", 30))} == {"swap"}


def test_request_takes_the_room_of_a_model_that_is_being_compacted() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    bloat(d, 5, "a", 40)
    ask_compaction(d, 6, "a")
    assert unload(d, 7, "a") == [LoadModel(HolderId("h"), "a")]
    assert granted(d.ask(8, "b", 70)) == ["b"]
    decided = load_again_for(d, 9)
    assert granted(decided) == [] and decided[-1] == Compacted("by hand", 1, gib(20), (), True)


# -- after so many loads ---------------------------------------------------------------------------


def test_every_so_many_loads_of_a_device_its_idle_models_are_compacted() -> None:
    d = driver(replace(COMPACTING, compact_every_loads_count=3))
    settle(d, 0, "a", 10, explicit=False)
    bloat(d, 1, "a", 20)
    d.resident(2, "b", 10)
    d.ask(3, "c", 10)
    assert revoked(d.at(4, ev.Loaded(TicketId("c"), seconds(1)))) == [("a", "compact", "gone")]
    unload(d, 5, "a")
    assert load_again(d, 6, "a2", "a", computed=10) == [
        Compacted("loads of n/cpu:0", 1, gib(10), (), True)
    ]


def test_without_a_schedule_loads_compact_nothing() -> None:
    d = driver()
    settle(d, 0, "a", 10, explicit=False)
    bloat(d, 1, "a", 20)
    for number in range(2, 6):
        d.ask(number, f"e{number}", 5, model="b")
        assert d.at(number, ev.Loaded(TicketId(f"e{number}"), seconds(1))) == []


# -- what counts as waste --------------------------------------------------------------------------


def wasted_gib(d: CoreDriver, name: str) -> float:
    [row] = [t for t in d.arbiter.snapshot(d.now).tickets if t.ticket == name]
    return row.wasted_bytes / gib(1)


def test_waste_is_what_is_held_beyond_the_first_use_and_the_headroom_of_learned_sizes() -> None:
    d = driver(replace(COMPACTING, learned_headroom_fraction=0.1))
    d.ask(0, "a", 20, explicit=False)
    d.at(1, ev.Loaded(TicketId("a"), seconds(1)))
    d.engines["a"] = {CPU: 30}
    for t in (2, 3, 4):
        d.read(t)  # still in its first use, whose workspace is no waste
    assert wasted_gib(d, "a") == 0
    d.beat(5, "a")
    d.read(6)
    bloat(d, 7, "a", 40)
    assert wasted_gib(d, "a") == pytest.approx(40 - 33)


def test_least_and_explicit_sizes_are_no_waste() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False, least=35)
    bloat(d, 1, "a", 36)
    assert wasted_gib(d, "a") == 1
    d = driver()
    d.resident(0, "a", 40)  # explicit
    for held in (10, 10, 38):
        bloat(d, 1, "a", held)
    assert wasted_gib(d, "a") == 0


def test_ticket_that_rejoined_is_measured_by_the_last_load_that_was_seen() -> None:
    first = driver()
    settle(first, 0, "a", 20, explicit=False)
    kept = first.arbiter.export_learned()
    again = driver(known=("h",), holders=())
    again.arbiter.restore_learned(pickle.loads(pickle.dumps(kept)))
    held = again.held("a", types.Phase.RESIDENT, size=20)
    again.join(1, "h", replace(held, need=types.Need(gib(20)), uses_count=3))
    for t in (2, 3, 4):
        bloat(again, t, "a", 32)
    assert wasted_gib(again, "a") == 12


def test_rejoined_ticket_of_which_no_load_was_seen_wastes_nothing_that_is_known() -> None:
    d = driver(known=("h",), holders=())
    d.join(1, "h", d.held("a", types.Phase.RESIDENT, size=20))
    for t in (2, 3, 4):
        bloat(d, t, "a", 32)
    assert wasted_gib(d, "a") == 0


def test_explanation_of_a_model_names_its_waste_and_what_keeps_it_there() -> None:
    d = driver()
    settle(d, 0, "a", 20, explicit=False)
    assert len(said(d, "a")) == 1
    bloat(d, 1, "a", 30)
    assert said(d, "a")[1] == (
        "It holds 10.0 GiB more than a new load of it would; `arbiter compact a` gives that back."
    )
    d.beat(2, "a", inflight=1)
    assert said(d, "a")[1].endswith("and is not compacted now: it is in use.")
