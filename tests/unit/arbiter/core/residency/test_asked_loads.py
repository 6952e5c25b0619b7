"""Loads that no request asked for and that were refused: which are tried again, and until when."""

from typing import Any

import pytest

from arbiter import units
from arbiter.core import events as ev
from arbiter.core.decisions import Decision, LoadModel
from arbiter.core.types import Level, Phase
from arbiter.errors import (
    HolderQuarantined,
    ModelCoolingDown,
    NeverFits,
    RequestCancelled,
    UnderPressure,
)
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import CPU, CoreDriver, gib, granted, refusal

K = HolderId("k")
SECOND = 10**9


def driver() -> CoreDriver:
    """With a replica `k` of embeddings, which pressure does not spare."""
    d = CoreDriver(holders=())
    d.join(0, "k", capability="embedding")
    return d


def press(d: CoreDriver, t: float, level: Level = Level.CRITICAL, term_s: float = 3600) -> None:
    d.at(t, ev.PressurePushed(CPU, level, gib(1), seconds(term_s)))


def ask(d: CoreDriver, t: float, name: str, size: float = 10) -> list[Decision]:
    return d.ask(t, name, size, holder="k", capability="embedding", model="e1")


def replicas(d: CoreDriver, t: float) -> int:
    return d.arbiter.replica_targets(units.Instant(round(t * SECOND)))["embedding"]


@pytest.mark.spec("C5", "D8")
def test_load_by_hand_refused_under_pressure_is_asked_for_again_and_comes_once_that_ends() -> None:
    d = driver()
    press(d, 0, term_s=8)
    assert d.at(1, ev.LoadAsked("embedding", "e1")) == [LoadModel(K, "e1")]
    assert isinstance(refusal(ask(d, 1, "e1")), UnderPressure)
    assert replicas(d, 3_000) == 1, "it is wanted"
    assert LoadModel(K, "e1") not in d.fire_timer(5.9), "not before the error says"
    assert LoadModel(K, "e1") in d.fire_timer(6)
    assert isinstance(refusal(ask(d, 6.1, "e1x")), UnderPressure)
    assert LoadModel(K, "e1") in d.fire_timer(11.1)
    assert granted(ask(d, 11.2, "e1y")) == ["e1y"]
    d.at(12, ev.Loaded(TicketId("e1y"), seconds(1)))
    assert LoadModel(K, "e1") not in d.fire_timer(60), "it is there"


@pytest.mark.spec("C5", "H0")
def test_load_by_hand_is_tried_no_longer_than_its_bound_and_keeps_no_replica_after() -> None:
    d = driver()
    press(d, 0)
    d.at(1, ev.LoadAsked("embedding", "e1"))
    t, asked = 1.0, True
    while asked:
        assert isinstance(refusal(ask(d, t, f"e1x{t:.0f}")), UnderPressure)
        t += 5
        asked = LoadModel(K, "e1") in d.fire_timer(t)
        assert t < 700, "it is tried for ever"
    assert 590 < t < 610
    assert LoadModel(K, "e1") not in d.fire_timer(t + 60)
    assert replicas(d, t + 600) == 0, "it keeps its replica for ever"


@pytest.mark.spec("D8")
def test_load_by_hand_that_is_asked_for_once_more_is_tried_as_long_again() -> None:
    d = driver()
    press(d, 0)
    for t in (1, 600):
        assert LoadModel(K, "e1") in d.at(t, ev.LoadAsked("embedding", "e1"))
        assert isinstance(refusal(ask(d, t, f"e1x{t}")), UnderPressure)
    assert LoadModel(K, "e1") in d.fire_timer(605)


@pytest.mark.spec("D8")
def test_load_by_hand_refused_in_a_cool_down_is_asked_for_again_once_that_is_over() -> None:
    d = driver()
    ask(d, 0, "e1")
    d.at(1, ev.LoadBroke(TicketId("e1"), "a bug", False))
    d.gone(1, "e1")
    d.at(2, ev.LoadAsked("embedding", "e1"))
    assert isinstance(refusal(ask(d, 2, "e1x")), ModelCoolingDown)
    assert LoadModel(K, "e1") not in d.fire_timer(2.9)
    assert LoadModel(K, "e1") in d.fire_timer(3.1)
    assert granted(ask(d, 3.2, "e1y")) == ["e1y"]


@pytest.mark.spec("A10", "D8")
def test_load_by_hand_refused_in_a_quarantine_is_asked_of_the_next_replica() -> None:
    d = driver()
    d.resident(0, "e2x", 80, holder="k", capability="embedding", model="e2")
    d.at(9, ev.LoadAsked("embedding", "e1"))
    ask(d, 9, "e1", 80)
    d.join(9.5, "g", capability="embedding")
    d.at(10, ev.Released(TicketId("e2x"), "manual"))
    error = refusal(d.fire_timer(15))
    assert isinstance(error, HolderQuarantined) and error.retry_after_s
    assert LoadModel(HolderId("g"), "e1") in d.fire_timer(15.1 + error.retry_after_s)


@pytest.mark.spec("C5", "D8")
def test_load_refused_under_pressure_is_asked_of_the_next_replica() -> None:
    d = driver()
    press(d, 0)
    d.at(1, ev.LoadAsked("embedding", "e1"))
    d.join(2, "g", capability="embedding")
    error = refusal(ask(d, 3, "e1"))
    assert isinstance(error, UnderPressure)
    press(d, 4, Level.NOMINAL)
    assert LoadModel(HolderId("g"), "e1") in d.fire_timer(8), "of the next, as where it never fits"


@pytest.mark.spec("D8")
def test_load_by_hand_that_never_fits_or_is_cancelled_is_not_asked_for_again() -> None:
    d = driver()
    d.at(0, ev.LoadAsked("embedding", "e1"))
    never = d.ask(1, "e1", 300, holder="k", capability="embedding", model="e1")
    assert isinstance(refusal(never), NeverFits)
    d.ask(2, "b", 70, holder="k", capability="embedding", model="e2")
    d.at(3, ev.LoadAsked("embedding", "e1"))
    d.ask(4, "e1x", 60, holder="k", capability="embedding", model="e1")
    assert isinstance(refusal(d.at(5, ev.CancelAsked(TicketId("e1x")))), RequestCancelled)
    assert LoadModel(K, "e1") not in d.fire_timer(60)


@pytest.mark.spec("C5", "D8")
def test_unload_by_hand_takes_back_a_load_by_hand_that_is_yet_to_be_tried_again() -> None:
    d = driver()
    press(d, 0)
    d.at(1, ev.LoadAsked("embedding", "e1"))
    assert isinstance(refusal(ask(d, 1, "e1")), UnderPressure)
    press(d, 2, Level.NOMINAL)
    assert granted(ask(d, 2, "e1x")) == ["e1x"], "of a client"
    d.at(3, ev.Loaded(TicketId("e1x"), seconds(1)))
    d.beat(4, "e1x", holder="k")
    d.at(5, ev.UnloadAsked(TicketId("e1x")))
    d.at(5, ev.Released(TicketId("e1x"), "manual", K))
    d.gone(5.5, "e1x")
    assert d.state_of("e1x") == "closed"
    assert LoadModel(K, "e1") not in d.fire_timer(60)


@pytest.mark.spec("C11", "C5")
def test_client_that_is_refused_under_pressure_has_nothing_loaded_without_it() -> None:
    d = driver()
    press(d, 0)
    assert isinstance(refusal(ask(d, 1, "e1")), UnderPressure)
    assert replicas(d, 400) == 0
    assert LoadModel(K, "e1") not in d.fire_timer(10)


def next_epoch(before: CoreDriver, **made: Any) -> CoreDriver:
    """An arbiter that has what the last one left in the state file."""
    after = CoreDriver(**made)
    after.arbiter.restore_asked(before.arbiter.export_asked())
    return after


@pytest.mark.spec("D8", "A18")
def test_load_by_hand_that_no_replica_was_told_of_comes_in_the_next_epoch() -> None:
    d = CoreDriver(holders=())
    d.at(1, ev.LoadAsked("embedding", "e1"))
    after = next_epoch(d, holders=())
    after.fire_timer(1)
    assert replicas(after, 400) == 1, "it is wanted"
    assert after.join(401, "k", capability="embedding") == [LoadModel(K, "e1")]
    granted_now = ask(after, 402, "e1")
    assert granted(granted_now) == ["e1"]
    after.at(403, ev.Loaded(TicketId("e1"), seconds(1)))
    assert after.arbiter.export_asked() == [], "it is there"


@pytest.mark.spec("D8", "A18")
def test_load_by_hand_whose_command_was_lost_with_its_epoch_is_asked_for_again() -> None:
    d = driver()
    assert d.at(1, ev.LoadAsked("embedding", "e1")) == [LoadModel(K, "e1")]
    after = next_epoch(d, known=("k",), holders=())
    assert after.join(2, "k", capability="embedding") == [LoadModel(K, "e1")]


@pytest.mark.spec("D8", "A18")
def test_load_by_hand_that_its_replica_has_begun_is_not_asked_for_again() -> None:
    d = driver()
    d.at(1, ev.LoadAsked("embedding", "e1"))
    assert granted(ask(d, 2, "e1")) == ["e1"]
    after = next_epoch(d, known=("k",), holders=())
    held = after.held("e1", Phase.LOADING, size=10, model="e1")
    assert LoadModel(K, "e1") not in after.join(2, "k", held, capability="embedding")
    assert LoadModel(K, "e1") not in after.fire_timer(6)


@pytest.mark.spec("D8", "A18", "C11")
def test_next_epoch_is_asked_for_no_load_that_is_over_nor_for_a_prefetch() -> None:
    d = driver()
    d.at(0, ev.LoadAsked("embedding", "e1"))
    assert isinstance(refusal(ask(d, 1, "e1", 300)), NeverFits)
    assert d.arbiter.export_asked() == []
    d.at(2, ev.LoadAsked("embedding", "e2"))
    assert d.arbiter.export_asked() == [["embedding", "e2"]]
    d.at(700, ev.TimerFired())
    assert d.arbiter.export_asked() == [], "its replica could not begin it"
