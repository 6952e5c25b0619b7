"""A holder's line to the arbiter, when the arbiter or the line itself fails."""

import asyncio
import contextlib

import pytest
from ray.exceptions import ActorDiedError

from arbiter import client as module
from arbiter import events as ev
from arbiter.client import HolderClient
from arbiter.errors import ArbiterUnavailable
from arbiter.units import Bytes, HolderId, TicketId
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
