"""Engines that take turns share one scratch: one reserve per dispatch lock, and what is seen beyond
it is nobody's and not free (B2)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import DEFAULTS, Arenas
from arbiter.core.tickets import budget
from arbiter.core.types import DeviceKind
from arbiter.units import (
    GIB,
    MIB,
    Bytes,
    seconds,
)
from tests.support.core_driver import CPU, HOST, PLAIN, CoreDriver, gib, is_granted

LOCKED = {"a": 6.0, "b": 10.0, "c": 2.0}  # GiB of scratch under one lock


def table(**scratch: float) -> tuple[types.CapabilitySpec, ...]:
    models = tuple(
        types.ModelSpec(m, seconds(-1), dispatch_lock="torch", shared_scratch_bytes=gib(size))
        for m, size in scratch.items()
    )
    own = (types.ModelSpec("large", seconds(-1)),)
    return (types.CapabilitySpec("text", "text", "fake", models + own, seconds(300)),)


def driver(device: float = 80, **scratch: float) -> CoreDriver:
    made = CoreDriver(device)
    made.at(0, ev.CapabilitiesSet(table(**(scratch or LOCKED))))
    return made


def serve(made: CoreDriver, t: float, name: str, size: float, seen: float) -> None:
    made.resident(t, name, size)
    made.engines[name] = {CPU: seen}


@pytest.mark.spec("B2")
def test_the_pool_is_a_fraction_of_the_arena_or_what_the_largest_scratch_leaves() -> None:
    total, cpu = Bytes(1000), DeviceKind.CPU
    settings = replace(DEFAULTS, arena_fraction=1.0)  # arena 1000, ceiling 900
    assert budget.budget_of(total, cpu, settings, Bytes(100)) == 800
    assert budget.budget_of(total, cpu, replace(settings, pool_fraction=0.5), Bytes(100)) == 500
    assert budget.budget_of(total, cpu, replace(settings, pool_fraction=0.85), Bytes(100)) == 800
    assert budget.budget_of(total, cpu, settings, Bytes(2000)) == 0
    assert budget.budget_of(total, DeviceKind.HOST, settings, Bytes(100)) == 900


@pytest.mark.spec("B2")
def test_one_reserve_as_large_as_the_largest_scratch_serves_all_of_a_lock() -> None:
    made = driver()
    assert made.free() == 70  # not 80 - 6 - 10 - 2
    assert made.free(HOST) == 0
    other = replace(table(d=3)[0].models[0], dispatch_lock="other")
    capability = table(**LOCKED)[0]
    made.at(1, ev.CapabilitiesSet((replace(capability, models=(*capability.models, other)),)))
    assert made.free() == 67  # locks do not exclude one another, so theirs add up
    made.at(2, ev.CapabilitiesSet(table(c=2)))
    assert made.free() == 78


@pytest.mark.spec("B2")
def test_scratch_in_use_is_the_reserves_and_not_the_tickets() -> None:
    made = driver()
    serve(made, 0, "a", 20, seen=26)
    made.read(1)
    assert (made.charged(), made.free()) == (20, 50)
    made.engines["a"] = {CPU: 29}  # beyond its scratch: it holds more than it said
    made.read(2)
    assert (made.charged(), made.free()) == (23, 47)


@pytest.mark.spec("B2")
def test_scratch_kept_when_the_lock_was_given_back_is_not_free() -> None:
    made = driver()
    serve(made, 0, "a", 20, seen=26)
    serve(made, 0, "b", 20, seen=30)
    made.read(1)  # 6 and 10 of scratch at once, where 10 are reserved
    assert made.charged() == 40
    assert made.account().foreign_bytes == 6 * GIB
    made.engines["a"] = {CPU: 20}
    made.read(2)
    assert made.account().foreign_bytes == 0


@pytest.mark.spec("B2")
def test_models_that_share_scratch_fit_where_separate_scratch_would_not() -> None:
    made = driver(80, a=20, b=20, c=20)
    assert is_granted(made.ask(0, "a", 20), "a")
    assert is_granted(made.ask(0, "b", 20), "b")
    assert is_granted(made.ask(0, "c", 20), "c")  # 3 x (20 + 20) would be 120
    apart = CoreDriver(80, settings=PLAIN)
    assert is_granted(apart.ask(0, "a", 40), "a")
    assert is_granted(apart.ask(0, "b", 40), "b")
    assert not is_granted(apart.ask(0, "c", 40), "c")


@pytest.mark.spec("B2")
def test_shared_scratch_is_not_learned_as_the_tickets_own() -> None:
    made = driver()
    serve(made, 0, "a", 20, seen=26)
    made.read(1)
    made.read(2)
    ticket = made.ticket("a")
    assert ticket.last_load.peak_bytes == 20 * GIB


@pytest.mark.spec("B2")
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60)), min_size=1, max_size=3),
    st.lists(st.integers(0, 10), min_size=3, max_size=3),
)
def test_reserve_charge_and_foreign_cover_every_byte_that_is_seen(
    tickets: list[tuple[int, int]], scratch: list[int]
) -> None:
    """Whoever keeps what, nothing that the kernel counts is lent a second time."""
    sizes = dict(zip("abc", map(float, scratch), strict=True))
    made = driver(100, **sizes)
    for name, (size, seen) in zip("abc", tickets, strict=False):
        serve(made, 0, name, size, seen)
    made.read(1)
    book = made.account()
    lent = book.charged_bytes + book.foreign_bytes + max(scratch) * GIB
    assert lent >= sum(max(size, seen) for size, seen in tickets) * GIB
    assert book.free_bytes + book.charged_bytes + book.foreign_bytes == book.budget_bytes


@pytest.mark.spec("B2", "B3")
def test_lendable_takes_arena_then_wiggle_then_on_gpus_the_margin() -> None:
    total = Bytes(80 * GIB)
    arena = int(total * 0.9)
    assert budget.budget_of(total, DeviceKind.CPU, DEFAULTS) == arena - int(arena * 0.1)
    gpu = budget.budget_of(total, DeviceKind.GPU, DEFAULTS)
    assert gpu == arena - int(arena * 0.1) - 512 * MIB


@pytest.mark.spec("B2")
def test_a_cap_lowers_the_arena_and_never_raises_it() -> None:
    capped = replace(DEFAULTS, arenas=Arenas(gpu_bytes=Bytes(1000), cpu_bytes=Bytes(500)))
    assert budget.arena(Bytes(2000), DeviceKind.GPU, capped) == 1000
    assert budget.arena(Bytes(1000), DeviceKind.GPU, capped) == 900
    assert budget.arena(Bytes(1000), DeviceKind.CPU, capped) == 500
    assert budget.arena(Bytes(1000), DeviceKind.HOST, capped) == 900


def test_a_tiny_device_lends_nothing_rather_than_less_than_nothing() -> None:
    assert budget.budget_of(Bytes(100 * MIB), DeviceKind.GPU, DEFAULTS) == 0


@pytest.mark.spec("B2")
def test_pinned_bytes_are_not_lent_on_demand() -> None:
    assert budget.unpinned(Bytes(800), Bytes(300)) == 500
    assert budget.unpinned(Bytes(800), Bytes(900)) == 0
    assert budget.pinned_overcommit(Bytes(800), Bytes(900)) == 100
    assert budget.pinned_overcommit(Bytes(800), Bytes(300)) == 0


@pytest.mark.spec("A16")
@given(foreign=st.integers(0, 2000), cap=st.integers(0, 2000))
def test_foreign_bytes_count_once_they_exceed_what_a_cap_leaves_to_others(
    foreign: int, cap: int
) -> None:
    settings = replace(DEFAULTS, arenas=Arenas(cpu_bytes=Bytes(cap)))
    eats = budget.foreign_in_budget(Bytes(foreign), Bytes(1000), DeviceKind.CPU, settings)
    assert eats == max(0, foreign - max(0, 900 - cap))
