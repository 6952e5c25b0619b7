"""A holder's line to the arbiter, when the arbiter or the line itself fails."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError

from arbiter.client import agent_client, gang_request, session
from arbiter.client import holder as module
from arbiter.client.gang_request import Gang
from arbiter.client.holder import HolderClient
from arbiter.client.session import Session
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import Timeouts
from arbiter.errors import ArbiterUnavailable, StaleEpoch, TicketClosed
from arbiter.protocol import messages, ray_internals
from arbiter.protocol.rpc import RayPeer
from arbiter.units import Bytes, Epoch, HolderId, NodeId, Span, TicketId, seconds
from tests.support.fake_arbiter import FakeArbiter, joined_client

HASTY = Timeouts(barrier=seconds(1))
ASKED = ev.Requested(TicketId("t"), HolderId("h"), "chat", "m", types.Need(Bytes(1)))


async def died(*_: object) -> None:
    raise ActorDiedError()


@pytest.mark.spec("A18")
async def test_request_behind_unsent_messages_fails_when_the_arbiter_stays_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.2)
    monkeypatch.setattr(HolderClient.joined, "__defaults__", (0.2,))
    client = joined_client(FakeArbiter(tell=died))
    client.tell(ev.Slept(TicketId("x")))
    async with asyncio.timeout(5):
        with pytest.raises(ArbiterUnavailable):
            await client.acquire(ASKED)
    await client.close()


class NextEpoch:
    """An arbiter that a client joins by itself; notes who came with what, and what was said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joined, self.told = list[ev.Joined](), list[ev.Event]()
        self.actor = FakeArbiter(hello=self.hello, join=self.join, tell=self.tell)
        monkeypatch.setattr(ray_internals, "own_node", lambda: NodeId("n"))
        monkeypatch.setattr(ray_internals, "own_handle", lambda: None)
        monkeypatch.setattr(agent_client, "find_actor", lambda name: None)

    async def hello(self) -> dict[str, object]:
        return {"identity": messages.identity(), "holders": 0}

    async def join(self, _: Epoch | None, joined: ev.Joined, *__: object) -> messages.JoinReply:
        self.joined.append(joined)
        return messages.JoinReply(Epoch(6), {"capabilities": {}}, HASTY)

    async def tell(self, epoch: Epoch, holder: HolderId, event: ev.Event) -> None:
        self.told.append(event)

    async def is_joined_by(self, client: HolderClient) -> None:
        client.session._handle = self.actor
        await client.session._join()


@pytest.mark.spec("A18")
async def test_full_outbox_is_emptied_and_its_holder_rejoins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "OUTBOX_MOST_COUNT", 3)
    arbiter = NextEpoch(monkeypatch)
    client = joined_client(arbiter.actor)
    client.tell(ev.Withdrawn(TicketId("u")))  # no join says it
    for number in range(5):
        client.tell(ev.Slept(TicketId(str(number))))
    assert len(client.session._outbox) <= 3
    async with asyncio.timeout(5):
        await client.session.lost.wait()  # that epoch is over, and the next join says everything
    assert client.epoch is None and not arbiter.told
    await arbiter.is_joined_by(client)
    client.tell(ev.Slept(TicketId("new")))
    await client.flush(5)
    assert len(arbiter.joined) == 1 and client.epoch == 6
    assert arbiter.told == [ev.Withdrawn(TicketId("u")), ev.Slept(TicketId("new"))]
    await let_go(client)


@pytest.mark.spec("A18")
async def test_outbox_of_withdrawals_alone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "OUTBOX_MOST_COUNT", 4)
    client = joined_client(FakeArbiter())
    client.session._leave()
    for number in range(20):
        client.tell(ev.Withdrawn(TicketId(str(number))))
        assert len(client.session._outbox) <= 4
    assert client.session._outbox[-1] == ev.Withdrawn(TicketId("19"))
    await let_go(client)


async def test_connection_ended_by_a_bug_is_raised_by_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(_: Session) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Session, "_renew", broken)
    client = joined_client(FakeArbiter())
    client.check()
    with contextlib.suppress(KeyError):
        await client.session._tasks[1]
    await asyncio.sleep(0)
    with pytest.raises(KeyError, match="a bug"):
        client.check()
    client.session.epoch = None
    await client.close()


async def test_closing_a_client_is_no_failure() -> None:
    client = joined_client(FakeArbiter())
    client.session.epoch = None
    await client.close()
    client.check()


@pytest.mark.spec("A14")
async def test_a_growth_whose_caller_has_gone_is_withdrawn() -> None:
    heard: asyncio.Queue[ev.Event] = asyncio.Queue()

    async def tell(epoch: object, holder: object, event: ev.Event) -> None:
        heard.put_nowait(event)

    client = joined_client(FakeArbiter(tell=tell))
    growing = asyncio.ensure_future(client.grow(TicketId("t"), Bytes(5), Span(7)))
    await asyncio.sleep(0)
    growing.cancel()
    async with asyncio.timeout(5):
        assert await heard.get() == ev.GrowthAsked(TicketId("t"), Bytes(0), Span(7))
    client.session.epoch = None
    await client.close()


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
    async with asyncio.timeout(5):
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


async def test_cancelled_listening_leaves_no_pending_call() -> None:
    client = joined_client(FakeArbiter())
    listening = asyncio.ensure_future(client.session._listen())
    await asyncio.sleep(0)
    hears = [t for t in asyncio.all_tasks() if "_hear" in str(t.get_coro())]
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.wait([listening, *hears], timeout=5)
    assert len(hears) == 1 and hears[0].cancelled()
    await let_go(client)


# -- one life of the arbiter after the other ------------------------------------------------------


def given(requested: ev.Requested, epoch: int) -> messages.Granted:
    return messages.Granted(requested.ticket, (), Span(0), Span(0), Epoch(epoch))


async def let_go(client: HolderClient) -> None:
    """Without the last words that nobody here would hear."""
    client.session.epoch = None
    await client.close()


def rejoin(client: HolderClient, arbiter: FakeArbiter, epoch: int = 6) -> None:
    client.session.arbiter, client.session.epoch = RayPeer(arbiter), Epoch(epoch)
    client.session.lost.clear()
    client.session.joined.set()


@pytest.mark.spec("A18")
async def test_grant_of_an_ended_epoch_is_requested_again() -> None:
    asked: list[int] = []

    async def acquire(epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        asked.append(epoch)
        client.session.epoch = Epoch(6)  # it died as it answered, and the next is joined already
        return given(requested, epoch)

    client = joined_client(FakeArbiter(acquire=acquire))
    async with asyncio.timeout(5):
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
    async with asyncio.timeout(5):
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
    async with asyncio.timeout(5):
        await waits.wait()
        asking.cancel()
        assert await heard.get() == ev.Withdrawn(TicketId("t"))
    await let_go(client)


@pytest.mark.spec("A5", "A18")
async def test_holder_counted_as_dead_gets_ticket_closed() -> None:
    async def acquire(epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        raise StaleEpoch(epoch, epoch)  # this life knows the epoch, and nobody of that name

    client = joined_client(FakeArbiter(acquire=acquire))
    async with asyncio.timeout(5):
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
    async with asyncio.timeout(5):
        await asking
    assert order == ["told", "asked"]
    await let_go(client)


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
    async with asyncio.timeout(5):
        await growing
    assert order == ["told", "grew"]
    await let_go(client)


@pytest.mark.spec("A18")
async def test_failure_of_an_old_epoch_does_not_end_the_new_one() -> None:
    heard, fails = asyncio.Event(), asyncio.Event()

    async def tell(epoch: Epoch, holder: HolderId, event: ev.Event) -> None:
        if epoch == 5:
            heard.set()
            await fails.wait()
            raise ActorDiedError()

    arbiter = FakeArbiter(tell=tell)
    client = joined_client(arbiter)
    client.tell(ev.Slept(TicketId("t")))
    async with asyncio.timeout(5):
        await heard.wait()
        client.session._leave()
        rejoin(client, arbiter)
        fails.set()
        await client.flush(5)
    assert client.epoch == 6 and not client.session._outbox  # and the new one has heard it
    await let_go(client)


@pytest.mark.spec("A18")
async def test_received_command_is_acknowledged_with_the_next_listen() -> None:
    acks: list[int] = []
    orders = [messages.SequencedCommand(n, messages.ReloadOrder(f"m{n}")) for n in (1, 2, 3)]

    async def listen(
        holder: HolderId, epoch: Epoch, ack: int
    ) -> tuple[messages.SequencedCommand, ...]:
        acks.append(ack)
        if ack == 3:
            raise StaleEpoch(epoch, Epoch(6))
        return tuple(orders[:2]) if ack == 0 else tuple(orders[ack:])

    taken: list[messages.Command] = []
    client = joined_client(FakeArbiter(listen=listen))
    client.session._on_command = taken.append
    with pytest.raises(StaleEpoch):
        await client.session._listen()
    assert acks == [0, 2, 3] and taken == [order.command for order in orders]
    await let_go(client)


@pytest.mark.spec("A8", "A18")
async def test_a_rejoin_names_all_that_is_held_and_repeats_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arbiter, client = NextEpoch(monkeypatch), joined_client(FakeArbiter())
    client.session._leave()
    client.tell(ev.Slept(TicketId("t")))  # said by the introduction that follows
    unwanted = [ev.Withdrawn(TicketId("u")), ev.GrowthAsked(TicketId("t"), Bytes(0), Span(7))]
    for event in unwanted:  # that names no queued ticket and no wish to grow
        client.tell(event)
    held = ev.HeldTicket(TicketId("t"), "m", types.Phase.ASLEEP, 0, Span(0), (), ASKED.need, "")
    client.session._held_tickets = lambda: (held,)
    await arbiter.is_joined_by(client)
    client.tell(ev.Withdrawn(TicketId("v")))
    await client.flush(5)
    assert client.epoch == 6 and [said.tickets for said in arbiter.joined] == [(held,)]
    assert arbiter.told == [*unwanted, ev.Withdrawn(TicketId("v"))]
    assert client.timeouts == HASTY and arbiter.joined[0].is_driver  # no actor has this handle
    await let_go(client)
