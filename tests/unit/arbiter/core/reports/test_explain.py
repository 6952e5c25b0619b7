"""Asking why: of one that waits, one that went, one that was spared, and one that is gone."""

from dataclasses import replace

import pytest

from arbiter import units
from arbiter.core import events as ev
from arbiter.core.records.eviction_history import KEPT_COUNT
from arbiter.core.reports.explain import Explanation
from arbiter.core.settings import TenantLimits
from arbiter.core.types import Floor, Level, Priority, Split
from arbiter.errors import UnknownTicket
from arbiter.protocol.json_codec import plain
from arbiter.units import GIB, TicketId, seconds
from tests.support.core_driver import CPU, HOST, NODE, PLAIN, CoreDriver, gib, revoked, s
from tests.support.gpu_core_driver import GPU, GpuCoreDriver
from tests.support.gpu_driver import GPUS, GpuDriver


def why(driver: CoreDriver, t: float, name: str) -> Explanation:
    return driver.arbiter.explain(TicketId(name), s(t))


@pytest.mark.spec("K3")
def test_explain_of_a_queued_ticket_gives_shortfall_holders_and_their_obstacles() -> None:
    driver = CoreDriver(device=80, pinned="vad")
    driver.resident(0, "vad", 30)
    driver.resident(0, "a", 20, priority=Priority.URGENT)
    driver.resident(0, "b", 10)
    driver.beat(0, "b", inflight=1)
    driver.ask(1, "c", 50)
    explanation = why(driver, 1, "c")
    [shortage] = explanation.shortages
    assert (shortage.device, shortage.need_bytes) == (CPU, 50 * GIB)
    assert (shortage.free_bytes, shortage.short_bytes) == (20 * GIB, 30 * GIB)
    stays = {x.model: x.obstacle for x in shortage.charged_tickets}
    assert stays["vad"] == "it is pinned"
    assert stays["a"] == "it is more urgent (urgent before normal)"
    assert stays["b"] is None  # busy ones are asked: a swap waits behind a barrier
    assert "30.0 GiB short" in " ".join(explanation.sentences)
    assert any("may leave hold only 10.0 GiB: b" in line for line in explanation.sentences)


@pytest.mark.spec("K3", "C10")
def test_explain_counts_what_comes_back_to_a_reserve_as_kept_for_its_tenant() -> None:
    reserve = TenantLimits("x", None, gib(30), None)
    driver = CoreDriver(device=80, settings=replace(PLAIN, tenants=(reserve,)))
    driver.resident(0, "a", 30, tenant="x")
    driver.resident(0, "b", 50, priority=Priority.URGENT, tenant="y")
    driver.at(1, ev.Released(TicketId("a"), "manual"))
    assert revoked(driver.ask(2, "c", 20, tenant="y")) == []
    explanation = why(driver, 2, "c")
    [shortage] = explanation.shortages
    assert (shortage.coming_bytes, shortage.short_bytes) == (30 * GIB, 20 * GIB)
    assert "30.0 GiB of both reserved for others" in " ".join(explanation.sentences)


@pytest.mark.spec("K3")
def test_explain_of_a_queued_ticket_gives_those_ahead_and_bytes_coming_back() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 60)
    driver.ask(21, "c", 60)
    assert why(driver, 21, "b").ahead == ()
    explanation = why(driver, 21, "c")
    assert explanation.ahead == ("b",)
    assert explanation.shortages[0].coming_bytes == 80 * GIB
    assert "80.0 GiB are on their way back" in " ".join(explanation.sentences)


def test_explain_gives_the_remaining_minimum_residency_of_a_resident() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 40)
    driver.at(6, ev.Loaded(TicketId("a"), units.Span(6 * 10**9)))
    driver.beat(6, "a")
    driver.resident(6, "b", 40)
    driver.ask(8, "c", 40)
    [shortage] = why(driver, 8, "c").shortages
    assert shortage.coming_bytes == 40 * GIB  # b went, whose load took no time
    driver.ask(8, "d", 80)
    stays = {x.model: x.obstacle for x in why(driver, 8, "d").shortages[0].charged_tickets}
    assert stays["a"] == "protected for another 4.0 s (minimum residency)"
    assert stays["b"] == "it is draining"


@pytest.mark.spec("K3", "A15", "D1")
def test_explain_names_the_lease_and_the_floor_that_keep_a_ticket() -> None:
    driver = CoreDriver(device=80, host=100)
    driver.lease(0, "job", 40)
    driver.resident(0, "a", 40, host=20)
    driver.engines["a"] = {CPU: 40}
    driver.read(1)
    driver.at(2, ev.FloorSet("text", "a", Floor.HOST))
    driver.ask(20, "b", 40)
    driver.at(21, ev.Slept(TicketId("a")))
    driver.engines["a"] = {CPU: 4, HOST: 20}
    driver.read(22)
    driver.ask(23, "c", 70)
    stays = {x.model: x.obstacle for x in why(driver, 23, "c").shortages[0].charged_tickets}
    assert stays["job"] == "its lease may not be interrupted"
    assert stays["a"] == "its floor is host"


@pytest.mark.spec("K3", "C6")
def test_explain_and_snapshot_count_those_ahead_on_the_same_node_only() -> None:
    driver = CoreDriver(device=80)
    driver.see_node(0, 10, 0, node="m")
    driver.read(0, node="m")
    driver.join(0, "g", node="m")
    driver.resident(0, "a", 80)
    driver.beat(0, "a", inflight=1)
    driver.resident(0, "c", 10, holder="g")
    driver.beat(0, "c", holder="g", inflight=1)
    driver.ask(1, "b", 60)
    driver.ask(2, "d", 10, holder="g")
    assert driver.queue() == ["b", "d"]
    assert why(driver, 2, "d").ahead == ()
    assert {q.ticket: q.position for q in driver.arbiter.snapshot(s(2)).queue} == {"b": 1, "d": 1}


def test_explain_says_for_how_long_the_holder_was_silent() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.beat(0, "a", inflight=1)
    driver.ask(1, "b", 60)
    driver.fire_timer(4000)
    sentences = why(driver, 4000, "b").sentences
    assert any("no heartbeat for 4000 s; nothing is granted to it" in line for line in sentences)


@pytest.mark.spec("A11", "K3")
def test_explain_names_the_model_of_its_exclusion_group_for_which_a_ticket_waits() -> None:
    driver = CoreDriver(settings=replace(PLAIN, one_resident_roles=frozenset({"text"})))
    driver.resident(0, "a", 10, priority=Priority.HIGH)
    driver.ask(20, "b", 10)
    only = "of role text one model is awake on a node"
    stays = f"a (a) stays, and {only}: it is more urgent (high before normal)."
    assert stays in why(driver, 20, "b").sentences


@pytest.mark.spec("C5", "K3")
def test_explain_says_that_memory_is_critical_where_a_ticket_waits_for_it() -> None:
    driver = CoreDriver(device=10)
    driver.resident(0, "a", 10, priority=Priority.HIGH)
    driver.join(0, "e", capability="embedding")
    driver.ask(20, "e1", 10, holder="e", model="e1", capability="embedding")
    driver.at(21, ev.PressurePushed(CPU, Level.CRITICAL, None, seconds(60)))
    critical = f"No load begins on {CPU} while memory there is critical."
    assert critical in why(driver, 22, "e1").sentences


@pytest.mark.spec("K3")
def test_explain_of_a_victim_gives_asker_price_and_spared_candidates() -> None:
    driver = CoreDriver(device=80, settings=replace(PLAIN, evict="cost_aware"))
    driver.resident(0, "a", 40)
    driver.resident(0, "b", 40)
    driver.note_uses("b", 5)
    assert revoked(driver.ask(120, "c", 30)) == [("a", "swap", "gone")]
    [past] = why(driver, 125, "a").past
    assert (past.part, past.waiting_model, past.policy) == ("went", "c", "cost_aware")
    assert past.short_bytes == 30 * GIB
    prices = {w.model: (w.is_chosen, w.freed_bytes) for w in past.weighed}
    assert prices == {"a": (True, 40 * GIB), "b": (False, 40 * GIB)}
    cheap, dear = past.weighed
    assert cheap.cost_s < dear.cost_s
    assert why(driver, 125, "b").past[0].part == "spared"
    assert why(driver, 125, "c").past[0].part == "asked"
    assert "5.0 s ago 30.0 GiB were missing" in why(driver, 125, "a").sentences[-1]


@pytest.mark.spec("K3", "N4")
def test_explain_of_a_learned_price_says_in_words_what_it_comes_from() -> None:
    driver = CoreDriver(device=80, settings=replace(PLAIN, evict="learned"))
    driver.resident(0, "a", 40)
    driver.resident(0, "b", 40)
    for _ in range(5):
        driver.note_uses("b", 1)
    assert revoked(driver.ask(120, "c", 30)) == [("a", "swap", "gone")]
    [past] = why(driver, 125, "a").past
    went, spared = past.weighed
    assert "last used 1 turnovers ago; 0.37 uses a turnover of late" in went.why
    assert "last used 0 turnovers ago" in spared.why and "5.9 uses in the last hours" in spared.why
    assert went.why in why(driver, 125, "c").sentences[-1]
    [shortage] = why(driver, 125, "c").shortages
    assert all("wanted soon with" in row.why for row in shortage.charged_tickets)


@pytest.mark.spec("K3", "C4")
def test_explain_of_a_ticket_that_waits_for_cheaper_ones_says_so_and_for_how_long() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 40)
    driver.at(0, ev.Loaded(TicketId("a"), units.seconds(3)))
    driver.ask(20, "e1", 40, capability="embedding", model="e1")
    driver.at(20, ev.Loaded(TicketId("e1"), units.seconds(2)))
    for name in ("a", "e1"):
        driver.beat(20, name)
    assert revoked(driver.ask(20.5, "b", 30)) == []
    book = driver.account()
    book.note_stale(TicketId("a"))
    sentences = why(driver, 20.5, "b").sentences
    assert book.stale == {"a"}, "no reading renews the device's own order of victims"
    assert "Tickets that may leave hold 40.0 GiB: a." in sentences
    assert "It waits 1.5 s, until cheaper tickets may leave." in sentences


def test_explain_of_a_closed_ticket_uses_history_and_of_an_unknown_one_fails() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 60)
    driver.at(21, ev.Released(TicketId("a"), "swap"))
    driver.gone(22, "a")
    explanation = why(driver, 30, "a")
    assert explanation.state == "closed"
    assert explanation.past[0].part == "went"
    with pytest.raises(UnknownTicket, match="arbiter status"):
        why(driver, 30, "nobody")


def test_explain_changes_nothing_and_its_history_is_bounded() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a0", 80)
    for n in range(KEPT_COUNT + 20):
        t = 20 + 10 * n
        driver.ask(t, f"a{n + 1}", 80)
        driver.at(t + 1, ev.Released(TicketId(f"a{n}"), "swap"))
        driver.gone(t + 1, f"a{n}")
        driver.at(t + 2, ev.Loaded(TicketId(f"a{n + 1}"), units.Span(0)))
        driver.beat(t + 2, f"a{n + 1}")
    end = 10 * (KEPT_COUNT + 30)
    before = driver.arbiter.snapshot(s(end))
    kept = [n for n in range(KEPT_COUNT + 20) if driver.evictions_of(f"a{n}")]
    assert len(kept) == KEPT_COUNT  # of those who went, the newest
    assert plain(why(driver, end, f"a{kept[-1]}"))["state"] == "closed"
    assert driver.arbiter.snapshot(s(end)) == before


@pytest.mark.spec("K3", "C10", "A17")
def test_explain_counts_what_was_learned_of_a_ticket_against_the_maximum_of_its_tenant() -> None:
    bound = TenantLimits("x", most_bytes=gib(50))
    driver = CoreDriver(settings=replace(PLAIN, tenants=(bound,)))
    driver.resident(0, "a", 10, explicit=False, tenant="x")
    driver.engines["a"] = {CPU: 30}
    for t in (1, 2):
        driver.read(t)
    driver.at(3, ev.Released(TicketId("a"), "x"))
    driver.gone(3, "a")
    driver.resident(4, "b", 30, tenant="x")
    driver.beat(4, "b", inflight=1)
    driver.ask(5, "a2", 10, explicit=False, tenant="x")
    assert "With it x would hold 10.0 GiB more than it may have." in why(driver, 5, "a2").sentences


@pytest.mark.spec("K3", "B1")
def test_explain_names_devices_that_have_not_answered_yet() -> None:
    driver = GpuCoreDriver(device=80, holders=())
    driver.at(1, ev.NodeLost(NODE))
    driver.unreadable = {GPU: "no answer"}
    driver.introduce(2)
    driver.join(2, "h")
    driver.ask(3, "a", 100)
    assert any("have not answered yet" in line for line in why(driver, 3, "a").sentences)


@pytest.mark.spec("K3", "B5")
def test_explain_of_a_ticket_over_two_devices_gives_its_part_on_each() -> None:
    driver = GpuDriver(80, 80)
    driver.resident(0, "a", 60, holder="k")
    driver.beat(1, "a", holder="k", inflight=1)
    driver.want(2, "b", 120, how=Split.EQUAL)
    needs = {x.device: (x.need_bytes, x.short_bytes) for x in why(driver, 2, "b").shortages}
    assert needs == {GPUS[0]: (gib(60), gib(0)), GPUS[1]: (gib(60), gib(0))}
    driver.at(3, ev.BarrierDropped(TicketId("a"), 1))
    needs = {x.device: (x.need_bytes, x.short_bytes) for x in why(driver, 3, "b").shortages}
    assert needs == {GPUS[0]: (gib(60), gib(40)), GPUS[1]: (gib(60), gib(0))}
