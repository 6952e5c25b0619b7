"""What `arbiter free` may have at once, what stays, and what returns (A15)."""

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, LoadModel
from arbiter.core.reports.plan import Plan, PlanQuestion
from arbiter.errors import LeaseRefused
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import CPU, NODE, CoreDriver, gib, granted, refusal, revoked, s

pytestmark = pytest.mark.spec("A15")
TERMS = types.LeaseConditions("ops", seconds(60), seconds(0), frees=True)
HOLDER, FREE = HolderId("lease:free"), TicketId("free")


def free(driver: CoreDriver, t: float, size: float) -> list[Decision]:
    driver.at(t, ev.Joined(HOLDER, NODE, "lease", ()))
    need = types.Need(gib(size))
    return driver.at(t, ev.Requested(FREE, HOLDER, "lease", "gpu", need, lease=TERMS))


def planned(driver: CoreDriver, t: float, size: float) -> Plan:
    question = PlanQuestion("lease", "gpu", types.Need(gib(size)), True, lease=TERMS)
    return driver.arbiter.plan(question, s(t))


def leave(driver: CoreDriver, t: float, *names: str) -> list[Decision]:
    decisions: list[Decision] = []
    for name in names:
        driver.at(t, ev.Released(TicketId(name), "swap"))
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
    assert revoked(free(driver, 0.1, 40)) == [("a", "swap", "gone")]
    assert granted(leave(driver, 0.2, "a")) == ["free"]
    assert driver.ticket("free").home == {CPU: gib(40)}


def test_what_is_pinned_or_in_use_stays_and_the_rest_is_granted() -> None:
    driver = crowded()
    plan = planned(driver, 0.1, 75)
    assert plan.need_bytes == gib(50) and [v.ticket for v in plan.victims] == ["a"]
    assert {(t.model, t.why) for t in plan.stays} == {
        ("d", "it is pinned"), ("c", "it is in use (2 in flight)"),
    }  # fmt: skip
    assert "c (c) stays with 20.0 GiB: it is in use (2 in flight)." in plan.said
    assert revoked(free(driver, 0.1, 75)) == [("a", "swap", "gone")]
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
    driver.at(0.2, ev.Released(TicketId("a"), "swap"))
    assert loads(driver.at(0.3, ev.Withdrawn(FREE))) == ["a"]


def test_a_model_whose_replica_is_gone_meanwhile_is_wanted_of_the_next() -> None:
    driver = crowded()
    free(driver, 0.1, 40)
    leave(driver, 0.2, "a")
    driver.at(1, ev.HolderLost(HolderId("h")))
    assert loads(driver.at(9, ev.Released(FREE, "released"))) == []
    assert driver.arbiter.replica_targets(s(9))["text"] == 1
    assert loads(driver.join(10, "h2")) == ["a"]


def test_nothing_is_freed_where_all_of_it_is_in_use() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.beat(0, "a", inflight=1)
    error = refusal(free(driver, 1, 10))
    assert isinstance(error, LeaseRefused) and "nothing idle may leave" in str(error)
    assert planned(driver, 1, 10).stays[0].why == "it is in use (1 in flight)"


def test_the_cap_of_a_tenant_does_not_bind_the_operator() -> None:
    driver = CoreDriver(device=80)  # of which a tenant may lease half
    assert granted(free(driver, 0, 70)) == ["free"]
