"""Idle workers at hand: when the next is asked for."""

import asyncio

import pytest

from arbiter.node.spare_workers import KEPT_S, LOOK_S, keep


class StopPolling(Exception):
    """The test has seen what it wanted to."""


async def asked_at(seen: list[int], count: int = 1, refuse: bool = False) -> list[int]:
    """The looks, from 1, after which a worker was asked for; `seen`: unused ones at each look."""
    looks: list[int] = []
    asked: list[int] = []

    async def pause(seconds: float) -> None:
        assert seconds == LOOK_S
        if len(looks) == len(seen):
            raise StopPolling

    async def ask(keep_s: int) -> None:
        assert keep_s == KEPT_S
        asked.append(len(looks))
        if refuse:
            raise ConnectionError("no raylet")

    def found() -> list[int]:
        looks.append(0)
        return list(range(seen[len(looks) - 1]))

    with pytest.raises(StopPolling):
        await keep(count, ask, found, pause)
    return asked


@pytest.mark.spec("N3")
async def test_a_spare_that_was_taken_is_replaced_once_its_replica_has_answered() -> None:
    assert await asked_at([1, 0, 0, 1, 1, 0, 0, 1]) == [3, 7]


async def test_a_spare_that_is_only_slow_to_be_seen_is_not_asked_for_twice() -> None:
    assert await asked_at([0, 0, 0, 1, 1]) == [2]


async def test_requests_for_a_spare_become_rare_when_none_comes() -> None:
    assert await asked_at([0] * 40, refuse=True) == [2, 4, 8, 16, 32]


async def test_spare_count_is_kept_at_the_configured_number() -> None:
    assert await asked_at([1, 1, 2, 2, 1, 1], count=2) == [2, 6]


async def test_zero_spares_cause_no_polling() -> None:
    async def ask(keep_s: int) -> None:
        raise AssertionError("asked for one")

    def found() -> list[int]:
        raise AssertionError("looked")

    async with asyncio.timeout(60):
        await keep(0, ask, found)
