"""A holder's line to the arbiter, when the arbiter or the line itself fails."""

import asyncio
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError

from arbiter.client import gang_request
from arbiter.client import holder as module
from arbiter.client.gang_request import Gang
from arbiter.client.holder import HolderClient
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import Timeouts
from arbiter.errors import ArbiterUnavailable, StaleEpoch, TicketClosed
from arbiter.protocol import messages
from arbiter.protocol.rpc import RayPeer
from arbiter.units import Bytes, Epoch, HolderId, Span, TicketId, seconds
from tests.support.fake_arbiter import FakeArbiter, joined_client, let_go
from tests.support.waits import eventually

HASTY = Timeouts(barrier=seconds(1))
ASKED = ev.Requested(TicketId("t"), HolderId("h"), "chat", "m", types.Need(Bytes(1)))


async def died(*_: object) -> None:
    raise ActorDiedError()


@pytest.mark.spec("A18")
async def test_request_behind_unsent_messages_fails_when_the_arbiter_stays_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.2)
    monkeypatch.setattr(HolderClient.wait_until_joined, "__defaults__", (0.2,))
    client = joined_client(FakeArbiter(tell=died))
    client.tell(ev.Slept(TicketId("x")))
    async with asyncio.timeout(60):
        with pytest.raises(ArbiterUnavailable):
            await client.acquire(ASKED)
    await client.close()


@pytest.mark.spec("A18")
async def test_request_to_an_arbiter_that_hangs_is_asked_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Ray, whose calls end with the process they went to. A growth is refused meanwhile."""
    monkeypatch.setattr(HolderClient.wait_until_joined, "__defaults__", (60.0,))
    client, asked = joined_client(FakeArbiter()), list[object]()

    async def acquire(epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        asked.append(epoch)
        return given(requested, epoch)

    async def tell(*_: object) -> None: ...  # that the growth is withdrawn

    async with asyncio.timeout(60):
        asking = asyncio.ensure_future(client.acquire(ASKED))
        growing = asyncio.ensure_future(client.grow(TicketId("t"), Bytes(5), Span(7)))
        await eventually(lambda: client.calls_count == 1)
        client.session.lose(Epoch(5))  # another call has found it
        with pytest.raises(ArbiterUnavailable):
            await growing
        assert not asking.done()
        client.session.arbiter = RayPeer(FakeArbiter(acquire=acquire, tell=tell))
        client.session.epoch = Epoch(6)
        client.session.lost.clear()
        client.session.joined.set()
        assert (await asking).epoch == 6
    assert asked == [6]
    await let_go(client)


@pytest.mark.spec("A14")
async def test_a_growth_whose_caller_has_gone_is_withdrawn() -> None:
    heard: asyncio.Queue[ev.Event] = asyncio.Queue()

    async def tell(epoch: object, holder: object, event: ev.Event) -> None:
        heard.put_nowait(event)

    client = joined_client(FakeArbiter(tell=tell))
    growing = asyncio.ensure_future(client.grow(TicketId("t"), Bytes(5), Span(7)))
    await asyncio.sleep(0)
    growing.cancel()
    async with asyncio.timeout(60):
        assert await heard.get() == ev.GrowthAsked(TicketId("t"), Bytes(0), Span(7))
    client.session.epoch = None
    await client.close()


@pytest.mark.spec("A14", "A18")
async def test_a_growth_whose_connection_is_lost_is_withdrawn_in_the_same_epoch() -> None:
    """The caller has its error, and the arbiter lives on and would evict for the growth."""
    told: asyncio.Queue[ev.Event] = asyncio.Queue()

    async def tell(epoch: object, holder: object, event: ev.Event) -> None:
        told.put_nowait(event)

    client = joined_client(FakeArbiter(tell=tell))
    arbiter = client.session.arbiter
    growing = asyncio.ensure_future(client.grow(TicketId("t"), Bytes(5), Span(7)))
    await asyncio.sleep(0)
    client.session.lose(Epoch(5))  # a heartbeat without an answer in time
    async with asyncio.timeout(60):
        with pytest.raises(ArbiterUnavailable):
            await growing
        client.session._clear_outbox()  # as each join does
        client.session.arbiter, client.session.epoch = arbiter, Epoch(5)
        client.session.joined.set()
        assert await told.get() == ev.GrowthAsked(TicketId("t"), Bytes(0), Span(7))
    await let_go(client)


@pytest.mark.spec("A13", "A18")
async def test_a_gang_that_was_answered_in_part_is_asked_for_again_as_a_whole() -> None:
    asked: list[tuple[int, str]] = []
    came, over = asyncio.Event(), asyncio.Event()

    async def acquire(epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        asked.append((epoch, requested.ticket))
        if epoch == 5 and requested.ticket == "b":
            came.set()
            await over.wait()
            raise ActorDiedError()
        return messages.Granted(requested.ticket, (), Span(0), Span(0), epoch)

    client = joined_client(FakeArbiter(acquire=acquire))
    both = replace(ASKED, ticket=TicketId("a")), replace(ASKED, ticket=TicketId("b"))
    whole = Gang(tuple(asked.ticket for asked in both))
    gang = asyncio.gather(*(gang_request.acquire(client, asked, whole) for asked in both))
    async with asyncio.timeout(60):
        await came.wait()
        arbiter = client.session.arbiter
        over.set()
        await client.session.lost.wait()
        client.session.arbiter, client.session.epoch = arbiter, Epoch(6)
        client.session.lost.clear()
        client.session.joined.set()
        assert [g.epoch for g in await gang] == [6, 6]
    assert asked.count((Epoch(6), "a")) == 1
    client.session.epoch = None
    await client.close()


# -- one epoch after the other -------------------------------------------------------------------


def given(requested: ev.Requested, epoch: int) -> messages.Granted:
    return messages.Granted(requested.ticket, (), Span(0), Span(0), Epoch(epoch))


@pytest.mark.spec("A18")
async def test_grant_of_an_ended_epoch_is_requested_again() -> None:
    asked: list[int] = []

    async def acquire(epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        asked.append(epoch)
        client.session.epoch = Epoch(6)  # it died as it answered, and the next is joined already
        return given(requested, epoch)

    client = joined_client(FakeArbiter(acquire=acquire))
    async with asyncio.timeout(60):
        assert (await client.acquire(ASKED)).epoch == 6
    assert asked == [5, 6]
    await let_go(client)


@pytest.mark.spec("A18", "A21")
async def test_deadline_runs_from_the_first_request_in_whichever_epoch() -> None:
    heard: list[Span | None] = []

    async def acquire(epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        heard.append(requested.deadline)
        client.session.epoch = Epoch(6)
        return given(requested, epoch)

    client = joined_client(FakeArbiter(acquire=acquire))
    async with asyncio.timeout(60):
        await client.acquire(replace(ASKED, deadline=seconds(10)))
    first, second = heard
    assert first and second and second < first <= seconds(10)
    await let_go(client)


@pytest.mark.spec("A8")
async def test_cancelled_request_is_withdrawn() -> None:
    heard: asyncio.Queue[ev.Event] = asyncio.Queue()
    waits = asyncio.Event()

    async def acquire(*_: object) -> messages.Granted:
        waits.set()
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets")

    async def tell(epoch: object, holder: object, event: ev.Event) -> None:
        heard.put_nowait(event)

    client = joined_client(FakeArbiter(acquire=acquire, tell=tell))
    asking = asyncio.ensure_future(client.acquire(ASKED))
    async with asyncio.timeout(60):
        await waits.wait()
        asking.cancel()
        assert await heard.get() == ev.Withdrawn(TicketId("t"))
    await let_go(client)


@pytest.mark.spec("A5", "A18")
async def test_holder_counted_as_dead_gets_ticket_closed() -> None:
    async def acquire(epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        raise StaleEpoch(epoch, epoch)  # the epoch is right, and it knows no such holder

    client = joined_client(FakeArbiter(acquire=acquire))
    async with asyncio.timeout(60):
        with pytest.raises(TicketClosed):
            await client.acquire(ASKED)
    assert client.epoch is None  # so it joins again
    await client.close()


@pytest.mark.spec("A3", "A18")
async def test_request_is_sent_after_all_earlier_messages_are_received() -> None:
    order: list[str] = []
    may_hear = asyncio.Event()

    async def tell(*_: object) -> None:
        await may_hear.wait()
        order.append("told")

    async def acquire(epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        order.append("asked")
        return given(requested, epoch)

    client = joined_client(FakeArbiter(tell=tell, acquire=acquire))
    client.tell(ev.Slept(TicketId("t")))
    asking = asyncio.ensure_future(client.acquire(ASKED))
    for _ in range(10):
        await asyncio.sleep(0)
    may_hear.set()
    async with asyncio.timeout(60):
        await asking
    assert order == ["told", "asked"]
    await let_go(client)


@pytest.mark.spec("A14", "A18")
@pytest.mark.parametrize(("current", "refusal"), [(6, ArbiterUnavailable), (5, TicketClosed)])
async def test_growth_in_an_epoch_that_is_over_is_refused_with_when_to_come_back(
    current: int, refusal: type[Exception]
) -> None:
    """Not as a conflict, which a client would not ask again for. A holder that the same epoch
    counted as dead has lost its ticket."""

    async def grow(epoch: Epoch, holder: HolderId, asked: ev.GrowthAsked) -> messages.Granted:
        raise StaleEpoch(epoch, Epoch(current))

    client = joined_client(FakeArbiter(grow=grow))
    async with asyncio.timeout(60):
        with pytest.raises(refusal):
            await client.grow(TicketId("t"), Bytes(5), Span(7))
    assert client.epoch is None  # so it joins again
    await client.close()


@pytest.mark.spec("A14")
async def test_growth_request_is_sent_after_all_earlier_messages_are_received() -> None:
    order: list[str] = []
    may_hear = asyncio.Event()

    async def tell(*_: object) -> None:
        await may_hear.wait()
        order.append("told")

    async def grow(epoch: Epoch, holder: HolderId, asked: ev.GrowthAsked) -> messages.Granted:
        order.append("grew")
        return messages.Granted(asked.ticket, (), Span(0), Span(0), epoch)

    client = joined_client(FakeArbiter(tell=tell, grow=grow))
    client.tell(ev.GaveBack(TicketId("t"), ()))
    growing = asyncio.ensure_future(client.grow(TicketId("t"), Bytes(5), Span(7)))
    for _ in range(10):
        await asyncio.sleep(0)
    may_hear.set()
    async with asyncio.timeout(60):
        await growing
    assert order == ["told", "grew"]
    await let_go(client)
