"""Idle workers at hand: when the next is asked for, and when the first are there."""

import asyncio

import pytest

from arbiter.node.spare_workers import FIRST_LOOK_S, FIRST_S, KEPT_S, LOOK_S, SpareWorkers


class StopPolling(Exception):
    """The test has seen what it wanted to."""


class Node:
    """A node whose unused workers are counted out, one number for each look; all of them rest,
    unless `busy` says how many ticks they have had at a look."""

    def __init__(self, seen: list[int], *, refuse: bool = False, busy: list[int] | None = None):
        self.seen, self.refuse, self.busy = seen, refuse, busy
        self.looks = 0
        self.asked: list[int] = []  # the looks after which a worker was asked for
        self.pauses: list[float] = []

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if self.looks == len(self.seen):
            raise StopPolling

    async def ask(self, keep_s: int) -> None:
        assert keep_s == KEPT_S
        self.asked.append(self.looks)
        if self.refuse:
            raise ConnectionError("no raylet")

    def found(self) -> list[int]:
        self.looks += 1
        return list(range(self.seen[self.looks - 1]))

    def ticks(self, pid: int) -> int:
        return self.busy[self.looks - 1] if self.busy else 0

    async def watched(self, count: int = 1) -> SpareWorkers:
        made = SpareWorkers(count, self.ask, self.found, self.pause, self.ticks)
        with pytest.raises(StopPolling):
            await made.keep()
        return made


async def asked_later(seen: list[int], count: int = 1, refuse: bool = False) -> list[int]:
    """The looks, from 1, after which a worker was asked for, once the first had been there."""
    node = Node([count, count, *seen], refuse=refuse)
    await node.watched(count)
    assert node.pauses == [FIRST_LOOK_S] + [LOOK_S] * (len(seen) + 1)
    return [look - 2 for look in node.asked]


@pytest.mark.spec("N3")
async def test_a_spare_that_was_taken_is_replaced_once_its_replica_has_answered() -> None:
    assert await asked_later([1, 0, 0, 1, 1, 0, 0, 1]) == [3, 7]


async def test_a_spare_that_is_only_slow_to_be_seen_is_not_asked_for_twice() -> None:
    assert await asked_later([0, 0, 0, 1, 1]) == [2]


async def test_requests_for_a_spare_become_rare_when_none_comes() -> None:
    assert await asked_later([0] * 40, refuse=True) == [2, 4, 8, 16, 32]


async def test_spare_count_is_kept_at_the_configured_number() -> None:
    assert await asked_later([1, 1, 2, 2, 1, 1], count=2) == [2, 6]


@pytest.mark.spec("M1", "N3")
async def test_first_spares_are_asked_for_at_once_and_are_at_hand_when_their_imports_are_done() -> (
    None
):
    node = Node([1, 2, 2, 2, 2], busy=[0, 20, 60, 90, 90])
    assert (await node.watched(2)).is_settled
    assert node.asked == [1]
    assert node.pauses == [FIRST_LOOK_S] * 4 + [LOOK_S]
    node = Node([1, 2, 2, 2], busy=[0, 20, 60, 90])
    assert not (await node.watched(2)).is_settled


@pytest.mark.spec("M1")
async def test_node_whose_ray_starts_no_spare_waits_for_none_for_ever() -> None:
    looks = round(FIRST_S / FIRST_LOOK_S)
    node = Node([0] * (looks + 1), refuse=True)
    assert (await node.watched()).is_settled
    assert node.asked == [1]


async def test_zero_spares_cause_no_polling() -> None:
    async def ask(keep_s: int) -> None:
        raise AssertionError("asked for one")

    def found() -> list[int]:
        raise AssertionError("looked")

    spares = SpareWorkers(0, ask, found)
    async with asyncio.timeout(60):
        await spares.keep()
    assert spares.is_settled
