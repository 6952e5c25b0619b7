"""A holder's line to the arbiter, when the arbiter or the line itself fails."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError

from arbiter import client as module
from arbiter import events as ev
from arbiter import wire
from arbiter.client import HolderClient
from arbiter.errors import ArbiterUnavailable
from arbiter.units import Bytes, Epoch, HolderId, Span, TicketId
from tests.support.lines import FakeArbiter, joined_client

ASKED = ev.Requested(TicketId("t"), HolderId("h"), "chat", "m", ev.Need(Bytes(1)))


class Deaf(HolderClient):
    """Never joins again."""

    async def _life(self) -> None:
        await asyncio.Event().wait()


async def died(*_: object) -> None:
    raise ActorDiedError()


@pytest.mark.spec("A18")
async def test_who_asks_while_something_is_unsaid_is_told_when_the_arbiter_stays_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.2)
    monkeypatch.setattr(HolderClient.joined, "__defaults__", (0.2,))
    client = joined_client(FakeArbiter(tell=died), Deaf)
    client.tell(ev.Slept(TicketId("x")))
    async with asyncio.timeout(5):
        with pytest.raises(ArbiterUnavailable):
            await client.acquire(ASKED)
    await client.close()


async def test_a_line_that_broke_by_a_bug_is_seen_by_whoever_checks() -> None:
    class Broken(Deaf):
        async def _renew(self) -> None:
            raise KeyError("a bug")

    client = joined_client(FakeArbiter(), Broken)
    client.check()
    with contextlib.suppress(KeyError):
        await client._tasks[1]
    await asyncio.sleep(0)
    with pytest.raises(KeyError, match="a bug"):
        client.check()
    client.epoch = None
    await client.close()


async def test_closing_is_no_failure() -> None:
    client = joined_client(FakeArbiter(), Deaf)
    client.epoch = None
    await client.close()
    client.check()


@pytest.mark.spec("A14")
async def test_a_growth_whose_caller_has_gone_is_withdrawn() -> None:
    heard: asyncio.Queue[ev.Event] = asyncio.Queue()

    async def tell(epoch: object, holder: object, event: ev.Event) -> None:
        heard.put_nowait(event)

    client = joined_client(FakeArbiter(tell=tell), Deaf)
    growing = asyncio.ensure_future(client.grow(TicketId("t"), Bytes(5), Span(7)))
    await asyncio.sleep(0)
    growing.cancel()
    async with asyncio.timeout(5):
        assert await heard.get() == ev.GrowthAsked(TicketId("t"), Bytes(0), Span(7))
    client.epoch = None
    await client.close()


@pytest.mark.spec("A13", "A18")
async def test_a_gang_that_was_answered_in_part_is_asked_for_again_as_a_whole() -> None:
    asked: list[tuple[int, str]] = []
    came, over = asyncio.Event(), asyncio.Event()

    async def acquire(epoch: Epoch, requested: ev.Requested) -> wire.Granted:
        asked.append((epoch, requested.ticket))
        if epoch == 5 and requested.ticket == "b":
            came.set()
            await over.wait()
            raise ActorDiedError()
        return wire.Granted(requested.ticket, (), Span(0), Span(0), epoch)

    client = joined_client(FakeArbiter(acquire=acquire), Deaf)
    both = replace(ASKED, ticket=TicketId("a")), replace(ASKED, ticket=TicketId("b"))
    gang = asyncio.ensure_future(client.acquire_all(both))
    async with asyncio.timeout(5):
        await came.wait()
        arbiter = client._arbiter
        over.set()
        await client._lost.wait()
        client._arbiter, client.epoch = arbiter, Epoch(6)
        client._lost.clear()
        client._joined.set()
        assert [g.epoch for g in await gang] == [6, 6]
    assert asked.count((Epoch(6), "a")) == 1
    client.epoch = None
    await client.close()
