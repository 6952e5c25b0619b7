"""What a request would bring about (K3): the four answers, each with its numbers."""

from collections.abc import Callable
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.reports.plan import Answer, Plan, PlanQuestion
from arbiter.units import NodeId, TicketId, in_seconds, seconds
from tests.support.core_driver import CPU, HOST, NODE, CoreDriver, gib, s

pytestmark = pytest.mark.spec("K3")
TERMS = types.LeaseConditions("t", seconds(60), seconds(0))


def ask(driver: CoreDriver, t: float, size: float, model: str = "large", **more: object) -> Plan:
    question = PlanQuestion("text", model, types.Need(gib(size)), True, **more)  # type: ignore[arg-type]
    return driver.arbiter.plan(question, s(t))


def on_cpu(size: float) -> tuple[types.DeviceBytes, ...]:
    return (types.DeviceBytes(CPU, gib(size)),)


def test_what_fits_is_granted_now() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 30)
    plan = ask(driver, 5, 50)
    assert (plan.answer, plan.goes_to, plan.wait) == (Answer.NOW, on_cpu(50), 0)
    assert plan.sentences == ("Now: 50.0 GiB on n/cpu:0; nothing leaves for it.",)
    assert not plan.starts_replica and driver.find("dry run") is None


def test_policies_may_be_any_functions() -> None:
    driver = CoreDriver(device=80)
    driver.wrap_policies(wrapped)
    driver.resident(0, "a", 60)
    driver.ask(1, "b", 60)
    assert ask(driver, 30, 50).answer is Answer.NOT_BEFORE


def wrapped(policy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def local(view: Any) -> Any:
        return policy(view)

    return local


def test_a_resident_model_serves_at_once() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 30)
    plan = ask(driver, 5, 30, "a")
    assert (plan.answer, plan.is_resident, plan.goes_to) == (Answer.NOW, True, on_cpu(30))


def test_each_victim_comes_with_bytes_reload_seconds_and_its_user() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 60, client="ann", tenant="acme")
    driver.at(0, ev.Loaded(TicketId("a"), seconds(4)))
    driver.beat(4, "a", inflight=0)
    plan = ask(driver, 30, 50)
    assert (plan.answer, plan.goes_to) == (Answer.AFTER_EVICTING, on_cpu(50))
    [victim] = plan.victims
    assert (victim.ticket, victim.freed, victim.goes) == ("a", on_cpu(60), "gone")
    assert in_seconds(victim.reload) == pytest.approx(4)
    assert (victim.tenant, victim.client, victim.inflight) == ("acme", "ann", 0)
    assert plan.sentences == (
        "a (a) leaves: 60.0 GiB, idle for 26 s, last used by ann; back in 4.0 s.",
    )
    assert driver.state_of("a") == "resident"


def test_a_model_within_its_minimum_residency_delays_the_load_until_it_ends() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 60)
    driver.at(20, ev.Loaded(TicketId("a"), seconds(20)))
    driver.beat(20, "a")
    plan = ask(driver, 25, 50)
    assert (plan.answer, plan.victims) == (Answer.NOT_BEFORE, ())
    assert plan.wait is not None and in_seconds(plan.wait) >= 15
    assert any("protected for another 15.0 s" in sentences for sentences in plan.sentences)


def test_more_than_the_budget_is_never_granted() -> None:
    plan = ask(CoreDriver(device=80), 1, 90)
    assert (plan.answer, plan.code, plan.wait) == (Answer.NEVER, "never_fits", None)
    assert "90.0 GiB" in plan.sentences[0] and "80.0 GiB" in plan.sentences[0]


def test_a_model_that_is_not_in_the_table_is_never_granted() -> None:
    plan = ask(CoreDriver(device=80), 1, 1, "stranger")
    assert (plan.answer, plan.code) == (Answer.NEVER, "model_not_found")


def test_a_model_that_cools_down_is_not_loaded_before_its_cool_down_ends() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "large", 10)
    driver.at(1, ev.LoadBroke(TicketId("large"), "no such file", False))
    driver.gone(1, "large")
    plan = ask(driver, 2, 10)
    assert (plan.answer, plan.code) == (Answer.NOT_BEFORE, "model_cooling_down")
    assert plan.wait is not None and in_seconds(plan.wait) == pytest.approx(1)


def test_without_a_replica_the_answer_is_that_of_the_first_to_start() -> None:
    driver = CoreDriver(device=80, holders=())
    plan = ask(driver, 1, 50)
    assert (plan.answer, plan.starts_replica, plan.node) == (Answer.NOW, True, NODE)


def test_the_best_of_several_nodes_is_told() -> None:
    driver = CoreDriver(device=20, holders=("h",))
    driver.see_node(0, 80, 0, node="m")
    driver.read(0, node="m")
    driver.join(0, "h2", node="m")
    assert ask(driver, 1, 50).node == NodeId("m")
    assert ask(driver, 1, 50, node=NODE).answer is Answer.NEVER


def many_nodes(*sizes: float) -> CoreDriver:
    """Nodes n, n1, n2, and so on of these sizes, each with a holder."""
    driver = CoreDriver(device=sizes[0])
    for number, size in enumerate(sizes):
        node = f"n{number or ''}"
        if number:
            driver.see_node(0, size, 0, node=node)
            driver.read(0, node=node)
            driver.join(0, f"h{number}", node=node)
    return driver


def test_of_many_nodes_those_with_the_most_room_are_tried() -> None:
    driver = many_nodes(10, 20, 30, 40, 50, 60)
    assert ask(driver, 1, 45, "a").node == "n5"
    driver.resident(2, "b", 60, holder="h5")
    driver.beat(2, "b", holder="h5", inflight=1)
    plan = ask(driver, 30, 55, "a")  # no other can ever lend as much
    assert (plan.answer, plan.node) == (Answer.AFTER_EVICTING, "n5")
    assert plan.sentences[-1] == "Of 6 nodes only the 4 with the most room were tried."


def test_something_unknown_is_asked_for_as_a_lease_would() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 30)
    plan = ask(driver, 9, 40, "comfyui", lease=TERMS)
    assert (plan.answer, plan.goes_to, plan.starts_replica) == (Answer.NOW, on_cpu(40), False)
    over = ask(driver, 9, 41, "comfyui", lease=TERMS)  # a tenant may lease half
    assert (over.answer, over.code) == (Answer.NEVER, "quota_exceeded")


def test_with_no_node_there_is_nothing_to_say() -> None:
    settings = CoreDriver().arbiter.settings
    bare = CoreDriver(settings=settings)
    bare.at(1, ev.NodeLost(NODE))
    plan = ask(bare, 2, 5)
    assert (plan.answer, plan.wait, plan.node) == (Answer.NOT_BEFORE, None, None)


def test_a_model_asleep_wakes_where_it_lives() -> None:
    driver = CoreDriver(device=80, host=80)
    driver.resident(0, "a", 40, host=40)
    driver.ask(9, "b", 60)
    driver.at(10, ev.Slept(TicketId("a")))
    driver.engines["a"] = {HOST: 40}
    driver.read(10)
    assert driver.state_of("a") == "asleep"
    driver.at(11, ev.Loaded(TicketId("b"), seconds(1)))
    driver.beat(12, "b")
    plan = ask(driver, 60, 40, "a")
    assert (plan.answer, plan.goes_to) == (Answer.AFTER_EVICTING, on_cpu(40))
    assert [v.ticket for v in plan.victims] == ["b"]
