"""Replica counts between what the arbiter wants and what requests ask for."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from arbiter.client import admin
from deployments import scaling
from deployments.scaling import (
    AGAIN_S,
    DEFAULT_TO_ZERO_S,
    FEWER_AFTER_S,
    STARTS_WITHIN_S,
    ArbiterPolicy,
)

TARGET = SimpleNamespace(target_ongoing_requests=2.0)


@dataclass
class Context:
    total_num_requests: float = 0.0
    current_num_replicas: int = 0
    deployment_name: str = "chat"
    capacity_adjusted_max_replicas: int = 4
    config: Any = field(default_factory=lambda: TARGET)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def policy(wanted: int | None, clock: Clock | None = None) -> ArbiterPolicy:
    made = ArbiterPolicy("chat", follow=False, clock=clock or Clock())
    made.wanted = wanted
    return made


@pytest.mark.spec("H0")
def test_a_waiting_request_wakes_a_replica_whatever_the_arbiter_wants() -> None:
    assert policy(0)({"d": Context(0.4)})[0] == {"d": 1}
    assert policy(None).replicas(Context(0.4)) == 1


@pytest.mark.spec("H0")
def test_replicas_scale_to_zero_only_when_the_arbiter_agrees() -> None:
    assert policy(1).replicas(Context(0, current_num_replicas=1)) == 1
    assert policy(0).replicas(Context(0, current_num_replicas=1)) == 0


@pytest.mark.spec("H0")
def test_idle_replica_without_an_arbiter_stays_for_the_default_time() -> None:
    clock = Clock()
    alone = policy(None, clock)
    clock.now_s = DEFAULT_TO_ZERO_S - 1
    assert alone.replicas(Context(0, current_num_replicas=1)) == 1
    clock.now_s = DEFAULT_TO_ZERO_S + 1
    assert alone.replicas(Context(0, current_num_replicas=1)) == 0


@pytest.mark.spec("H0")
def test_idle_replica_without_an_arbiter_stays_as_the_last_table_said() -> None:
    clock = Clock()
    alone = policy(None, clock)
    alone.note_table({"capabilities": {"chat": {"downscale_to_zero_s": 20}}})
    clock.now_s = 19
    assert alone.replicas(Context(0, current_num_replicas=1)) == 1
    clock.now_s = 21
    assert alone.replicas(Context(0, current_num_replicas=1)) == 0


@pytest.mark.spec("H0")
def test_policy_that_finds_no_arbiter_looks_again_and_hides_no_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two looks the first finds none, the second has a bug."""
    alone, pauses = policy(1), list[float]()

    def find(_: str) -> None:
        if pauses:
            raise KeyError("a bug")

    def pause(s: float) -> None:
        assert not pauses, "it goes on"
        pauses.append(s)

    monkeypatch.setattr(admin, "find_actor", find)
    monkeypatch.setattr(scaling.time, "sleep", pause)
    with pytest.raises(KeyError, match="a bug"):
        alone._follow()
    assert pauses == [AGAIN_S] and alone.wanted is None


def test_several_replicas_follow_demand_up_at_once_and_down_after_a_while() -> None:
    clock = Clock()
    busy = policy(1, clock)
    assert busy.replicas(Context(6.0)) == 3
    clock.now_s = FEWER_AFTER_S / 2
    assert busy.replicas(Context(1.0)) == 3
    clock.now_s = FEWER_AFTER_S + 1
    assert busy.replicas(Context(1.0)) == 1


def test_replicas_never_exceed_the_maximum_of_the_deployment() -> None:
    assert policy(1).replicas(Context(1_000.0)) == 4


@pytest.mark.spec("H0")
def test_controller_looks_sooner_while_a_replica_is_missing_and_not_for_ever() -> None:
    clock, calls = Clock(), list[float]()
    chat = ArbiterPolicy("chat", False, clock, quicken=lambda: calls.append(clock.now_s))
    chat.wanted = 1
    chat.replicas(Context(0))
    chat.replicas(Context(0, current_num_replicas=1))
    assert calls == [0.0]
    clock.now_s = 5.0
    chat.replicas(Context(0))
    clock.now_s += STARTS_WITHIN_S - 1
    chat.replicas(Context(0))
    clock.now_s += 1
    chat.replicas(Context(0))
    assert calls == [0.0, 5.0, 5.0 + STARTS_WITHIN_S - 1], "it never starts"
