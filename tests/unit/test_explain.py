"""Asking why: of one that waits, one that went, one that was spared, and one that is gone."""

from dataclasses import replace

import pytest

from arbiter import units
from arbiter.core import events as ev
from arbiter.core.records.eviction_history import KEPT_COUNT
from arbiter.core.reports.explain import Explanation
from arbiter.core.types import Priority
from arbiter.errors import UnknownTicket
from arbiter.protocol.json_codec import plain
from arbiter.units import GIB, TicketId
from tests.unit.desk import CPU, PLAIN, Desk, revoked, s


def why(desk: Desk, t: float, name: str) -> Explanation:
    return desk.arbiter.explain(TicketId(name), s(t))


@pytest.mark.spec("K3")
def test_who_waits_hears_what_is_short_who_holds_it_and_why_each_of_them_stays() -> None:
    desk = Desk(device=80, pinned="vad")
    desk.resident(0, "vad", 30)
    desk.resident(0, "a", 20, priority=Priority.URGENT)
    desk.resident(0, "b", 10)
    desk.beat(0, "b", inflight=1)
    desk.ask(1, "c", 50)
    found = why(desk, 1, "c")
    [shortage] = found.shortages
    assert (shortage.device, shortage.need_bytes) == (CPU, 50 * GIB)
    assert (shortage.free_bytes, shortage.short_bytes) == (20 * GIB, 30 * GIB)
    stays = {x.model: x.obstacle for x in shortage.standings}
    assert stays["vad"] == "it is pinned"
    assert stays["a"] == "it is more urgent (urgent before normal)"
    assert stays["b"] is None  # busy ones are asked: a swap waits behind a barrier
    assert "30.0 GiB short" in " ".join(found.said)
    assert any("may leave hold only 10.0 GiB: b" in line for line in found.said)


@pytest.mark.spec("K3")
def test_who_waits_behind_others_hears_of_them_and_of_bytes_on_their_way() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 60)
    desk.ask(21, "c", 60)
    assert why(desk, 21, "b").ahead == ()
    found = why(desk, 21, "c")
    assert found.ahead == ("b",)
    assert found.shortages[0].coming_bytes == 80 * GIB
    assert "80.0 GiB are on their way back" in " ".join(found.said)


def test_a_model_that_came_lately_or_was_just_busy_says_for_how_long_it_stays() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 40)
    desk.at(6, ev.Loaded(TicketId("a"), units.Span(6 * 10**9)))
    desk.beat(6, "a")
    desk.resident(6, "b", 40)
    desk.ask(8, "c", 40)
    [shortage] = why(desk, 8, "c").shortages
    assert shortage.coming_bytes == 40 * GIB  # b went, whose load took no time
    desk.ask(8, "d", 80)
    stays = {x.model: x.obstacle for x in why(desk, 8, "d").shortages[0].standings}
    assert stays["a"] == "it came lately, and stays 4.0 s yet for what its load took"
    assert stays["b"] == "it is draining"


@pytest.mark.spec("K3")
def test_a_victim_hears_for_whom_by_which_price_and_who_was_spared() -> None:
    desk = Desk(device=80, settings=replace(PLAIN, evict="cost_aware"))
    desk.resident(0, "a", 40)
    desk.resident(0, "b", 40)
    desk.state.note_uses(desk.state.ledger.find(TicketId("b")), 5)
    assert revoked(desk.ask(120, "c", 30)) == [("a", "swap", "gone")]
    [past] = why(desk, 125, "a").past
    assert (past.part, past.waiting_model, past.policy) == ("went", "c", "cost_aware")
    assert past.short_bytes == 30 * GIB
    prices = {w.model: (w.is_chosen, w.freed_bytes) for w in past.weighed}
    assert prices == {"a": (True, 40 * GIB), "b": (False, 40 * GIB)}
    cheap, dear = past.weighed
    assert cheap.cost_s < dear.cost_s
    assert why(desk, 125, "b").past[0].part == "spared"
    assert why(desk, 125, "c").past[0].part == "asked"
    assert "5.0 s ago 30.0 GiB were missing" in why(desk, 125, "a").said[-1]


def test_one_that_is_closed_is_explained_from_memory_and_one_never_heard_of_is_an_error() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 60)
    desk.at(21, ev.Released(TicketId("a"), "swap"))
    desk.gone(22, "a")
    found = why(desk, 30, "a")
    assert found.state == "closed"
    assert found.past[0].part == "went"
    with pytest.raises(UnknownTicket, match="arbiter status"):
        why(desk, 30, "nobody")


def test_asking_why_changes_nothing_and_what_is_remembered_is_bounded() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a0", 80)
    for n in range(KEPT_COUNT + 20):
        t = 20 + 10 * n
        desk.ask(t, f"a{n + 1}", 80)
        desk.at(t + 1, ev.Released(TicketId(f"a{n}"), "swap"))
        desk.gone(t + 1, f"a{n}")
        desk.at(t + 2, ev.Loaded(TicketId(f"a{n + 1}"), units.Span(0)))
        desk.beat(t + 2, f"a{n + 1}")
    end = 10 * (KEPT_COUNT + 30)
    before = desk.arbiter.snapshot(s(end))
    kept = [
        n for n in range(KEPT_COUNT + 20) if list(desk.state.evictions.about(TicketId(f"a{n}")))
    ]
    assert len(kept) == KEPT_COUNT  # of those who went, the newest
    assert plain(why(desk, end, f"a{kept[-1]}"))["state"] == "closed"
    assert desk.arbiter.snapshot(s(end)) == before
