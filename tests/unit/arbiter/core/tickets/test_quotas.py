"""Tenants: what they may have, what is kept for them, who pays, and whose turn it is."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision
from arbiter.core.queue import grant_pass
from arbiter.core.queue.outcome import PassEnd
from arbiter.core.settings import Settings, TenantLimits
from arbiter.core.state import CoreState, Node
from arbiter.errors import QuotaExceeded, TenantCoolingDown
from arbiter.units import GIB, HolderId, NodeId, TicketId
from tests.support.core_driver import (
    CPU,
    HOST,
    PLAIN,
    CoreDriver,
    gib,
    granted,
    refusal,
    revoked,
    s,
)
from tests.support.gpu_driver import GpuDriver

pytestmark = pytest.mark.spec("C10")


def terms(
    tenant: str, most: float | None = None, reserved: float = 0, average: float | None = None
) -> TenantLimits:
    bounds = (None if size is None else gib(size) for size in (most, average))
    return TenantLimits(tenant, next(bounds), gib(reserved), next(bounds))


def settings(*tenants: TenantLimits) -> Settings:
    return replace(PLAIN, tenants=tenants)


def holds(driver: CoreDriver, tenant: str) -> float:
    return float(driver.holdings.by_tenant[tenant] / GIB)


def test_tenant_at_its_maximum_evicts_among_its_own_tickets_only() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", most=30)))
    driver.resident(0, "a", 20, tenant="y")
    driver.resident(1, "b", 20, tenant="x")
    assert revoked(driver.ask(20, "c", 20, tenant="x")) == [("b", "swap", "gone")]
    driver.at(21, ev.Released(TicketId("b"), "swap"))
    assert granted(driver.gone(22, "b")) == ["c"]
    assert (holds(driver, "x"), holds(driver, "y")) == (20, 20)


def test_oversized_model_counts_against_the_maximum_of_its_tenant() -> None:
    driver = GpuDriver(80, 80, settings=settings(terms("x", 100)))
    text = driver.table[0]
    models = tuple(replace(m, allow_oversize=m.name == "large") for m in text.models)
    driver.at(0, ev.CapabilitiesSet((replace(text, models=models), driver.table[1])))
    driver.resident(0, "a", 60, holder="k", tenant="x")
    driver.beat(1, "a", holder="k", inflight=1)
    assert granted(driver.ask(2, "large", 90, holder="k", tenant="x")) == []
    assert driver.state_of("a") == "draining"
    driver.at(3, ev.Released(TicketId("a"), "swap"))
    gone = ev.EngineGone(NodeId("g"), TicketId("a"), True)
    assert granted(driver.at(4, gone)) == ["large"]


def test_aged_ticket_at_the_maximum_of_its_tenant_holds_up_no_other() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", most=30)))
    driver.resident(0, "b", 20, tenant="x")
    driver.beat(1, "b", inflight=1)
    assert revoked(driver.ask(20, "c", 20, tenant="x")) == [("b", "swap", "gone")]
    driver.at(21, ev.BarrierDropped(TicketId("b"), 1))
    driver.fire_timer(60)
    assert granted(driver.ask(61, "d", 40, tenant="y")) == ["d"]


def test_ticket_larger_than_the_maximum_of_its_tenant_is_refused_with_the_numbers() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", most=30)))
    error = refusal(driver.ask(1, "a", 31, tenant="x"))
    assert error == QuotaExceeded("x", 0, gib(31), gib(30), "bytes")
    assert granted(driver.ask(2, "b", 31, tenant="y")) == ["b"]


def test_pinned_bytes_reduce_the_maximum_of_their_tenant() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", most=30)), pinned="a")
    driver.resident(0, "a", 20, tenant="x")
    error = refusal(driver.ask(1, "b", 11, tenant="x"))
    assert error == QuotaExceeded("x", gib(20), gib(11), gib(30), "bytes")
    assert granted(driver.ask(2, "c", 10, tenant="x")) == ["c"]


def test_ticket_at_the_maximum_of_its_tenant_counts_bytes_already_leaving() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", most=30)))
    driver.resident(0, "a", 15, tenant="x")
    driver.resident(1, "b", 15, tenant="x")
    assert revoked(driver.ask(20, "c", 15, tenant="x")) == [("a", "swap", "gone")]
    assert revoked(driver.fire_timer(22)) == [] and driver.state_of("b") == "resident"


def test_quarantined_bytes_of_a_tenant_are_not_waited_for() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", most=40)), holders=("h", "h2"))
    driver.resident(0, "a", 10, tenant="x")
    driver.resident(1, "b", 20, tenant="x", holder="h2")
    driver.at(10, ev.Released(TicketId("a"), "idle"))
    assert revoked(driver.ask(11, "c", 20, tenant="x", holder="h2")) == []  # it is on its way
    assert revoked(driver.fire_timer(15)) == [("b", "swap", "gone")]


def test_ticket_at_the_maximum_is_granted_once_bytes_on_another_node_are_gone() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", most=30)))
    driver.see_node(0, 80, 0, node="m")
    driver.read(0, node="m")
    driver.join(0, "k", node="m")
    driver.resident(0, "a", 20, tenant="x")
    assert revoked(driver.ask(20, "c", 20, tenant="x", holder="k")) == [("a", "swap", "gone")]
    driver.at(20.1, ev.Released(TicketId("a"), "swap"))
    assert granted(driver.gone(20.2, "a")) == ["c"]


def test_bytes_given_back_by_a_tenant_start_no_grant_pass_for_others_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = settings(terms("x", most=60), terms("y", reserved=5))
    driver = CoreDriver(device=80, settings=limits, holders=("h", "h2"))
    for name in ("m", "o"):
        driver.see_node(0, 80, 0, node=name)
        driver.read(0, node=name)
    driver.join(0, "k", node="m")
    driver.join(0, "l", node="o")
    driver.resident(0, "a", 20, tenant="x")
    driver.resident(0, "b", 20, tenant="z", holder="h2")
    driver.resident(0, "d", 75, tenant="z", holder="k")
    driver.ask(10, "c", 60, tenant="z", holder="k")
    driver.ask(10, "e", 50, tenant="x", holder="l")
    looked, serve = [], grant_pass._run_node

    def look(state: CoreState, node: Node) -> PassEnd:
        looked.append(node.node)
        return serve(state, node)

    monkeypatch.setattr(grant_pass, "_run_node", look)
    driver.at(10.1, ev.Released(TicketId("b"), "x"))
    driver.gone(10.2, "b")
    assert looked == []
    driver.at(10.3, ev.Released(TicketId("a"), "x"))
    assert granted(driver.gone(10.4, "a")) == ["e"] and set(looked) == {"o"}


def with_sleeper(size: int, keeps: int) -> CoreDriver:
    """Tenant z may have 20 GiB. A model of y of this size sleeps, of which so much stays on the
    device; what it made room for has failed."""
    driver = CoreDriver(device=80, host=100, settings=settings(terms("z", most=20)))
    driver.resident(0, "a", size, host=30, tenant="y")
    driver.engines["a"] = {CPU: size}
    driver.read(1)
    driver.ask(20, "b", 70, tenant="y")
    driver.at(21, ev.Slept(TicketId("a")))
    driver.engines["a"] = {CPU: keeps, HOST: 30}
    driver.read(22)
    assert driver.state_of("a") == "asleep"
    driver.at(23, ev.LoadBroke(TicketId("b"), "x", False))
    driver.gone(24, "b")
    return driver


def test_asleep_bytes_in_host_ram_do_not_count_towards_a_maximum() -> None:
    driver = with_sleeper(20, keeps=0)
    assert granted(driver.ask(25, "a", 20, host=30, tenant="z")) == ["a"]
    assert (holds(driver, "z"), holds(driver, "y")) == (20, 0)


def test_wake_beyond_the_maximum_of_its_tenant_is_refused_and_the_model_sleeps_on() -> None:
    driver = with_sleeper(21, keeps=2)  # what it lacks alone would be within the maximum
    error = refusal(driver.ask(25, "a", 21, host=30, tenant="z"))
    assert error == QuotaExceeded("z", 0, gib(21), gib(20), "bytes")
    assert driver.state_of("a") == "asleep"
    assert granted(driver.ask(26, "a", 21, host=30, tenant="y")) == ["a"]


def test_queued_wake_that_another_tenant_takes_over_waits_for_bytes_of_that_tenant() -> None:
    driver = with_sleeper(20, keeps=0)
    driver.see_node(25, 80, 0, node="m")
    driver.read(25, node="m")
    driver.join(25, "k", node="m")
    driver.resident(26, "c", 10, holder="k", tenant="z")
    driver.resident(27, "d", 70, tenant="y")
    driver.beat(28, "d", inflight=1)
    assert granted(driver.ask(29, "a", 20, host=30, tenant="y")) == []
    assert granted(driver.ask(30, "a", 20, host=30, tenant="z")) == []
    driver.at(31, ev.Released(TicketId("d"), "x"))
    assert granted(driver.gone(32, "d")) == [], "z holds 10 of its 20 GiB elsewhere"
    driver.at(32.1, ev.Released(TicketId("c"), "x"))
    assert granted(driver.gone(32.2, "c")) == ["a"]


def test_wake_costs_its_asker_a_turn_also_where_it_stays_on_another_tenant_s_account() -> None:
    driver = with_sleeper(20, keeps=2)
    driver.resident(25, "c", 19, tenant="z")
    for t in (26, 28, 30):  # until the turns of y and z so far are behind those of others
        driver.resident(t, f"vad{t}", 45, tenant="v")
        driver.at(t + 1, ev.Released(TicketId(f"vad{t}"), "x"))
        driver.gone(t + 1, f"vad{t}")
    driver.resident(32, "d", 58, tenant="v")
    driver.beat(33, "d", inflight=1)
    assert granted(driver.ask(34, "a", 20, host=30, tenant="z")) == []
    assert (holds(driver, "z"), holds(driver, "y")) == (19, 2)
    for name, tenant in (("e", "y"), ("small", "w"), ("large", "z")):
        assert granted(driver.ask(35, name, 5, tenant=tenant)) == []
    assert driver.queue() == ["a", "e", "small", "large"]


def test_wake_that_a_reserve_set_since_never_leaves_room_for_is_refused() -> None:
    limits = settings(terms("x", reserved=60))
    driver = CoreDriver(device=80, host=100, settings=limits, known=("h",), holders=())
    driver.host_sizes["a"] = 30
    driver.engines["a"] = {CPU: 2, HOST: 30}
    driver.read(1)
    driver.join(2, "h", driver.held("a", types.Phase.ASLEEP, size=21))
    error = refusal(driver.ask(3, "a", 21, host=30))
    assert error == QuotaExceeded("default", 0, gib(21), gib(20), "bytes")
    assert driver.state_of("a") == "asleep"


def test_a_lease_beyond_its_tenants_maximum_is_refused() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", most=30)))
    driver.resident(0, "a", 20, tenant="x")
    assert isinstance(refusal(driver.lease(1, "job", 11, tenant="x")), QuotaExceeded)
    assert granted(driver.lease(2, "job2", 10, tenant="x")) == ["job2"]


def test_reserved_bytes_are_left_free_by_others_and_used_by_their_tenant() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", reserved=30)))
    assert granted(driver.ask(1, "a", 50, tenant="y")) == ["a"]
    assert granted(driver.ask(2, "b", 1, tenant="y")) == []
    assert granted(driver.lease(3, "job", 1, tenant="y")) == []
    assert granted(driver.ask(4, "c", 30, tenant="x")) == ["c"]
    assert driver.free() == 0


def test_ticket_larger_than_a_reserve_leaves_is_refused_at_once() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", reserved=30)))
    error = refusal(driver.ask(1, "a", 51, tenant="y"))
    assert error == QuotaExceeded("y", 0, gib(51), gib(50), "bytes")


def test_victim_frees_for_others_only_the_bytes_beyond_its_reserve() -> None:
    driver = CoreDriver(device=60, settings=settings(terms("x", reserved=30)))
    for at, name in enumerate("abc"):
        driver.resident(at, name, 20, tenant="x")
    assert revoked(driver.ask(20, "d", 20, tenant="y")) == [("a", "swap", "gone")]
    assert revoked(driver.ask(21, "e", 15, tenant="y")) == []  # b is worth 10, and c nothing more
    assert revoked(driver.ask(23, "large", 20, tenant="x")) == [("b", "swap", "gone")]


def test_model_larger_than_its_reserve_can_still_be_evicted() -> None:
    driver = CoreDriver(device=60, settings=settings(terms("x", reserved=30)))
    driver.resident(0, "a", 50, tenant="x")
    assert revoked(driver.ask(20, "d", 30, tenant="y")) == [("a", "swap", "gone")]
    assert granted(driver.gone(21, "a")) == ["d"]
    assert granted(driver.ask(22, "e", 1, tenant="y")) == []
    assert granted(driver.ask(23, "c", 30, tenant="x")) == ["c"]


def test_model_within_its_reserve_is_not_evicted_for_others() -> None:
    driver = CoreDriver(device=60, settings=settings(terms("x", reserved=30)))
    driver.resident(0, "a", 25, tenant="x")
    driver.resident(1, "b", 30, tenant="y")
    assert revoked(driver.ask(2, "d", 30, tenant="z", priority=types.Priority.LOW)) == []
    sentences = driver.arbiter.explain(TicketId("d"), s(3)).sentences
    assert any("within the reserve of x" in line for line in sentences)


def test_what_is_promised_to_a_tenant_is_not_kept_for_its_reserve_as_well() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", reserved=30)))
    driver.resident(0, "a", 20, tenant="y")
    driver.resident(1, "b", 30, tenant="y")
    assert revoked(driver.ask(20, "d", 45, tenant="x")) == [("a", "swap", "gone")]
    assert revoked(driver.ask(21, "c", 5, tenant="y")) == []  # 5 will be left
    assert granted(driver.gone(22, "a")) == ["d", "c"]


def test_aged_ticket_holds_no_device_that_reserves_of_others_leave_too_small() -> None:
    driver = GpuDriver(80, 160, settings=settings(terms("x", reserved=30)))
    driver.resident(0, "a", 130, holder="k", tenant="y", priority=types.Priority.URGENT)
    assert granted(driver.ask(1, "b", 60, holder="k", tenant="y")) == []
    driver.beat(40, "a", holder="k")
    assert granted(driver.fire_timer(41)) == []
    assert granted(driver.ask(42, "c", 20, holder="k", tenant="z")) == ["c"]


def test_ticket_is_billed_to_its_last_user_unless_that_breaks_a_limit() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", reserved=20), terms("z", most=10)))
    driver.resident(0, "a", 20, tenant="y")
    used(driver, 1, "a", types.Client("v", "phone"))
    assert (holds(driver, "v"), holds(driver, "y")) == (20, 0)
    used(driver, 2, "a", types.Client("z"))
    assert (holds(driver, "v"), holds(driver, "z")) == (20, 0)
    used(driver, 3, "a", types.Client("x"))
    used(driver, 4, "a", types.Client("y"))  # it is of what is reserved for x
    assert (holds(driver, "x"), holds(driver, "y")) == (20, 0)


def used(driver: CoreDriver, t: float, name: str, client: types.Client) -> list[Decision]:
    ticket = driver.ticket(name)
    held = replace(driver.held(name, t=t), client=client, uses_count=ticket.uses_count + 1)
    return driver.at(t, ev.Renewed(HolderId("h"), (held,)))


def test_tenant_over_its_average_cools_down_until_well_below_it() -> None:
    driver = CoreDriver(device=80, settings=settings(terms("x", average=10)))
    driver.resident(0, "a", 40, tenant="x")
    driver.resident(600, "b", 1, tenant="x")  # 40 for ten minutes are 6 an hour
    error = refusal(driver.ask(1500, "c", 1, tenant="x"))
    assert isinstance(error, TenantCoolingDown) and error.retry_after_s
    driver.resident(1501, "d", 1, tenant="y")
    driver.at(1502, ev.Released(TicketId("a"), "idle"))
    driver.gone(1503, "a")
    soon, later = 1503 + error.retry_after_s * 0.9, 1503 + error.retry_after_s + 300
    still = refusal(driver.ask(soon, "e", 1, tenant="x"))
    assert isinstance(still, TenantCoolingDown) and gib(9) < still.average_bytes < gib(10)
    assert granted(driver.ask(later, "large", 1, tenant="x")) == ["large"]


def test_tenant_over_its_average_wakes_no_model_either() -> None:
    limits = settings(terms("x", average=10))
    driver = CoreDriver(device=80, host=100, settings=limits)
    driver.resident(0, "a", 40, host=30, tenant="x")
    driver.engines["a"] = {CPU: 40}
    driver.read(1)
    assert revoked(driver.ask(1500, "b", 60, tenant="y")) == [("a", "swap", "asleep")]
    driver.at(1501, ev.Slept(TicketId("a")))
    driver.engines["a"] = {HOST: 30}
    driver.read(1502)
    driver.at(1503, ev.LoadBroke(TicketId("b"), "x", False))
    driver.gone(1504, "b")
    error = refusal(driver.ask(1505, "a", 40, host=30, tenant="x"))
    assert isinstance(error, TenantCoolingDown) and driver.state_of("a") == "asleep"
    assert granted(driver.ask(1506, "a", 40, host=30, tenant="y")) == ["a"]


def test_tenants_limits_hold_before_the_agent_of_the_holders_node_is_there() -> None:
    """As in a new epoch, in which holder and agent join in any order."""
    driver = CoreDriver(device=80, settings=settings(terms("x", most=30, average=10)))
    driver.join(0, "early", node="m")
    error = refusal(driver.ask(1, "large", 40, tenant="x", holder="early"))
    assert isinstance(error, QuotaExceeded)
    driver.resident(2, "a", 20, tenant="x")
    error = refusal(driver.ask(3600, "b", 1, tenant="x", holder="early"))
    assert isinstance(error, TenantCoolingDown)
