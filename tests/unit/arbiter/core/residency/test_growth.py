"""A resident that wants more: idle models make room, and nobody waits for who waits himself."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, Grant
from arbiter.core.settings import TenantLimits
from arbiter.errors import GrowthRefused, NeverFits, TicketClosed
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import CPU, PLAIN, CoreDriver, gib, granted, refusal, revoked, s
from tests.support.gpu_core_driver import GPU, OTHER, GpuCoreDriver

pytestmark = pytest.mark.spec("A14")


def grow(d: CoreDriver, t: float, name: str, more: float, within_s: float = 30) -> list[Decision]:
    return d.at(t, ev.GrowthAsked(TicketId(name), gib(more), seconds(within_s)))


def driver() -> CoreDriver:
    """Two holders with a model of 30 each, both in use, and 20 free."""
    d = CoreDriver(holders=("h", "k"))
    d.resident(0, "a", 30)
    d.resident(0, "b", 30, holder="k")
    d.beat(1, "a", inflight=1)
    d.beat(1, "b", holder="k", inflight=1)
    return d


def test_resident_grows_where_there_is_room_and_the_grant_gives_its_new_size() -> None:
    d = driver()
    [grant] = grow(d, 2, "a", 15)
    assert isinstance(grant, Grant) and grant.devices == (types.DeviceBytes(CPU, gib(45)),)
    assert d.free() == 5 and d.state_of("a") == "resident"


def test_idle_models_are_evicted_for_growth() -> None:
    d = driver()
    d.resident(2, "c", 15)
    assert revoked(grow(d, 10, "a", 15)) == [("c", "swap", "gone")]
    d.at(11, ev.Released(TicketId("c"), "swap"))
    assert granted(d.gone(12, "c")) == ["a"] and d.charged() == 75


def test_bytes_on_their_way_to_a_growing_resident_are_not_lent_to_the_queue() -> None:
    d = CoreDriver(holders=("h", "k"))
    d.resident(0, "a", 30)
    d.beat(1, "a", inflight=1)
    for name in ("b", "c"):
        d.resident(1, name, 20, holder="k")
    assert len(revoked(grow(d, 20, "a", 40))) == 2
    assert d.ask(21, "d", 25, priority=types.Priority.BATCH) == []
    for name in ("b", "c"):
        d.at(22, ev.Released(TicketId(name), "swap"))
    assert granted(d.gone(23, "b")) == []
    assert granted(d.gone(24, "c")) == ["a"] and d.charged() == 70


def test_bytes_on_their_way_to_a_growing_resident_are_not_granted_to_a_later_asker() -> None:
    d = CoreDriver(holders=("h", "k", "l"))
    for name, holder in (("a", "h"), ("b", "k"), ("c", "l")):
        d.resident(0, name, 20, holder=holder)
    d.beat(1, "a", inflight=1)
    d.beat(1, "b", holder="k", inflight=1)
    assert revoked(grow(d, 20, "a", 35)) == [("c", "swap", "gone")]
    assert grow(d, 21, "b", 15) == []
    d.at(22, ev.Released(TicketId("c"), "swap"))
    assert granted(d.gone(23, "c")) == ["a"] and d.free() == 5


def waits_to_grow() -> CoreDriver:
    """Two models of 30 of 80 in use, of which `a` waits for 25 more until 30, and `b` is urgent."""
    d = CoreDriver(holders=("h", "k"))
    d.resident(0, "a", 30)
    d.resident(0, "b", 30, holder="k", priority=types.Priority.URGENT)
    d.beat(1, "a", inflight=1)
    d.beat(1, "b", holder="k", inflight=1)
    assert grow(d, 20, "a", 25, within_s=10) == []
    return d


@pytest.mark.spec("C2")
@pytest.mark.parametrize("inflight", [0, 1])
def test_a_resident_that_waits_for_growth_leaves_for_more_urgent_tickets_only(
    inflight: int,
) -> None:
    d = waits_to_grow()
    d.beat(21, "a", inflight=inflight)
    assert d.ask(22, "c", 35) == []
    sentences = d.arbiter.explain(TicketId("c"), d.now).sentences
    assert any("it waits for more memory itself, for another 8.0 s at most" in x for x in sentences)
    asked = d.ask(23, "d", 35, priority=types.Priority.HIGH)
    assert revoked(asked) == [("a", "swap", "gone")]


@pytest.mark.spec("C2")
@pytest.mark.parametrize("how", ["not granted", "not wanted"])
def test_a_resident_that_waits_for_growth_no_more_may_leave_at_once(how: str) -> None:
    d = waits_to_grow()
    assert d.ask(22, "c", 35) == []
    ended = d.fire_timer(30) if how == "not granted" else grow(d, 23, "a", 0)
    assert revoked(ended) == [("a", "swap", "gone")] and not d.growing()


def test_growth_without_room_in_time_is_refused_and_the_resident_goes_on() -> None:
    d = driver()
    assert grow(d, 2, "a", 25, within_s=10) == []
    error = refusal(d.fire_timer(12))
    assert isinstance(error, GrowthRefused) and "in time" in str(error)
    assert d.state_of("a") == "resident" and d.charged() == 60


def test_growth_never_waits_on_a_holder_that_waits_for_growth_itself() -> None:
    d = driver()
    assert grow(d, 2, "a", 25) == []
    error = refusal(grow(d, 3, "b", 25))
    assert isinstance(error, GrowthRefused) and "waits as well" in str(error)
    assert d.state_of("b") == "resident"
    assert revoked(d.beat(4, "b", holder="k")) == [("b", "swap", "gone")]


def test_growth_beyond_the_budget_is_refused_at_once() -> None:
    assert isinstance(refusal(grow(driver(), 2, "a", 51)), NeverFits)


def test_bytes_given_back_are_free_once_no_longer_measured() -> None:
    d = driver()
    d.engines["a"] = {CPU: 30}
    d.read(2)
    give_back(d, 3, "a", 20)
    assert d.charged() == 60
    d.engines["a"] = {CPU: 20}
    d.read(4)
    assert d.charged() == 50


def test_growth_counts_bytes_the_engine_already_took() -> None:
    d = driver()
    d.engines["a"] = {CPU: 45}
    d.read(2)
    assert d.free() == 5
    assert granted(grow(d, 3, "a", 20)) == ["a"] and d.free() == 0


def test_revoked_resident_grows_no_more() -> None:
    d = driver()
    grow(d, 2, "a", 25)
    d.at(3, ev.UnloadAsked(TicketId("a")))  # in use: it stays
    d.beat(4, "a")
    d.at(5, ev.UnloadAsked(TicketId("a")))
    assert d.state_of("a") == "draining"
    assert not d.growing()


@pytest.mark.spec("A17")
def test_bytes_held_while_grown_are_not_expected_of_the_next_load() -> None:
    d = CoreDriver()
    d.resident(0, "a", 30, explicit=False)
    grow(d, 1, "a", 15)
    d.engines["a"] = {CPU: 45}
    for t in (2, 3, 4):
        d.read(t)
    give_back(d, 5, "a", 30)
    d.engines["a"] = {CPU: 29}
    for t in (6, 7):
        d.read(t)
    assert d.estimates.proven(types.ModelName("text", "a")) == gib(29)
    d.at(8, ev.Released(TicketId("a"), "x"))
    d.gone(8, "a")
    [grant] = d.ask(9, "a2", 30, explicit=False, model="a")
    assert isinstance(grant, Grant) and grant.devices[0].size_bytes == gib(29)


def test_growth_that_would_still_not_fit_evicts_nothing() -> None:
    d = driver()
    d.resident(2, "c", 15)
    assert grow(d, 10, "a", 45) == []  # `b` is in use, and may fall idle yet
    assert d.state_of("c") == "resident"


def took_beyond_its_grant() -> CoreDriver:
    """`a` was granted 20 and holds 35; `b` and `c` have 14 each, and 17 are free."""
    d = CoreDriver(holders=("h", "k"))
    d.resident(0, "a", 20)
    for name in "bc":
        d.resident(0, name, 14, holder="k")
    d.engines |= {"a": {CPU: 35}, "b": {CPU: 14}, "c": {CPU: 14}}
    d.read(1)
    assert d.free() == 17
    return d


def test_growth_evicts_nothing_for_what_the_resident_took_already() -> None:
    assert len(revoked(grow(took_beyond_its_grant(), 10, "a", 45))) == 1


def test_growth_waits_for_what_suffices_with_what_the_resident_took_already() -> None:
    assert len(revoked(grow(took_beyond_its_grant(), 10, "a", 55))) == 2


@pytest.mark.spec("A13")
def test_growth_on_two_devices_evicts_on_both_or_on_neither() -> None:
    d = GpuCoreDriver(device=40, holders=("h", "k", "l"))
    need = types.Need(gib(60))
    d.at(0, ev.Requested(TicketId("a"), HolderId("h"), "text", "a", need, split=types.Split.EQUAL))
    d.at(0, ev.Loaded(TicketId("a"), seconds(0)))
    d.resident(0, "b", 8, holder="k")
    d.resident(0, "c", 8, holder="l")
    assert (d.device_of("b"), d.device_of("c")) == (GPU, OTHER)
    d.beat(1, "c", holder="l", inflight=1)
    assert revoked(grow(d, 10, "a", 10)) == []
    freed = revoked(d.beat(11, "c", holder="l", inflight=0))
    assert freed == [("b", "swap", "gone"), ("c", "swap", "gone")]


def test_growth_of_a_resident_whose_engine_ends_is_refused() -> None:
    d = driver()
    assert grow(d, 2, "a", 25) == []
    assert isinstance(refusal(d.gone(3, "a")), TicketClosed)


def test_withdrawn_growth_is_granted_nothing() -> None:
    d = driver()
    assert grow(d, 2, "a", 25) == []
    assert grow(d, 3, "a", 0) == []
    d.at(4, ev.Released(TicketId("b"), "x"))
    assert granted(d.gone(5, "b")) == [] and d.charged() == 30


@pytest.mark.spec("C2")
def test_growth_evicts_no_more_urgent_model() -> None:
    d = driver()
    d.resident(2, "c", 15, priority=types.Priority.HIGH)
    assert revoked(grow(d, 10, "a", 15)) == [] and d.state_of("c") == "resident"


def test_growth_that_only_pinned_models_could_make_room_for_is_refused() -> None:
    d = CoreDriver(pinned="b")
    d.resident(0, "a", 30)
    d.resident(0, "b", 40)
    assert isinstance(refusal(grow(d, 2, "a", 11)), NeverFits)
    assert granted(grow(d, 3, "b", 10)) == ["b"]  # its own bytes are not in its way


def test_pinned_resident_waiting_for_growth_makes_no_room_for_another() -> None:
    d = CoreDriver(pinned="b", holders=("h", "k", "l"))
    d.resident(0, "a", 20)
    d.resident(0, "b", 20, holder="k")
    d.resident(0, "c", 30, holder="l")
    d.beat(1, "a", inflight=1)
    d.beat(1, "c", holder="l", inflight=1)
    assert grow(d, 2, "c", 20) == []  # `a` may fall idle yet
    error = refusal(grow(d, 3, "a", 15))
    assert isinstance(error, GrowthRefused) and "waits as well" in str(error)


@pytest.mark.spec("C10")
def test_growth_takes_no_bytes_reserved_for_another_tenant() -> None:
    kept = TenantLimits("x", reserved_bytes=gib(10))
    d = CoreDriver(settings=replace(PLAIN, tenants=(kept,)))
    d.resident(0, "a", 60)
    assert granted(grow(d, 1, "a", 15)) == [] and d.charged() == 60
    assert granted(grow(d, 2, "a", 10)) == ["a"]


@pytest.mark.spec("C10")
def test_what_a_resident_took_already_counts_once_against_the_most_of_its_tenant() -> None:
    bound = TenantLimits("x", most_bytes=gib(40))
    d = CoreDriver(settings=replace(PLAIN, tenants=(bound,)))
    d.resident(0, "a", 20, tenant="x")
    d.engines["a"] = {CPU: 35}
    d.read(1)
    assert granted(grow(d, 2, "a", 20)) == ["a"] and d.charged() == 40
    assert isinstance(refusal(grow(d, 3, "a", 1)), GrowthRefused)


def growth_beyond_the_most_of_its_tenant() -> CoreDriver:
    """`a` waits for 25 GiB more; with `c`, which came meanwhile, its tenant would have 55 of 50."""
    bound = TenantLimits("x", most_bytes=gib(50))
    d = CoreDriver(settings=replace(PLAIN, tenants=(bound,)), holders=("h", "k"))
    d.resident(0, "a", 20, tenant="x")
    d.resident(0, "b", 40, holder="k")
    d.beat(1, "b", holder="k", inflight=1)
    assert grow(d, 10, "a", 25) == []
    d.resident(11, "c", 10, tenant="x")
    return d


@pytest.mark.spec("C10")
def test_nothing_leaves_for_growth_beyond_the_most_of_its_tenant() -> None:
    d = growth_beyond_the_most_of_its_tenant()
    assert revoked(d.beat(12, holder="k", inflight=0)) == [] and d.ticket("b").inflight == 1
    assert revoked(d.beat(13, "b", holder="k")) == [] and d.ticket("b").inflight == 0
    d.at(14, ev.Released(TicketId("c"), "x"))
    assert revoked(d.gone(14, "c")) == [("b", "swap", "gone")]


@pytest.mark.spec("C10")
def test_nothing_is_kept_free_for_growth_beyond_the_most_of_its_tenant() -> None:
    d = growth_beyond_the_most_of_its_tenant()
    d.at(12, ev.Released(TicketId("b"), "x"))
    d.gone(12, "b")
    assert granted(d.ask(13, "d", 45, holder="k")) == ["d"]


# -- when nothing is lent -------------------------------------------------------------------------


def test_growth_after_a_restart_waits_for_all_known_holders() -> None:
    d = CoreDriver(known=("h", "k"), holders=())
    d.join(0, "h", d.held("a", types.Phase.RESIDENT, size=30))
    assert grow(d, 1, "a", 15) == []  # `k` may have more than the rest of it
    assert granted(d.join(2, "k", d.held("b", types.Phase.RESIDENT, size=20))) == ["a"]


def test_growth_waits_on_an_unread_device_or_an_unclaimed_engine() -> None:
    d = CoreDriver(holders=(), read=False)
    d.join(0, "h", d.held("a", types.Phase.RESIDENT, size=30))
    assert grow(d, 1, "a", 15) == []
    d.engines["stranger"] = {CPU: 10}
    assert granted(d.read(2)) == []
    del d.engines["stranger"]
    assert granted(d.read(3)) == ["a"]


def test_growth_is_looked_at_again_once_the_claim_to_an_unclaimed_engine_is_over() -> None:
    d = CoreDriver(holders=(), read=False)
    d.join(0, "h", d.held("a", types.Phase.RESIDENT, size=30))
    grow(d, 1, "a", 15)
    d.engines["stranger"] = {CPU: 10}
    d.read(2)
    assert granted(d.read(6)) == []
    assert d.timers == [
        s(7)
    ]  # five seconds after it was first seen; growth itself may wait until 31
    assert granted(d.fire_timer(7)) == ["a"]


@pytest.mark.spec("C5")
def test_growth_under_pressure_is_granted_to_text_only() -> None:
    d = CoreDriver()
    d.resident(0, "e1", 20, capability="embedding", model="e1")
    d.resident(0, "a", 20)
    d.beat(1, "e1", "a", inflight=1)
    d.at(2, ev.PressurePushed("n", types.Level.CRITICAL, None, seconds(20)))
    assert granted(grow(d, 3, "e1", 10)) == []
    assert granted(grow(d, 4, "a", 10)) == ["a"]
    assert granted(d.fire_timer(22)) == ["e1"]


# -- giving back, over a wire that repeats, delays and loses ---------------------------------------


def grown() -> CoreDriver:
    """`a` has 45, 15 of them by growth."""
    d = driver()
    assert granted(grow(d, 2, "a", 15)) == ["a"] and d.charged() == 75
    return d


def give_back(d: CoreDriver, t: float, name: str, size: float) -> None:
    d.sizes[name] = size  # and its heartbeats say so
    d.at(t, ev.GaveBack(TicketId(name), (types.DeviceBytes(CPU, gib(size)),)))


def says(d: CoreDriver, t: float, size: float) -> None:
    d.sizes["a"] = size
    d.beat(t, "a")


def test_repeated_give_back_is_applied_once() -> None:
    d = grown()
    give_back(d, 10, "a", 30)
    assert d.charged() == 60
    give_back(d, 11, "a", 30)
    assert d.charged() == 60 and d.kinds().count("growth_given_back") == 1


def test_lost_give_back_is_recovered_from_heartbeats() -> None:
    d = grown()
    for t in (10, 12, 14):
        says(d, t, 30)
    assert d.charged() == 75  # the grant might still be on its way to it
    says(d, 15, 30)
    assert d.charged() == 60
    says(d, 16, 30)
    assert d.charged() == 60 and d.kinds().count("growth_given_back") == 1


def test_lost_growth_grant_is_taken_back() -> None:
    d = grown()
    for t in (3, 5, 8):
        says(d, t, 30)
    assert d.charged() == 60


def test_heartbeats_from_before_the_grant_take_nothing_back() -> None:
    d = grown()
    says(d, 3, 30)
    says(d, 4, 45)
    for t in (5, 9):
        says(d, t, 30)
    assert d.charged() == 75


def test_give_back_from_before_new_growth_is_stale() -> None:
    d = grown()
    give_back(d, 10, "a", 30)
    assert granted(grow(d, 20, "a", 15)) == ["a"]
    d.at(21, ev.GaveBack(TicketId("a"), (types.DeviceBytes(CPU, gib(30)),)))
    assert d.charged() == 75 and d.arbiter.stale_count == 1


def test_give_back_after_an_arbiter_restart_is_applied() -> None:
    d = CoreDriver(holders=())
    d.join(0, "h", d.held("a", types.Phase.RESIDENT, size=45))
    for t in (1, 6):
        says(d, t, 30)
    assert d.charged() == 30


def test_holder_cannot_raise_its_charge_by_reporting_more() -> None:
    d = grown()
    give_back(d, 10, "a", 60)
    for t in (11, 20):
        says(d, t, 60)
    assert d.charged() == 75
