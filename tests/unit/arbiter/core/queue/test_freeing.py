"""What `arbiter free` may have at once, what stays, and what returns (A15)."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, LoadModel
from arbiter.core.reports.plan import Plan, PlanQuestion
from arbiter.core.settings import TenantLimits
from arbiter.errors import LeaseRefused
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    NODE,
    PLAIN,
    CoreDriver,
    gib,
    granted,
    refusal,
    revoked,
    s,
)

pytestmark = pytest.mark.spec("A15")
TERMS = types.LeaseConditions("ops", seconds(60), seconds(0), frees=True)
HOLDER, FREE = HolderId("lease:free"), TicketId("free")


def free(
    driver: CoreDriver, t: float, size: float, deadline_s: float | None = None
) -> list[Decision]:
    driver.at(t, ev.Joined(HOLDER, NODE, "lease", ()))
    need, deadline = types.Need(gib(size)), None if deadline_s is None else seconds(deadline_s)
    asked = ev.Requested(FREE, HOLDER, "lease", "gpu", need, deadline=deadline, lease=TERMS)
    return driver.at(t, asked)


def planned(driver: CoreDriver, t: float, size: float) -> Plan:
    question = PlanQuestion("lease", "gpu", types.Need(gib(size)), True, lease=TERMS)
    return driver.arbiter.plan(question, s(t))


def leave(driver: CoreDriver, t: float, *names: str) -> list[Decision]:
    decisions: list[Decision] = []
    for name in names:
        driver.at(t, ev.Released(TicketId(name), "free"))
        decisions += driver.gone(t, name)
    return decisions


def loads(decisions: list[Decision]) -> list[str]:
    return [d.model for d in decisions if isinstance(d, LoadModel)]


def crowded() -> CoreDriver:
    """Of 80: a lately loaded urgent model of 30, one in use of 20, a pinned one of 10; 20 free."""
    driver = CoreDriver(device=80, pinned="d")
    driver.resident(0, "d", 10)
    driver.resident(0, "c", 20)
    driver.beat(0, "c", inflight=2)
    driver.resident(0, "a", 30, priority=types.Priority.URGENT)
    return driver


def test_idle_models_leave_at_once_however_urgent_and_lately_loaded() -> None:
    driver = crowded()
    assert revoked(free(driver, 0.1, 40)) == [("a", "free", "gone")]
    assert granted(leave(driver, 0.2, "a")) == ["free"]
    assert driver.ticket("free").home == {CPU: gib(40)}


def test_what_is_pinned_or_in_use_stays_and_the_rest_is_granted() -> None:
    driver = crowded()
    plan = planned(driver, 0.1, 75)
    assert plan.need_bytes == gib(50) and [v.ticket for v in plan.victims] == ["a"]
    assert {(t.model, t.why) for t in plan.stays} == {
        ("d", "it is pinned"), ("c", "it is in use (2 in flight)"),
    }  # fmt: skip
    assert "c (c) stays with 20.0 GiB: it is in use (2 in flight)." in plan.sentences
    assert revoked(free(driver, 0.1, 75)) == [("a", "free", "gone")]
    assert granted(leave(driver, 0.2, "a")) == ["free"]
    assert driver.ticket("free").home == {CPU: gib(50)}


def test_what_left_is_loaded_again_once_the_lease_is_over() -> None:
    driver = crowded()
    free(driver, 0.1, 40)
    leave(driver, 0.2, "a")
    assert loads(driver.at(9, ev.Released(FREE, "released"))) == ["a"]
    assert driver.last("freed_return").data == {"models": "text/a"}
    assert loads(driver.gone(9, "free")) == []


def test_what_left_returns_when_the_lease_is_given_up_before_its_grant() -> None:
    driver = crowded()
    free(driver, 0.1, 40)
    driver.at(0.2, ev.Released(TicketId("a"), "free"))
    assert loads(driver.at(0.3, ev.Withdrawn(FREE))) == ["a"]


def test_a_model_whose_replica_is_gone_meanwhile_is_wanted_of_the_next() -> None:
    driver = crowded()
    free(driver, 0.1, 40)
    leave(driver, 0.2, "a")
    driver.at(1, ev.HolderLost(HolderId("h")))
    assert loads(driver.at(9, ev.Released(FREE, "released"))) == []
    assert driver.arbiter.replica_targets(s(9))["text"] == 1
    assert loads(driver.join(10, "h2")) == ["a"]


def test_a_model_that_a_stopping_replica_was_asked_for_is_loaded_by_the_next() -> None:
    driver = crowded()
    free(driver, 0.1, 40)
    leave(driver, 0.2, "a")
    assert loads(driver.at(9, ev.Released(FREE, "released"))) == ["a"]
    driver.gone(9, "free")
    assert loads(driver.at(11, ev.HolderLost(HolderId("h")))) == []
    assert driver.arbiter.replica_targets(s(11))["text"] == 1
    assert loads(driver.join(12, "h2")) == ["a"]
    assert loads(driver.at(13, ev.HolderLost(HolderId("h2")))) == []
    assert loads(driver.join(100, "h3")) == ["a"], "asked for until a replica has loaded it"
    driver.resident(101, "a again", 30, holder="h3", model="a")
    driver.at(102, ev.HolderLost(HolderId("h3")))
    assert loads(driver.join(103, "h4")) == [], "it was loaded, and left as any other"


def test_what_a_replica_did_not_load_within_a_minute_is_not_asked_of_the_next() -> None:
    driver = crowded()
    free(driver, 0.1, 40)
    leave(driver, 0.2, "a")
    assert loads(driver.at(9, ev.Released(FREE, "released"))) == ["a"]
    driver.at(69, ev.HolderLost(HolderId("h")))
    assert loads(driver.join(70, "h2")) == []


def test_nothing_is_freed_where_all_of_it_is_in_use() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.beat(0, "a", inflight=1)
    error = refusal(free(driver, 1, 10))
    assert isinstance(error, LeaseRefused) and "nothing idle may leave" in str(error)
    assert planned(driver, 1, 10).stays[0].why == "it is in use (1 in flight)"


def test_an_earlier_request_that_finds_no_room_does_not_hold_it_up() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80, priority=types.Priority.URGENT)
    assert driver.ask(0.1, "b", 10, tenant="ops", priority=types.Priority.URGENT) == []
    assert revoked(free(driver, 0.2, 40)) == [("a", "free", "gone")]


def test_a_model_that_proves_busy_stays_and_the_rest_is_granted() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 60)
    driver.resident(0, "b", 20)
    assert revoked(free(driver, 8, 80)) == [("a", "free", "gone"), ("b", "free", "gone")]
    driver.at(8.1, ev.Busy(TicketId("a"), 1))
    assert granted(leave(driver, 8.2, "b")) == ["free"]
    assert driver.ticket("free").home == {CPU: gib(20)}


def test_where_all_prove_busy_it_is_refused() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    free(driver, 8, 40)
    error = refusal(driver.at(8.1, ev.Busy(TicketId("a"), 1)))
    assert isinstance(error, LeaseRefused) and "nothing idle may leave" in str(error)


def test_a_lease_whose_notice_is_longer_than_the_wait_stays() -> None:
    driver = CoreDriver(device=80)
    driver.lease(0, "slow", 20, preemptible=True, notice_s=60)
    driver.lease(0, "quick", 20, preemptible=True, notice_s=5, tenant="t2")
    assert revoked(free(driver, 8, 80, deadline_s=25)) == [("quick", "free", "gone")]
    assert granted(leave(driver, 9, "quick")) == ["free"]
    assert driver.ticket("free").home == {CPU: gib(60)}


def test_an_aged_request_that_keeps_the_device_does_not_hold_it_up() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "b", 40)
    assert granted(driver.lease(0, "l", 40)) == ["l"]
    assert driver.ask(1, "c", 80) == []
    driver.sleep_until(40)
    assert revoked(free(driver, 40, 40)) == [("b", "free", "gone")]
    assert granted(leave(driver, 41, "b")) == ["free"]


def test_the_quota_of_a_tenant_does_not_bind_the_operator() -> None:
    limits = TenantLimits("ops", gib(20))
    driver = CoreDriver(device=80, settings=replace(PLAIN, tenants=(limits,)))
    assert granted(free(driver, 0, 70)) == ["free"]


def test_the_cap_of_a_tenant_does_not_bind_the_operator() -> None:
    driver = CoreDriver(device=80)  # of which a tenant may lease half
    assert granted(free(driver, 0, 70)) == ["free"]


@pytest.mark.spec("C10")
def test_no_more_of_a_reserve_is_asked_for_than_its_tenant_holds_beyond_it() -> None:
    reserve = TenantLimits("x", None, gib(30), None)
    driver = CoreDriver(device=80, settings=replace(PLAIN, tenants=(reserve,)))
    driver.resident(0, "a", 50, tenant="x")
    driver.resident(0, "b", 30, tenant="y")
    driver.beat(0, "b", inflight=1)
    assert revoked(free(driver, 1, 80)) == [("a", "free", "gone")]
    assert granted(leave(driver, 2, "a")) == ["free"]
    assert driver.ticket("free").home == {CPU: gib(20)}
