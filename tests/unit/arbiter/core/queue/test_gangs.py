"""All or none: tickets that only make sense together, and tickets over several devices."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter import units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, Refuse
from arbiter.core.queue.gangs import split
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Sizes, State
from arbiter.core.settings import Settings, TenantLimits
from arbiter.core.types import Split
from arbiter.errors import NeverFits, QuotaExceeded, TicketClosed
from arbiter.units import Bytes, HolderId, NodeId, TicketId
from tests.support.core_driver import PLAIN, gib, granted, refusal, revoked
from tests.support.gpu_driver import GPUS, GpuDriver

NORMAL, HIGH = types.Priority.NORMAL, types.Priority.HIGH


def books(*free: int, budget: int = 100) -> list[DeviceAccount]:
    return [
        DeviceAccount(d, NodeId("g"), types.DeviceKind.GPU, Bytes(budget), Bytes(budget), Bytes(f))
        for d, f in zip(GPUS, free, strict=False)
    ]


def parted(where: list[DeviceAccount], need: int, how: Split) -> Sizes | None:
    return split(where, Bytes(need), how, {book.device: book.budget_bytes for book in where})


@pytest.mark.spec("A13", "C6")
def test_incomplete_gang_is_not_counted_as_bypassed() -> None:
    d = GpuDriver(80)
    assert granted(d.want(0, "a", 20, "ab")) == []
    for turn in range(PLAIN.bypass_count):
        assert granted(d.ask(1, f"c{turn}", 1, holder="k")) == [f"c{turn}"]
    assert granted(d.want(2, "b", 20, "ab")) == ["a", "b"]


@pytest.mark.spec("A13", "C6")
def test_gang_that_no_ticket_may_bypass_waits_for_its_last_member() -> None:
    d = GpuDriver(80, settings=replace(PLAIN, bypass_count=0))
    assert granted(d.ask(0, "c", 50, holder="k")) == ["c"]
    assert d.want(1, "a", 20, "ab") == []
    assert granted(d.ask(2, "d", 1, holder="k")) == ["d"]
    assert d.want(3, "b", 20, "ab") == []
    assert d.ask(4, "e", 1, holder="k") == []


@pytest.mark.spec("C6")
def test_ticket_is_not_bypassed_on_a_device_it_could_never_use() -> None:
    d = GpuDriver(80, 20)
    d.want(0, "a", 50)
    assert granted(d.want(1, "large", 60)) == []
    for name in (*"bcde", "small", "text", "vad"):
        assert granted(d.ask(2, name, 2, holder="k")) == [name] and d.home(name) == {"1": 2}
    d.ask(2, "e1", 2, holder="k", capability="embedding", model="e1")
    assert d.home("e1") == {"1": 2}  # eight of them
    d.ask(3, "e2", 10, holder="k", capability="embedding", model="e2")
    assert d.home("e2") == {"0": 10}


@pytest.mark.spec("B5", "B6")
@pytest.mark.parametrize(
    ("how", "most"), [(Split.NONE, 80), (Split.EQUAL, 120), (Split.PROPORTIONAL, 170)]
)
def test_ticket_too_large_for_all_devices_is_told_what_they_lend_to_it(
    how: Split, most: float
) -> None:
    error = refusal(GpuDriver(80, 60, 30).want(0, "a", 171, how=how))
    assert isinstance(error, NeverFits)
    assert (error.need_bytes, error.budget_bytes) == (gib(171), gib(most))


@pytest.mark.spec("A13")
def test_tickets_of_two_holders_are_no_gang() -> None:
    d = GpuDriver(80)
    d.join(0, "l", node="g")
    gang = tuple(map(TicketId, "ab"))
    assert granted(d.want(0, "a", 50, "ab")) == []
    need = types.Need(gib(30))
    other = ev.Requested(TicketId("b"), HolderId("l"), "text", "b", need, "", True, gang=gang)
    assert granted(d.at(1, other)) == [] and d.state_of("a") == d.state_of("b") == "queued"


@pytest.mark.spec("A13")
def test_a_gang_is_granted_in_one_step_when_the_last_has_asked() -> None:
    d = GpuDriver(80)
    assert granted(d.want(0, "a", 50, "ab")) == []
    assert granted(d.want(1, "b", 30, "ab")) == ["a", "b"]


@pytest.mark.spec("A13")
def test_gang_member_whose_partner_does_not_ask_within_30_s_is_refused() -> None:
    """After a restart of the arbiter the partner may be loaded already, and never ask again."""
    d = GpuDriver(80)
    assert d.want(0, "a", 50, "ab") == []
    assert d.fire_timer(29.9) == []
    assert isinstance(refusal(d.fire_timer(30)), TicketClosed)


@pytest.mark.spec("A13")
def test_gang_is_not_granted_while_one_member_has_no_room() -> None:
    d = GpuDriver(80)
    d.want(0, "c", 20)
    d.done(0, "c")
    d.beat(0.5, "c", holder="k", inflight=1)
    d.want(0.6, "a", 50, "ab")
    assert granted(d.want(0.7, "b", 30, "ab")) == []
    assert d.state_of("a") == d.state_of("b") == "queued"
    d.at(2, ev.Released(TicketId("c"), "x"))
    assert granted(d.at(3, ev.EngineGone(NodeId("g"), TicketId("c"), True))) == ["a", "b"]


@pytest.mark.spec("A13")
def test_gang_that_would_still_not_fit_evicts_nothing() -> None:
    d = GpuDriver(80, 80)
    for name, size in (("c", 60), ("d", 60)):
        d.want(0, name, size)
        d.done(0, name)
    d.pin("d")
    d.want(20, "a", 70, "ab")
    assert revoked(d.want(20, "b", 70, "ab")) == []
    assert isinstance(d.answer("a"), NeverFits)


@pytest.mark.spec("A13")
def test_room_is_made_for_the_whole_gang_over_devices() -> None:
    d = GpuDriver(80, 80)
    for name in ("c", "d"):
        d.want(0, name, 60)
        d.done(0, name)
    d.want(20, "a", 70, "ab")
    assert sorted(r[0] for r in revoked(d.want(20, "b", 70, "ab"))) == ["c", "d"]


@pytest.mark.spec("A13")
def test_incomplete_gang_lets_other_tickets_pass() -> None:
    d = GpuDriver(80)
    d.want(0, "a", 50, "ab")
    assert granted(d.want(1, "c", 60)) == ["c"]


@pytest.mark.spec("A13", "A8")
def test_gang_member_that_withdraws_ends_the_wait_of_the_others() -> None:
    d = GpuDriver(80)
    d.want(0, "a", 50, "ab")
    error = refusal(d.at(1, ev.Withdrawn(TicketId("b"))))
    assert isinstance(error, TicketClosed) and d.state_of("a") == "closed"


@pytest.mark.spec("A13")
def test_refusal_of_a_gang_member_ends_the_wait_of_the_others_at_once() -> None:
    d = GpuDriver(80)
    assert d.want(0, "a", 20, "az") == []
    answers = [e for e in d.want(1, "z", 20, "az") if isinstance(e, Refuse)]
    assert [e.ticket for e in answers] == ["z", "a"]  # no model is called z


@pytest.mark.spec("A13", "B5")
def test_a_model_larger_than_any_device_is_split_and_the_parts_are_on_its_ticket() -> None:
    d = GpuDriver(80, 80, 60)
    assert granted(d.want(0, "a", 120, how=Split.EQUAL)) == ["a"]
    assert d.home("a") == {"0": 60, "1": 60}
    charged = [b.charged_bytes for b in d.accounts().values() if b.charged_bytes]
    assert charged == [gib(60), gib(60)]


@pytest.mark.spec("A13", "B5")
def test_a_split_waits_for_all_of_its_devices() -> None:
    d = GpuDriver(80, 80)
    d.want(0, "c", 60)
    d.done(0, "c")
    assert revoked(d.want(20, "a", 120, how=Split.EQUAL)) == [("c", "swap", "gone")]
    d.at(21, ev.Released(TicketId("c"), "x"))
    assert granted(d.at(22, ev.EngineGone(NodeId("g"), TicketId("c"), True))) == ["a"]


@pytest.mark.spec("B6")
def test_model_larger_than_all_devices_together_never_fits() -> None:
    d = GpuDriver(80, 80)
    assert isinstance(refusal(d.want(0, "a", 170, how=Split.EQUAL)), NeverFits)
    assert isinstance(refusal(d.want(0, "b", 120)), NeverFits)  # it cannot be split


@pytest.mark.spec("B5")
@given(
    free=st.lists(st.integers(0, 100), min_size=2, max_size=4), need=st.integers(1, 500)
)  # fmt: skip
def test_parts_of_a_split_add_up_and_fit(free: list[int], need: int) -> None:
    for how in (Split.EQUAL, Split.PROPORTIONAL):
        parts = parted(books(*free), need, how)
        if parts is None:
            assert need > 100 * (len(free) if how is Split.PROPORTIONAL else 2)
            continue
        whole = sum(parts.values())
        assert whole == need if how is Split.PROPORTIONAL else need <= whole < need + len(parts)
        assert all(0 < part <= 100 for part in parts.values())


@pytest.mark.spec("B5")
def test_proportional_split_follows_the_free_bytes() -> None:
    assert parted(books(90, 30), 100, Split.PROPORTIONAL) == {GPUS[0]: 75, GPUS[1]: 25}
    assert parted(books(10, 10), 100, Split.PROPORTIONAL) == {GPUS[0]: 50, GPUS[1]: 50}


def asleep_over_two(settings: Settings = PLAIN) -> GpuDriver:
    """A model of 100 over two GPUs of 80."""
    d = GpuDriver(80, 80, settings=settings)
    assert granted(d.want(0, "a", 100, how=Split.EQUAL)) == ["a"]
    d.done(0, "a")
    ticket = d.ticket("a")
    d.move(ticket, State.DRAINING, d.now)
    d.move(ticket, State.ASLEEP, d.now, granted={})
    return d


@pytest.mark.spec("A13", "A9")
def test_wake_without_room_on_another_device_evicts_nothing() -> None:
    d = asleep_over_two()
    for t, (name, priority) in enumerate((("c", NORMAL), ("d", HIGH)), start=1):
        d.ask(t, name, 60, holder="k", priority=priority)
        d.done(t, name)
    assert (d.home("c"), d.home("d")) == ({"0": 60}, {"1": 60})
    assert revoked(d.want(30, "a", 100, how=Split.EQUAL)) == []
    d.at(31, ev.Released(TicketId("d"), "x"))
    d.at(32, ev.EngineGone(NodeId("g"), TicketId("d"), True))
    assert d.state_of("c") == "draining"


@pytest.mark.spec("A13", "K3")
def test_explain_of_a_wake_over_two_devices_gives_what_each_of_them_lacks() -> None:
    d = asleep_over_two()
    for t, (name, priority) in enumerate((("c", NORMAL), ("d", HIGH)), start=1):
        d.ask(t, name, 60, holder="k", priority=priority)
        d.done(t, name)
    d.want(30, "a", 100, how=Split.EQUAL)
    explanation = d.arbiter.explain(TicketId("a"), d.now)
    assert [(x.need_bytes, x.short_bytes) for x in explanation.shortages] == [
        (gib(50), gib(30))
    ] * 2
    assert explanation.sentences[2:] == (
        "Tickets that may leave hold 60.0 GiB: c.",
        "On g/gpu:1 it needs 50.0 GiB, 20.0 GiB are free, 0.0 MiB on their way back: "
        "30.0 GiB short.",
        "d (d) holds 60.0 GiB and stays: it is more urgent (high before normal).",
        "It wakes on 2 devices: no ticket leaves before all of them can have room.",
    )


@pytest.mark.spec("A13", "C3")
def test_victim_over_several_devices_counts_on_each() -> None:
    d = GpuDriver(80, 80)
    d.want(0, "c", 100, how=Split.EQUAL)
    d.done(0, "c")
    for name in "ed":
        d.want(1, name, 20)
        d.done(1, name)
    d.at(2, ev.Released(TicketId("e"), "x"))
    d.at(3, ev.EngineGone(NodeId("g"), TicketId("e"), True))
    assert d.home("d") == {"1": 20}  # beside 50 of `c`
    d.want(40, "a", 25, "ab")
    assert revoked(d.want(40, "b", 75, "ab")) == [("c", "swap", "gone")]


# -- beside a device that is shut -----------------------------------------------------------------


def shut(d: GpuDriver, t: float, number: int) -> None:
    d.at(t, ev.PressurePushed(GPUS[number], types.Level.CRITICAL, gib(1), units.Span(60 * 10**9)))


def embed(
    d: GpuDriver,
    t: float,
    name: str,
    size: float,
    gang: tuple[str, ...] = (),
    how: Split = Split.NONE,
) -> list[Decision]:
    return d.at(t, ev.Requested(
        TicketId(name), HolderId("k"), "embedding", name, types.Need(gib(size)), "", True,
        gang=tuple(map(TicketId, gang)), split=how,
    ))  # fmt: skip


@pytest.mark.spec("A13", "C5")
def test_a_gang_goes_where_a_device_is_open_though_another_would_fit_better() -> None:
    d = GpuDriver(80, 100)
    shut(d, 1, 0)
    embed(d, 2, "e1", 20, ("e1", "e2"))
    assert granted(embed(d, 2, "e2", 20, ("e1", "e2"))) == ["e1", "e2"]
    assert d.home("e1") == d.home("e2") == {"1": 20}


@pytest.mark.spec("B5", "C5")
def test_a_split_is_over_devices_that_are_open() -> None:
    d = GpuDriver(80, 80, 80)
    shut(d, 1, 0)
    assert granted(embed(d, 2, "e1", 100, how=Split.EQUAL)) == ["e1"]
    assert d.home("e1") == {"1": 50, "2": 50}


# -- beside what a tenant has reserved ------------------------------------------------------------


def kept(*sizes: float, reserved: float) -> GpuDriver:
    """A node of GPUs on each of which so much is kept for somebody else."""
    terms = (TenantLimits("x", reserved_bytes=gib(reserved)),)
    return GpuDriver(*sizes, settings=replace(PLAIN, tenants=terms))


@pytest.mark.spec("C10", "B5")
@pytest.mark.parametrize("how", [Split.EQUAL, Split.PROPORTIONAL])
def test_a_split_model_may_have_what_a_reserve_leaves_of_all_its_devices(how: Split) -> None:
    d = kept(80, 80, reserved=1)
    assert granted(d.want(0, "a", 100, how=how)) == ["a"]
    error = refusal(d.want(1, "b", 159, how=how))
    assert error == QuotaExceeded("default", 0, gib(159), gib(158), "bytes")


@pytest.mark.spec("C10", "B5")
def test_model_that_a_reserve_keeps_from_one_device_is_split() -> None:
    d = kept(80, 80, reserved=30)
    assert granted(d.want(0, "a", 60, how=Split.EQUAL)) == ["a"]
    assert d.home("a") == {"0": 30, "1": 30}
    assert isinstance(refusal(d.want(1, "b", 60)), QuotaExceeded)  # it cannot be split


@pytest.mark.spec("C10", "B5")
def test_no_part_of_a_split_is_larger_than_a_reserve_leaves_of_its_device() -> None:
    d = kept(80, 80, reserved=30)
    d.want(0, "c", 50)
    d.done(0, "c")
    assert d.home("c") == {"0": 50}
    assert revoked(d.want(20, "a", 90, how=Split.PROPORTIONAL)) == [("c", "swap", "gone")]
    d.at(21, ev.Released(TicketId("c"), "x"))
    assert granted(d.at(22, ev.EngineGone(NodeId("g"), TicketId("c"), True))) == ["a"]
    assert d.home("a") == {"0": 45, "1": 45}


@pytest.mark.spec("C10", "A13")
def test_a_gang_over_devices_may_have_what_a_reserve_leaves_of_each() -> None:
    d = kept(80, 80, reserved=1)
    d.want(0, "a", 50, "ab")
    assert sorted(granted(d.want(0, "b", 60, "ab"))) == ["a", "b"]


@pytest.mark.spec("C10", "A13")
def test_a_gang_that_only_a_reserve_keeps_out_is_refused_with_what_it_leaves() -> None:
    d = kept(80, 80, reserved=30)
    for name in "ab":
        d.want(0, name, 30, "abc")
    said = d.want(0, "c", 30, "abc")
    errors = [r.error for r in said if isinstance(r, Refuse)]
    assert errors == [QuotaExceeded("default", 0, gib(90), gib(100), "bytes")] * 3


@pytest.mark.spec("C10", "A13")
def test_model_asleep_over_two_devices_wakes_beside_a_reserve() -> None:
    terms = (TenantLimits("x", reserved_bytes=gib(1)),)
    d = asleep_over_two(replace(PLAIN, tenants=terms))
    assert granted(d.want(1, "a", 100, how=Split.EQUAL)) == ["a"]


@pytest.mark.spec("C10")
def test_unread_device_defers_the_refusal_of_a_large_model() -> None:
    d = kept(80, 20, reserved=1)
    d.see_only(1, 1)
    assert d.want(2, "a", 50) == []
    assert d.state_of("a") == "queued"
    assert granted(d.see_only(3, 0, 1)) == ["a"]
