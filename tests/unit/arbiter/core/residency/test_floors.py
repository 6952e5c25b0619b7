"""Where somebody wants a model to be: floors, management from outside, loads by hand, removal."""

from dataclasses import replace
from typing import Any

import pytest

from arbiter import units
from arbiter.core import events as ev
from arbiter.core.decisions import DropSlabs, LoadModel, WithdrawLoad
from arbiter.core.records.ledger import Ledger
from arbiter.core.types import Floor, Phase, Priority
from arbiter.errors import NeverFits, NotResident, UnknownModel
from arbiter.units import GIB, HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    HOST,
    NODE,
    PATIENT,
    PLAIN,
    CoreDriver,
    granted,
    is_granted,
    refusal,
    revoked,
    s,
)

H = HolderId("h")


def floor(d: CoreDriver, t: float, model: str, to: Floor) -> list[object]:
    return list(d.at(t, ev.FloorSet("text", model, to)))


def external() -> CoreDriver:
    d = CoreDriver(host=80)
    d.at(0, ev.CapabilitiesSet((replace(d.table[0], is_external=True), d.table[1])))
    return d


@pytest.mark.spec("D1", "D8")
def test_device_floor_loads_its_model_at_once_and_protects_it() -> None:
    d = CoreDriver()
    assert floor(d, 0, "a", Floor.DEVICE) == [LoadModel(H, "a")]
    d.resident(1, "a", 50)
    assert isinstance(refusal(d.ask(20, "b", 50)), NeverFits)
    assert granted(d.ask(21, "c", 30)) == ["c"]
    assert d.state_of("a") == "resident"
    assert [f.floor for f in d.arbiter.snapshot(units.Span(20 * 10**9)).floors] == ["device"]  # type: ignore[arg-type]


@pytest.mark.spec("D1", "D8")
def test_device_floor_is_loaded_on_the_next_node_where_the_first_refuses_it() -> None:
    d = CoreDriver(holders=())
    nodes = ("n", "m", "o")
    for name, size in zip(nodes, (80, 80, 200), strict=True):
        d.see_node(0, size, 0, node=name)
        d.read(0, node=name)
        d.join(0, f"h-{name}", node=name)
    assert floor(d, 0, "large", Floor.DEVICE) == [LoadModel(HolderId("h-n"), "large")]
    assert LoadModel(HolderId("h-n"), "large") in d.fire_timer(10), "it has not asked yet"
    for t, name, following in ((11, "n", "m"), (22, "m", "o")):
        asked = d.ask(t, f"large{t}", 100, holder=f"h-{name}")
        assert isinstance(refusal(asked), NeverFits)
        assert LoadModel(HolderId(f"h-{following}"), "large") in d.fire_timer(t + 10)
    assert granted(d.ask(33, "large33", 100, holder="h-o")) == ["large33"]


@pytest.mark.spec("D8")
def test_floor_set_without_holders_is_loaded_by_the_first_to_join() -> None:
    d = CoreDriver(holders=())
    assert floor(d, 0, "a", Floor.DEVICE) == []
    assert d.arbiter.replica_targets(units.Span(10**15))["text"] == 1  # type: ignore[arg-type]
    assert d.join(1, "h") == [LoadModel(H, "a")]


def with_floor(d: CoreDriver, to: Floor) -> ev.CapabilitiesSet:
    """The table with a floor for `a`."""
    models = tuple(replace(m, floor=to) if m.name == "a" else m for m in d.table[0].models)
    return ev.CapabilitiesSet((replace(d.table[0], models=models), *d.table[1:]))


@pytest.mark.spec("D1")
def test_configured_floor_loads_and_protects_its_model_until_a_person_sets_another() -> None:
    d = CoreDriver(host=80)
    assert d.at(0, with_floor(d, Floor.DEVICE)) == [LoadModel(H, "a")]
    d.resident(1, "a", 50)
    d.beat(20, "a")
    assert isinstance(refusal(d.ask(20, "b", 50)), NeverFits)
    assert d.last("floor_set").data["source"] == "table"
    floor(d, 21, "a", Floor.COLD)
    assert d.last("floor_set").data["source"] == "person"
    assert d.state_of("a") == "draining"
    assert d.at(23, with_floor(d, Floor.DEVICE)) == [], "the person's floor stands"


@pytest.mark.spec("D1")
def test_configured_floor_that_leaves_the_table_releases_the_device() -> None:
    d = CoreDriver(host=80)
    d.at(0, with_floor(d, Floor.DEVICE))
    d.resident(1, "a", 50)
    d.beat(20, "a")
    d.at(21, with_floor(d, Floor.COLD))
    assert d.state_of("a") == "draining"


@pytest.mark.spec("D8")
def test_floor_withdrawn_before_a_holder_joins_loads_nothing() -> None:
    d = CoreDriver(holders=())
    assert floor(d, 0, "a", Floor.DEVICE) == floor(d, 1, "a", Floor.COLD) == []
    assert d.join(2, "h") == []


@pytest.mark.spec("A8", "D1")
@pytest.mark.parametrize("to", [Floor.COLD, Floor.HOST])
def test_lowered_device_floor_has_its_holder_withdraw_what_it_only_loads_for_the_floor(
    to: Floor,
) -> None:
    d = CoreDriver(host=80)
    d.resident(0, "b", 50)
    d.beat(1, "b", inflight=1)
    assert floor(d, 2, "a", Floor.DEVICE) == [LoadModel(H, "a")]
    assert floor(d, 3, "a", to) == [WithdrawLoad(H, "a")], "its request may be under way"
    floor(d, 4, "a", Floor.DEVICE)
    d.ask(5, "a", 50)
    assert d.state_of("a") == "queued"
    assert floor(d, 6, "a", to) == [WithdrawLoad(H, "a")]
    d.at(7, ev.Withdrawn(TicketId("a"), H))
    assert d.state_of("a") == "closed"
    assert floor(d, 8, "a", Floor.COLD) == [], "nothing is loaded without a request"


@pytest.mark.spec("D1")
def test_load_by_hand_goes_on_under_a_host_floor() -> None:
    d = CoreDriver(host=80)
    assert d.at(0, ev.LoadAsked("text", "a")) == [LoadModel(H, "a")]
    assert floor(d, 1, "a", Floor.HOST) == []
    assert floor(d, 2, "a", Floor.COLD) == [WithdrawLoad(H, "a")]


@pytest.mark.spec("D1", "D8")
def test_host_floor_puts_its_model_to_sleep_once_idle_and_keeps_it_asleep() -> None:
    d = CoreDriver(host=80, keep_warm_s=60)
    d.resident(0, "a", 50, host=40)
    d.beat(1, "a", inflight=1)
    assert floor(d, 2, "a", Floor.HOST) == []
    assert revoked(d.beat(3, "a")) == [("a", "manual", "asleep")]
    d.engines["a"] = {CPU: 50}
    d.read(3)
    d.at(4, ev.Slept(TicketId("a")))
    d.engines["a"] = {HOST: 40}
    d.read(5)
    assert d.state_of("a") == "asleep"
    assert revoked(d.fire_timer(500)) == [] and d.state_of("a") == "asleep"
    assert [r[0] for r in revoked(floor(d, 501, "a", Floor.COLD))] == ["a"]


@pytest.mark.spec("D8")
def test_floor_of_an_unknown_model_is_refused() -> None:
    d = CoreDriver()
    with pytest.raises(UnknownModel):
        floor(d, 0, "nope", Floor.DEVICE)
    assert not d.floors()


@pytest.mark.spec("D8")
def test_floors_survive_the_arbiter() -> None:
    d, successor = CoreDriver(), CoreDriver()
    floor(d, 0, "a", Floor.DEVICE)
    successor.arbiter.restore_floors(d.arbiter.export_floors())
    assert successor.arbiter.export_floors() == [["text", "a", "device"]]
    assert successor.join(1, "h") == [LoadModel(H, "a")]


@pytest.mark.spec("D1", "A18")
@pytest.mark.parametrize("is_configured", [True, False])
def test_model_with_a_device_floor_is_not_loaded_before_holders_of_the_last_epoch_are_back(
    is_configured: bool,
) -> None:
    d = CoreDriver(known=("g", "h"), holders=())
    if is_configured:
        d.at(0, with_floor(d, Floor.DEVICE))
    else:
        d.arbiter.restore_floors([["text", "a", "device"]])
    assert d.join(1, "g") == []
    d.join(2, "h", d.held("a", Phase.RESIDENT, size=30))
    assert d.fire_timer(5) == d.fire_timer(30) == []
    ticket = d.find("a")
    assert ticket is not None and ticket.pinned


@pytest.mark.spec("D1", "A18")
def test_model_with_a_device_floor_that_no_holder_brings_back_is_loaded_once_grants_are_made() -> (
    None
):
    d = CoreDriver(known=("g", "h"), holders=())
    d.arbiter.restore_floors([["text", "a", "device"]])
    assert d.join(1, "g") == [] and d.fire_timer(4.9) == []
    assert d.fire_timer(5) == [LoadModel(HolderId("g"), "a")]


@pytest.mark.spec("A18", "D1")
def test_load_asked_of_a_holder_that_joins_again_is_asked_of_it_once_more() -> None:
    """What it had not heard of its old session is void."""
    d = CoreDriver()
    assert d.at(0, ev.LoadAsked("text", "a")) == [LoadModel(H, "a")]
    assert d.join(1, "g") == [], "it is another's"
    assert d.join(2, "h") == [LoadModel(H, "a")]
    d.ask(3, "a", 30)
    assert not any(isinstance(said, LoadModel) for said in d.join(4, "h")), "it has begun"
    d.at(5, ev.Loaded(TicketId("a"), seconds(1)))
    d.at(6, ev.Released(TicketId("a"), "lost"))
    assert d.gone(6, "a") == d.join(7, "h") == []


@pytest.mark.spec("A18", "D1")
def test_load_that_was_refused_or_asked_for_long_ago_is_not_asked_for_again() -> None:
    d = CoreDriver()
    d.at(0, ev.LoadAsked("text", "a"))
    d.at(0, ev.LoadAsked("text", "b"))
    assert isinstance(refusal(d.ask(1, "a", 300)), NeverFits)
    assert d.join(2, "h") == [LoadModel(H, "b")]
    assert d.join(63, "h") == []


@pytest.mark.spec("D2")
def test_request_for_a_cold_externally_managed_model_is_refused_at_once() -> None:
    d = external()
    error = refusal(d.ask(0, "a", 30))
    assert isinstance(error, NotResident) and error.status_code == 409
    floor(d, 1, "a", Floor.DEVICE)
    assert is_granted(d.ask(2, "a2", 30), "a2")
    with pytest.raises(NotResident):
        d.at(3, ev.LoadAsked("text", "b"))


def queued_for_its_floor(d: CoreDriver) -> None:
    """`b` has the device floor and asks, and another model has its bytes."""
    d.ask(0, "e1", 60, capability="embedding", model="e1")
    floor(d, 1, "b", Floor.DEVICE)
    assert d.ask(2, "b", 60) == []


@pytest.mark.spec("D2", "D8")
@pytest.mark.parametrize("to", [Floor.HOST, Floor.COLD])
def test_queued_ticket_of_an_externally_managed_model_whose_floor_is_lowered_is_refused(
    to: Floor,
) -> None:
    d = external()
    queued_for_its_floor(d)
    d.at(3, ev.FloorSet("text", "b", to))
    assert d.state_of("b") == "closed"
    assert isinstance(refusal(d.ask(4, "b", 60)), NotResident)


@pytest.mark.spec("D8")
def test_model_whose_floor_is_lowered_while_its_ticket_is_queued_leaves_after_its_requests() -> (
    None
):
    d = CoreDriver()
    queued_for_its_floor(d)
    floor(d, 3, "b", Floor.COLD)
    d.at(4, ev.LoadBroke(TicketId("e1"), "a bug", False))
    assert granted(d.gone(5, "e1")) == ["b"]
    d.at(6, ev.Loaded(TicketId("b"), units.seconds(1)))
    assert revoked(d.beat(7, "b", inflight=1)) == []
    assert revoked(d.beat(8, "b")) == [("b", "manual", "gone")]


@pytest.mark.spec("D8")
def test_load_by_hand_takes_back_a_floor_that_was_lowered_while_its_ticket_is_queued() -> None:
    d = CoreDriver()
    queued_for_its_floor(d)
    floor(d, 3, "b", Floor.COLD)
    d.at(4, ev.LoadAsked("text", "b"))
    d.at(5, ev.LoadBroke(TicketId("e1"), "a bug", False))
    assert granted(d.gone(6, "e1")) == ["b"]
    d.at(7, ev.Loaded(TicketId("b"), units.seconds(1)))
    assert revoked(d.beat(8, "b")) == []


@pytest.mark.spec("D2", "A18")
@pytest.mark.parametrize(("to", "leaves"), [("cold", ["manual"]), ("device", [])])
def test_externally_managed_model_whose_floor_was_lowered_in_the_last_epoch_leaves_once_idle(
    to: str, leaves: list[str]
) -> None:
    d = CoreDriver(known=("h",), holders=())
    d.at(0, ev.CapabilitiesSet((replace(d.table[0], is_external=True), d.table[1])))
    d.arbiter.restore_floors([["text", "a", to]])
    assert revoked(d.join(1, "h", d.held("a", Phase.RESIDENT, size=30, inflight=1))) == []
    assert [reason for _, reason, _ in revoked(d.beat(2, "a"))] == leaves


@pytest.mark.spec("D2")
def test_leaving_the_device_floor_releases_the_device() -> None:
    d = external()
    floor(d, 0, "a", Floor.DEVICE)
    d.resident(1, "a", 30)
    assert revoked(floor(d, 10, "a", Floor.COLD)) == [("a", "manual", "gone")]
    d.at(11, ev.Released(TicketId("a"), "manual"))
    d.gone(12, "a")
    assert isinstance(refusal(d.ask(13, "a2", 30)), NotResident)


@pytest.mark.spec("D8")
def test_model_is_loaded_by_hand_without_a_request() -> None:
    d = CoreDriver()
    assert d.at(0, ev.LoadAsked("text", "a")) == [LoadModel(H, "a")]
    assert granted(d.ask(1, "a", 30)) == ["a"]
    assert d.at(2, ev.LoadAsked("text", "a")) == []  # it loads already


@pytest.mark.spec("D8", "C8")
def test_load_by_hand_of_a_resident_keeps_it_warm_as_a_use_does() -> None:
    d = CoreDriver(keep_warm_s=60)
    d.resident(0, "a", 30)
    d.beat(40, "a", inflight=0)
    d.at(50, ev.LoadAsked("text", "a"))
    assert d.fire_timer(105) == []
    assert revoked(d.fire_timer(110)) == [("a", "idle", "gone")]


@pytest.mark.spec("D8")
@pytest.mark.parametrize(("loads_again", "leaves"), [(False, ["manual"]), (True, [])])
def test_model_unloaded_by_hand_while_it_loads_leaves_once_it_is_idle_unless_loaded_again(
    loads_again: bool, leaves: list[str]
) -> None:
    d = CoreDriver()
    assert granted(d.ask(0, "a", 30)) == ["a"]
    assert d.at(1, ev.UnloadAsked(TicketId("a"))) == []
    if loads_again:
        assert d.at(2, ev.LoadAsked("text", "a")) == []
    assert d.at(3, ev.Loaded(TicketId("a"), units.seconds(3))) == []
    assert d.beat(4, "a", inflight=1) == [], "the request that waited for it is answered"
    assert [reason for _, reason, _ in revoked(d.beat(5, "a"))] == leaves


def learned_models(d: CoreDriver) -> list[dict[str, Any]]:
    """Rows of models, without those of whole capabilities."""
    return [row for row in d.arbiter.export_learned() if row["model"]]


@pytest.mark.spec("A10", "D8")
@pytest.mark.parametrize("what", ["quarantined", "silent"])
def test_load_without_a_request_is_asked_of_a_holder_that_may_be_granted_it(what: str) -> None:
    d = CoreDriver(settings=replace(PLAIN, timeouts=replace(PATIENT, silent=units.seconds(10))))
    d.resident(0, "b", 10)
    d.at(1, ev.Released(TicketId("b"), "idle"))
    if what == "quarantined":
        d.sleep_until(15)
        d.beat(15)
    else:
        d.gone(2, "b")
    d.join(16, "k")
    asked = floor(d, 17, "a", Floor.DEVICE)
    assert LoadModel(HolderId("k"), "a") in asked and LoadModel(H, "a") not in asked


@pytest.mark.spec("D9")
def test_removed_model_leaves_after_its_requests_with_all_that_was_learned_of_it() -> None:
    d = CoreDriver()
    d.resident(0, "a", 30)
    floor(d, 0, "a", Floor.DEVICE)
    d.engines["a"] = {CPU: 30}
    d.read(1)
    d.read(2)
    d.beat(3, "a", inflight=1)
    assert learned_models(d)
    text = replace(d.table[0], models=tuple(m for m in d.table[0].models if m.name != "a"))
    assert revoked(d.at(4, ev.CapabilitiesSet((text, d.table[1])))) == []
    assert isinstance(refusal(d.ask(5, "a2", 30)), UnknownModel)
    assert [r[0] for r in revoked(d.beat(6, "a"))] == ["a"]
    d.at(7, ev.Released(TicketId("a"), "idle"))
    assert learned_models(d)
    assert d.gone(8, "a") == [DropSlabs(NodeId("n"), "text/a")]
    assert learned_models(d) == [] and d.arbiter.export_floors() == []
    assert d.last("model_removed").data["model"] == "a"


@pytest.mark.spec("D9", "N2")
def test_no_event_walks_all_tickets_while_a_removed_model_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d = CoreDriver()
    d.resident(0, "a", 10)
    d.beat(1, "a", inflight=1)
    d.at(2, ev.CapabilitiesSet(()))
    monkeypatch.setattr(Ledger, "tickets", lambda *_: pytest.fail("it walks all tickets"))
    d.beat(3, "a", inflight=1)
    assert d.state_of("a") == "resident"


@pytest.mark.spec("D9", "A18")
def test_removal_of_a_model_in_use_is_completed_by_the_next_epoch() -> None:
    d = CoreDriver()
    d.resident(0, "a", 30)
    d.engines["a"] = {CPU: 30}
    d.read(1)
    d.read(2)
    d.beat(3, "a", inflight=1)
    text = replace(d.table[0], models=tuple(m for m in d.table[0].models if m.name != "a"))
    d.at(4, ev.CapabilitiesSet((text, d.table[1])))
    after = CoreDriver(known=("h",), holders=())
    after.at(0, ev.CapabilitiesSet((text, d.table[1])))
    after.arbiter.restore_learned(d.arbiter.export_learned())
    after.arbiter.restore_removing(d.arbiter.export_removing())
    assert after.fire_timer(1) == [] and learned_models(after), "its holder may yet be back"
    after.join(2, "h", after.held("a", Phase.RESIDENT, size=30, inflight=1))
    assert [r[0] for r in revoked(after.beat(6, "a"))] == ["a"]
    assert learned_models(after)
    after.at(7, ev.Released(TicketId("a"), "idle"))
    assert after.gone(8, "a") == [DropSlabs(NodeId("n"), "text/a")]
    assert learned_models(after) == after.arbiter.export_removing() == []


@pytest.mark.spec("D9")
def test_a_model_that_is_back_in_time_keeps_what_was_learned() -> None:
    d = CoreDriver()
    d.resident(0, "a", 30)
    d.engines["a"] = {CPU: 30}
    d.read(1)
    d.read(2)

    def known() -> list[object]:
        """What was learned, and how often it was used."""
        return [learned_models(d), *d.usage_rates("a", s(9))]

    before = known()
    assert all(before)
    d.at(3, ev.CapabilitiesSet(()))
    d.at(4, ev.CapabilitiesSet(d.table))
    d.at(5, ev.Released(TicketId("a"), "idle"))
    d.gone(6, "a")
    assert d.state_of("a") == "closed" and known() == before


@pytest.mark.spec("D2", "D8")
def test_lowered_floor_revokes_again_after_its_holder_was_busy() -> None:
    d = external()
    floor(d, 0, "a", Floor.DEVICE)
    d.resident(1, "a", 30)
    assert revoked(floor(d, 10, "a", Floor.COLD)) == [("a", "manual", "gone")]
    d.at(11, ev.Busy(TicketId("a"), 1))
    assert revoked(d.beat(12, "a")) == []  # it was asked a moment ago
    assert revoked(d.fire_timer(60)) == [("a", "manual", "gone")]


@pytest.mark.spec("D8")
def test_model_with_a_device_floor_is_reloaded_when_its_engine_dies() -> None:
    d = CoreDriver()
    floor(d, 0, "a", Floor.DEVICE)
    d.resident(1, "a", 30)
    assert LoadModel(H, "a") in d.gone(2, "a")


@pytest.mark.spec("D1", "D8")
def test_model_with_a_configured_device_floor_is_reloaded_when_its_engine_dies() -> None:
    d = CoreDriver()
    d.at(0, with_floor(d, Floor.DEVICE))
    d.resident(1, "a", 30)
    assert LoadModel(H, "a") in d.gone(2, "a")


@pytest.mark.spec("D8", "A8")
def test_model_with_a_device_floor_is_loaded_again_where_the_client_of_its_load_leaves() -> None:
    d = CoreDriver()
    d.ask(0, "a", 30)
    assert floor(d, 1, "a", Floor.DEVICE) == [LoadModel(H, "a")], "also without that client"
    d.at(2, ev.Withdrawn(TicketId("a"), H))
    assert d.gone(3, "a") == [LoadModel(H, "a")]


@pytest.mark.spec("D8", "A8")
def test_model_with_a_device_floor_is_loaded_again_where_the_client_in_the_queue_leaves() -> None:
    d = CoreDriver(holders=("h", "g"))
    floor(d, 0, "a", Floor.DEVICE)
    d.resident(1, "a", 20)
    d.ask(2, "c", 50)  # it loads all the time
    d.ask(9, "a2", 60, holder="g")
    d.fire_timer(10)
    assert LoadModel(HolderId("g"), "a") in d.gone(11, "a"), "also without that client"
    assert d.at(12, ev.Withdrawn(TicketId("a2"), HolderId("g"))) == []
    assert d.fire_timer(21) == [LoadModel(H, "a")]


@pytest.mark.spec("D8", "A20")
def test_model_with_a_device_floor_is_loaded_by_another_replica_where_its_own_stops() -> None:
    d = CoreDriver()
    floor(d, 0, "a", Floor.DEVICE)
    d.resident(1, "a", 30)
    d.join(2, "g")
    d.at(10, ev.Released(TicketId("a"), "shutdown", H))
    d.at(11, ev.HolderLost(H))
    assert d.gone(12, "a") == [LoadModel(HolderId("g"), "a")]


@pytest.mark.spec("D8")
def test_model_with_a_device_floor_is_retried_after_each_cool_down() -> None:
    d = CoreDriver()
    floor(d, 0, "a", Floor.DEVICE)
    d.ask(1, "a", 30)
    d.at(2, ev.LoadBroke(TicketId("a"), "a bug", False))
    assert d.gone(2.1, "a") == []
    assert d.fire_timer(3.9) == []
    assert d.fire_timer(4.1) == [LoadModel(H, "a")]


@pytest.mark.spec("D8")
def test_model_with_a_device_floor_that_a_silent_holder_loads_is_asked_of_no_other() -> None:
    d = CoreDriver(settings=replace(PLAIN, timeouts=replace(PATIENT, silent=units.seconds(10))))
    d.join(0, "g")
    floor(d, 0, "a", Floor.DEVICE)
    d.beat(1)
    assert granted(d.ask(1, "a", 30)) == ["a"]
    assert d.beat(12, holder="g") == [LoadModel(H, "a")]


@pytest.mark.spec("D8", "D5")
def test_model_with_a_device_floor_for_which_no_ticket_came_is_asked_for_again() -> None:
    """Its holder found no plan, because the files were just being copied."""
    d = CoreDriver()
    assert floor(d, 0, "a", Floor.DEVICE) == [LoadModel(H, "a")]
    d.beat(5)
    assert d.fire_timer(9) == []
    assert d.fire_timer(10) == [LoadModel(H, "a")]
    d.resident(11, "a", 30)
    assert d.fire_timer(20) == d.fire_timer(30) == []


@pytest.mark.spec("D9")
def test_removed_model_asleep_on_its_floor_leaves_with_its_floor() -> None:
    d = CoreDriver(host=80)
    d.resident(0, "a", 50, host=40)
    floor(d, 2, "a", Floor.HOST)
    d.beat(3, "a")
    d.engines["a"] = {CPU: 50}
    d.read(3)
    d.at(4, ev.Slept(TicketId("a")))
    d.engines["a"] = {HOST: 40}
    d.read(5)
    assert d.state_of("a") == "asleep"
    text = replace(d.table[0], models=tuple(m for m in d.table[0].models if m.name != "a"))
    gone = revoked(d.at(10, ev.CapabilitiesSet((text, d.table[1]))))
    assert [r[0] for r in gone] == ["a"] and d.arbiter.export_floors() == []


@pytest.mark.spec("D9", "C11")
def test_usage_rates_and_transitions_of_a_removed_model_are_forgotten() -> None:
    d = CoreDriver(settings=replace(PLAIN, preload="history"))
    for t, name in enumerate(("b", "a", "b2", "a2")):
        d.ask(t, name, 10)
        d.at(t, ev.Loaded(TicketId(name), units.Span(0)))
        d.at(t, ev.Released(TicketId(name), "x"))
        d.gone(t, name)
    a, b = ("text", "a"), ("text", "b")
    assert all(d.usage_rates("a")) and set(d.transition_counts) == {a, b}
    text = replace(d.table[0], models=tuple(m for m in d.table[0].models if m.name != "a"))
    d.at(10, ev.CapabilitiesSet((text, d.table[1])))
    d.fire_timer(11)
    assert d.usage_rates("a") == (0, 0) and all(d.usage_rates("b"))
    assert d.transition_counts == {b: {}} and d.last_used() is None


@pytest.mark.spec("B7")
def test_a_status_read_changes_nothing() -> None:
    d = CoreDriver(
        settings=replace(
            PLAIN, timeouts=replace(PLAIN.timeouts, reclaim_overdue=units.Span(10**12))
        )
    )
    d.engines["stranger"] = {CPU: 1}
    d.read(20)
    d.lose_timers()
    d.arbiter.snapshot(units.Span(21 * 10**9))  # type: ignore[arg-type]
    assert d.next_timer() is None


@pytest.mark.spec("C8")
def test_model_pinned_beyond_the_cap_is_a_victim_like_any_other() -> None:
    d = CoreDriver(settings=replace(PLAIN, pinned_most_fraction=0.5))
    for t, name in enumerate("ab"):
        floor(d, t, name, Floor.DEVICE)
        d.resident(t, name, 30)
    told = d.last("pin_over_cap")
    assert told.ticket == "b" and told.data["cap"] == 40 * GIB
    assert [r[0] for r in revoked(d.ask(20, "c", 50))] == ["b"]


@pytest.mark.spec("C8")
@pytest.mark.parametrize("node_is_first", [True, False])
def test_cap_on_pins_holds_for_tickets_of_the_last_epoch(node_is_first: bool) -> None:
    settings = replace(PLAIN, pinned_most_fraction=0.5)
    d = CoreDriver(settings=settings, pinned="a", known=("h", "k"), holders=())
    if not node_is_first:
        d.at(1, ev.NodeLost(NODE))
    d.join(2, "h", d.held("a1", size=30))
    d.join(2, "k", d.held("a2", size=30))
    if not node_is_first:
        d.see_node(3, 80, 0)
    assert [d.ticket(name).pinned for name in ("a1", "a2")] == [True, False]


@pytest.mark.spec("D1")
def test_a_device_floor_set_later_makes_a_resident_no_victim() -> None:
    d = CoreDriver()
    d.resident(1, "a", 50)
    floor(d, 2, "a", Floor.DEVICE)
    assert revoked(d.ask(20, "b", 30, priority=Priority.URGENT)) == []
    assert revoked(d.ask(21, "c", 40, priority=Priority.URGENT)) == []
