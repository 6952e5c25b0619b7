"""Tenants: what they may have, what is kept for them, who pays, and whose turn it is."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision
from arbiter.core.queue import grant_pass
from arbiter.core.records.accounts import Accounts, byte_seconds
from arbiter.core.settings import Settings, TenantLimits
from arbiter.core.state import CoreState, Node
from arbiter.errors import QuotaExceeded, TenantCoolingDown
from arbiter.units import GIB, Bytes, HolderId, Instant, TicketId, seconds
from tests.unit.desk import CPU, HOST, PLAIN, Desk, gib, granted, refusal, revoked, s

pytestmark = pytest.mark.spec("C10")


def terms(
    tenant: str, most: float | None = None, reserved: float = 0, average: float | None = None
) -> TenantLimits:
    bounds = (None if size is None else gib(size) for size in (most, average))
    return TenantLimits(tenant, next(bounds), gib(reserved), next(bounds))


def settings(*tenants: TenantLimits) -> Settings:
    return replace(PLAIN, tenants=tenants)


def holds(desk: Desk, tenant: str) -> float:
    return float(desk.state.ledger.holdings.by_tenant[tenant] / GIB)


def test_at_its_maximum_a_tenant_makes_room_among_its_own_and_nobody_elses() -> None:
    desk = Desk(device=80, settings=settings(terms("x", most=30)))
    desk.resident(0, "a", 20, tenant="y")
    desk.resident(1, "b", 20, tenant="x")
    assert revoked(desk.ask(20, "c", 20, tenant="x")) == [("b", "swap", "gone")]
    desk.at(21, ev.Released(TicketId("b"), "swap"))
    assert granted(desk.gone(22, "b")) == ["c"]
    assert (holds(desk, "x"), holds(desk, "y")) == (20, 20)


def test_who_waits_for_its_own_holds_up_nobody_even_when_it_is_due() -> None:
    desk = Desk(device=80, settings=settings(terms("x", most=30)))
    desk.resident(0, "b", 20, tenant="x")
    desk.beat(1, "b", inflight=1)
    assert revoked(desk.ask(20, "c", 20, tenant="x")) == [("b", "swap", "gone")]
    desk.at(21, ev.BarrierDropped(TicketId("b"), 1))
    desk.woke(60)
    assert granted(desk.ask(61, "d", 40, tenant="y")) == ["d"]


def test_what_is_larger_than_its_maximum_is_refused_at_once_with_the_numbers() -> None:
    desk = Desk(device=80, settings=settings(terms("x", most=30)))
    error = refusal(desk.ask(1, "a", 31, tenant="x"))
    assert error == QuotaExceeded("x", 0, gib(31), gib(30), "bytes")
    assert granted(desk.ask(2, "b", 31, tenant="y")) == ["b"]


def test_what_is_pinned_leaves_less_of_a_maximum() -> None:
    desk = Desk(device=80, settings=settings(terms("x", most=30)), pinned="a")
    desk.resident(0, "a", 20, tenant="x")
    error = refusal(desk.ask(1, "b", 11, tenant="x"))
    assert error == QuotaExceeded("x", gib(20), gib(11), gib(30), "bytes")
    assert granted(desk.ask(2, "c", 10, tenant="x")) == ["c"]


def test_who_waits_for_its_own_asks_nobody_else_for_what_is_leaving_already() -> None:
    desk = Desk(device=80, settings=settings(terms("x", most=30)))
    desk.resident(0, "a", 15, tenant="x")
    desk.resident(1, "b", 15, tenant="x")
    assert revoked(desk.ask(20, "c", 15, tenant="x")) == [("a", "swap", "gone")]
    assert revoked(desk.woke(22)) == [] and desk.state_of("b") == "resident"


def test_what_a_quarantined_holder_keeps_is_not_waited_for() -> None:
    desk = Desk(device=80, settings=settings(terms("x", most=40)), holders=("h", "h2"))
    desk.resident(0, "a", 10, tenant="x")
    desk.resident(1, "b", 20, tenant="x", holder="h2")
    desk.at(10, ev.Released(TicketId("a"), "idle"))
    assert revoked(desk.ask(11, "c", 20, tenant="x", holder="h2")) == []  # it is on its way
    assert revoked(desk.woke(15)) == [("b", "swap", "gone")]


def test_who_waits_for_its_own_on_another_node_comes_as_soon_as_they_are_gone() -> None:
    desk = Desk(device=80, settings=settings(terms("x", most=30)))
    desk.see_node(0, 80, 0, node="m")
    desk.read(0, node="m")
    desk.join(0, "k", node="m")
    desk.resident(0, "a", 20, tenant="x")
    assert revoked(desk.ask(20, "c", 20, tenant="x", holder="k")) == [("a", "swap", "gone")]
    desk.at(20.1, ev.Released(TicketId("a"), "swap"))
    assert granted(desk.gone(20.2, "a")) == ["c"]


def test_what_one_tenant_gives_back_has_nobody_elses_line_looked_at_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = settings(terms("x", most=60), terms("y", reserved=5))
    desk = Desk(device=80, settings=limits, holders=("h", "h2"))
    for name in ("m", "o"):
        desk.see_node(0, 80, 0, node=name)
        desk.read(0, node=name)
    desk.join(0, "k", node="m")
    desk.join(0, "l", node="o")
    desk.resident(0, "a", 20, tenant="x")
    desk.resident(0, "b", 20, tenant="z", holder="h2")
    desk.resident(0, "d", 75, tenant="z", holder="k")
    desk.ask(10, "c", 60, tenant="z", holder="k")
    desk.ask(10, "e", 50, tenant="x", holder="l")
    looked, serve = [], grant_pass._run_node

    def look(state: CoreState, node: Node) -> bool:
        looked.append(node.node)
        return serve(state, node)

    monkeypatch.setattr(grant_pass, "_run_node", look)
    desk.at(10.1, ev.Released(TicketId("b"), "x"))
    desk.gone(10.2, "b")
    assert looked == []
    desk.at(10.3, ev.Released(TicketId("a"), "x"))
    assert granted(desk.gone(10.4, "a")) == ["e"] and set(looked) == {"o"}


def test_what_sleeps_in_host_ram_is_no_part_of_a_maximum() -> None:
    desk = Desk(device=80, host=100, settings=settings(terms("z", most=20)))
    desk.resident(0, "a", 20, host=30, tenant="y")
    desk.engines["a"] = {CPU: 20}
    desk.read(1)
    desk.ask(20, "b", 80, tenant="y")
    desk.at(21, ev.Slept(TicketId("a")))
    desk.engines["a"] = {HOST: 30}
    desk.read(22)
    assert desk.state_of("a") == "asleep"
    desk.at(23, ev.LoadBroke(TicketId("b"), "x", False))
    desk.gone(24, "b")
    assert granted(desk.ask(25, "a", 20, host=30, tenant="z")) == ["a"]
    assert (holds(desk, "z"), holds(desk, "y")) == (20, 0)


def test_a_lease_beyond_its_tenants_maximum_is_refused() -> None:
    desk = Desk(device=80, settings=settings(terms("x", most=30)))
    desk.resident(0, "a", 20, tenant="x")
    assert isinstance(refusal(desk.lease(1, "job", 11, tenant="x")), QuotaExceeded)
    assert granted(desk.lease(2, "job2", 10, tenant="x")) == ["job2"]


def test_what_is_reserved_is_left_free_by_others_and_used_by_its_tenant() -> None:
    desk = Desk(device=80, settings=settings(terms("x", reserved=30)))
    assert granted(desk.ask(1, "a", 50, tenant="y")) == ["a"]
    assert granted(desk.ask(2, "b", 1, tenant="y")) == []
    assert granted(desk.lease(3, "job", 1, tenant="y")) == []
    assert granted(desk.ask(4, "c", 30, tenant="x")) == ["c"]
    assert desk.free() == 0


def test_beside_what_others_reserved_nothing_larger_is_waited_for() -> None:
    desk = Desk(device=80, settings=settings(terms("x", reserved=30)))
    error = refusal(desk.ask(1, "a", 51, tenant="y"))
    assert error == QuotaExceeded("y", 0, gib(51), gib(50), "bytes")


def test_what_leaves_for_others_is_worth_to_them_what_exceeds_the_reserve() -> None:
    desk = Desk(device=60, settings=settings(terms("x", reserved=30)))
    for at, name in enumerate("abc"):
        desk.resident(at, name, 20, tenant="x")
    assert revoked(desk.ask(20, "d", 20, tenant="y")) == [("a", "swap", "gone")]
    assert revoked(desk.ask(21, "e", 15, tenant="y")) == []  # b is worth 10, and c nothing more
    assert revoked(desk.ask(23, "large", 20, tenant="x")) == [("b", "swap", "gone")]


def test_a_model_larger_than_the_reserve_keeps_nobody_out_for_good() -> None:
    desk = Desk(device=60, settings=settings(terms("x", reserved=30)))
    desk.resident(0, "a", 50, tenant="x")
    assert revoked(desk.ask(20, "d", 30, tenant="y")) == [("a", "swap", "gone")]
    assert granted(desk.gone(21, "a")) == ["d"]
    assert granted(desk.ask(22, "e", 1, tenant="y")) == []
    assert granted(desk.ask(23, "c", 30, tenant="x")) == ["c"]


def test_within_the_reserve_nothing_leaves_for_others() -> None:
    desk = Desk(device=60, settings=settings(terms("x", reserved=30)))
    desk.resident(0, "a", 25, tenant="x")
    desk.resident(1, "b", 30, tenant="y")
    assert revoked(desk.ask(2, "d", 30, tenant="z", priority=types.Priority.LOW)) == []
    said = desk.arbiter.explain(TicketId("d"), s(3)).said
    assert any("reserved for x" in line for line in said)


def test_a_tickets_account_is_its_last_users_unless_that_breaks_a_limit() -> None:
    desk = Desk(device=80, settings=settings(terms("x", reserved=20), terms("z", most=10)))
    desk.resident(0, "a", 20, tenant="y")
    used(desk, 1, "a", types.Client("v", "phone"))
    assert (holds(desk, "v"), holds(desk, "y")) == (20, 0)
    used(desk, 2, "a", types.Client("z"))
    assert (holds(desk, "v"), holds(desk, "z")) == (20, 0)
    used(desk, 3, "a", types.Client("x"))
    used(desk, 4, "a", types.Client("y"))  # it is of what is reserved for x
    assert (holds(desk, "x"), holds(desk, "y")) == (20, 0)


def used(desk: Desk, t: float, name: str, client: types.Client) -> list[Decision]:
    entry = desk.state.ledger.find(TicketId(name))
    held = replace(desk.held(name, t=t), client=client, uses_count=entry.uses_count + 1)
    return desk.at(t, ev.Renewed(HolderId("h"), (held,)))


def test_accounts_hold_requests_and_bytes_times_seconds() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 20, tenant="y", client="phone")
    usage = (ev.Usage(types.Client("y", "phone"), 3), ev.Usage(types.Client("w"), 1))
    held = replace(desk.held("a", t=5), client=types.Client("y", "phone"))
    desk.at(5, ev.Renewed(HolderId("h"), (held,), usage=usage))
    [w, phone] = desk.arbiter.snapshot(s(10)).clients
    assert (phone.tenant, phone.client, phone.requests_count) == ("y", "phone", 3)
    assert phone.held_bytes == gib(20) and phone.byte_seconds_count == 200 * GIB
    assert (w.tenant, w.requests_count, w.byte_seconds_count) == ("w", 1, 0)


def test_over_its_average_a_tenant_cools_down_until_it_is_well_below() -> None:
    desk = Desk(device=80, settings=settings(terms("x", average=10)))
    desk.resident(0, "a", 40, tenant="x")
    desk.resident(600, "b", 1, tenant="x")  # 40 for ten minutes are 6 an hour
    error = refusal(desk.ask(1500, "c", 1, tenant="x"))
    assert isinstance(error, TenantCoolingDown) and error.retry_after_s
    desk.resident(1501, "d", 1, tenant="y")
    desk.at(1502, ev.Released(TicketId("a"), "idle"))
    desk.gone(1503, "a")
    soon, later = 1503 + error.retry_after_s * 0.9, 1503 + error.retry_after_s + 300
    still = refusal(desk.ask(soon, "e", 1, tenant="x"))
    assert isinstance(still, TenantCoolingDown) and gib(9) < still.average_bytes < gib(10)
    assert granted(desk.ask(later, "large", 1, tenant="x")) == ["large"]


def test_tenants_take_turns_by_what_they_ask_for_not_by_how_often() -> None:
    desk = Desk(device=20)
    desk.resident(0, "vad", 20, tenant="y")
    desk.beat(1, "vad", inflight=1)
    for name in "abcd":
        desk.ask(2, name, 20, tenant="x")
    desk.ask(3, "e", 20, tenant="y")
    assert desk.state.queue.tickets() == list("abecd")  # y has had as much as one of them


def test_with_one_tenant_whoever_came_first_goes_first() -> None:
    desk = Desk(device=20)
    desk.resident(0, "vad", 20)
    desk.beat(1, "vad", inflight=1)
    for size, name in zip((20, 1, 7, 3), "abcd", strict=True):
        desk.ask(2, name, size)
    assert desk.state.queue.tickets() == list("abcd")


def test_clients_beyond_the_bound_become_one_row_of_their_tenant() -> None:
    accounts = Accounts(seconds(3600), most_count=3)
    desk = Desk()
    for number in range(6):
        accounts.used(ev.Usage(types.Client("x", f"c{number}"), 2), Instant(number))
        accounts.settle(desk.state.ledger.holdings, Instant(number))
    assert len(accounts.rows) <= 4
    assert accounts.rows[types.Client("x")].requests_count >= 4
    assert sum(a.requests_count for a in accounts.rows.values()) == 12


def test_accounts_survive_a_restart() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 20, tenant="y")
    desk.woke(100)
    desk.at(101, ev.Released(TicketId("a"), "idle"))
    desk.gone(102, "a")
    rows = desk.arbiter.export_accounts()
    again = Desk(device=80)
    again.arbiter.restore_accounts(rows)
    assert again.arbiter.export_accounts() == rows
    assert byte_seconds(again.state.accounts.rows[types.Client("y")].byte_ns) == Bytes(
        102 * 20 * GIB
    )
