"""The replay world against the real core: small demands whose cost can be said beforehand."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.replay.demand import Demand, PackedRequests, Seat, Use
from arbiter.replay.score import Score
from arbiter.replay.world import World
from arbiter.units import GIB, DeviceId, NodeId, seconds
from benchmarks.replay import mixes, traces
from benchmarks.replay.table import SETTINGS
from policies import EVICT, bundle
from tests.support.core_driver import capability, gib, s

NODE = NodeId("n")
LOAD_S, WAKE_S = 4.0, 1.0


def demand(
    *uses: tuple[float, str], budget: float = 10, host: float = 0, busy_s: float = 0.5
) -> Demand:
    """Models a, b, c of 5 GiB each on one device; uses in seconds."""
    names = ("a", "b", "c")
    need = types.Need(gib(5), host_bytes=gib(5 if host else 0))
    seats = tuple(
        Seat(
            "text", name, NODE, need, seconds(LOAD_S), wake=seconds(WAKE_S), sleep=seconds(0.5),
            unload=seconds(0.5),
        )
        for name in names
    )  # fmt: skip
    specs = (
        types.DeviceSpec(DeviceId("n/gpu:0"), types.DeviceKind.GPU, gib(budget)),
        types.DeviceSpec(DeviceId("n/host"), types.DeviceKind.HOST, gib(host)),
    )
    table = ev.CapabilitiesSet((capability("text", "text", names),))
    asked = PackedRequests(Use(s(at), names.index(name), seconds(busy_s)) for at, name in uses)
    return Demand((ev.NodeSeen(NODE, specs),), table, seats, asked)


def score(asked: Demand, evict: str = "priority_lru") -> Score:
    chosen = replace(SETTINGS, evict=evict)
    return World(asked, chosen, bundle(chosen)).run()


def test_models_that_fit_are_loaded_once_and_later_requests_do_not_wait() -> None:
    result = score(demand((0, "a"), (1, "b"), (20, "a"), (30, "b")))
    assert (result.requests_count, result.missed_count, result.loads_count) == (4, 2, 2)
    assert result.waited == seconds(2 * LOAD_S)
    assert (result.evictions_count, result.moved_bytes) == (0, 10 * GIB)


def test_requests_during_a_load_share_it_and_wait_for_its_rest() -> None:
    result = score(demand((0, "a"), (1, "a"), (3, "a")))
    assert (result.missed_count, result.loads_count) == (3, 1)
    assert result.waited == seconds(4 + 3 + 1)


def test_least_recently_used_makes_room_and_the_asker_waits_for_it_to_leave() -> None:
    result = score(demand((0, "a"), (20, "b"), (40, "c"), (60, "a")))
    assert (result.loads_count, result.evictions_count) == (4, 2)
    assert result.waited == seconds(4 * LOAD_S + 2 * 0.5)


def test_belady_keeps_the_model_that_is_used_next() -> None:
    asked = demand((0, "a"), (20, "b"), (40, "c"), (60, "a"))
    assert score(asked, "belady").loads_count == 3


def test_a_model_in_use_is_not_taken_and_the_other_goes() -> None:
    long = demand((0, "a"), (5, "b"), (20, "c"), (25, "a"), busy_s=0.5)
    busy = replace(long, uses=PackedRequests([Use(s(0), 0, seconds(60)), *_uses(long)[1:]]))
    result = score(busy)
    assert result.loads_count == 3  # c takes the place of b, though a was asked for earlier


def _uses(asked: Demand) -> list[Use]:
    return [Use(at, position, busy) for at, position, busy in asked.uses]


def test_victim_sleeps_in_host_ram_and_comes_back_in_the_time_of_a_wake() -> None:
    result = score(demand((0, "a"), (20, "b"), (40, "c"), (60, "a"), host=20))
    assert (result.loads_count, result.wakes_count) == (3, 1)
    assert result.waited == seconds(3 * LOAD_S + WAKE_S + 2 * 0.5)


@pytest.mark.spec("C13")
def test_a_device_that_loads_too_much_keeps_its_models_longer() -> None:
    uses = [(6 * n, "ab"[n % 2]) for n in range(200)]
    bound, unbound = SETTINGS, replace(SETTINGS, loading_most_fraction=1.0)
    asked = demand(*uses, budget=5)
    few, many = (World(asked, how, bundle(how)).run() for how in (bound, unbound))
    assert few.loads_count < many.loads_count


def test_only_requests_after_the_counted_instant_are_scored() -> None:
    asked = demand((0, "a"), (20, "a"), (30, "a"))
    result = World(asked, SETTINGS, bundle(SETTINGS), s(15)).run()
    assert (result.requests_count, result.missed_count, result.loads_count) == (2, 0, 0)


def test_p99_wait_counts_requests_that_did_not_wait() -> None:
    few = demand((0, "a"), *((10 + n / 100, "a") for n in range(199)))
    many = demand(
        (0, "a"), *((n / 100, "a") for n in range(1, 4)), *((20 + n, "a") for n in range(9))
    )
    assert score(few).waited_p99 == 0
    assert score(many).waited_p99 == seconds(LOAD_S)


@pytest.mark.spec("C3", "N4")
@pytest.mark.parametrize("evict", EVICT)
def test_every_policy_serves_every_request_of_a_synthetic_trace(evict: str) -> None:
    asked = mixes.demand(traces.synthetic(600, seed=3), mixes.SERVER, 0.3, seed=3)
    result = score(asked, evict)
    assert result.refused_count == 0
    assert result.requests_count == len(asked.uses) > 400
    assert result.loads_count >= len(asked.seats)
    assert result == score(asked, evict)  # the same question, the same answer


# -- traces ---------------------------------------------------------------------------------------
