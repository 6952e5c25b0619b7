"""A holder's connection to the arbiter: what it says, hears, and says again in the next epoch."""

import asyncio
import contextlib

import pytest
from ray.exceptions import ActorDiedError

from arbiter.client import admin, session
from arbiter.client.holder import HolderClient
from arbiter.client.session import Session
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import Timeouts
from arbiter.errors import StaleEpoch
from arbiter.protocol import messages, ray_internals
from arbiter.protocol.rpc import RayPeer
from arbiter.units import Bytes, Epoch, HolderId, NodeId, Span, TicketId, seconds
from tests.support.fake_arbiter import FakeArbiter, joined_client, let_go

HASTY = Timeouts(barrier=seconds(1))


class NextEpoch:
    """An arbiter that a client joins by itself; notes introductions and messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joined, self.told = list[ev.Joined](), list[ev.Event]()
        self.actor = FakeArbiter(hello=self.hello, join=self.join, tell=self.tell)
        monkeypatch.setattr(ray_internals, "own_node", lambda: NodeId("n"))
        monkeypatch.setattr(ray_internals, "own_handle", lambda: None)
        monkeypatch.setattr(admin, "find_actor", lambda name: None)

    async def hello(self) -> dict[str, object]:
        return {"identity": messages.identity(), "holders": 0}

    async def join(self, joined: ev.Joined, *_: object) -> messages.JoinReply:
        self.joined.append(joined)
        return messages.JoinReply(Epoch(6), {"capabilities": {}}, HASTY)

    async def tell(self, epoch: Epoch, holder: HolderId, event: ev.Event) -> None:
        self.told.append(event)

    async def is_joined_by(self, client: HolderClient) -> None:
        client.session._handle = self.actor
        await client.session._join()


def rejoin(client: HolderClient, arbiter: FakeArbiter, epoch: int = 6) -> None:
    client.session.arbiter, client.session.epoch = RayPeer(arbiter), Epoch(epoch)
    client.session.lost.clear()
    client.session.joined.set()


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
    async with asyncio.timeout(60):
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


@pytest.mark.spec("A18")
@pytest.mark.parametrize("hangs", ["renew", "tell"])
async def test_epoch_of_an_arbiter_that_hangs_is_over(
    monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """By Ray, whose calls nothing else ends."""
    monkeypatch.setattr(session, "RENEW_S", 0.01)
    monkeypatch.setattr(session, "ANSWER_S", 0.05)

    async def answers(*_: object) -> None: ...

    [other] = {"renew", "tell"} - {hangs}
    client = joined_client(FakeArbiter(**{other: answers}))
    client.tell(ev.Withdrawn(TicketId("t")))
    async with asyncio.timeout(60):
        await client.session.lost.wait()
    assert client.epoch is None
    told: list[object] = []

    async def tell(*said: object) -> None:
        told.append(said)

    monkeypatch.setattr(session, "ANSWER_S", 60.0)
    rejoin(client, FakeArbiter(renew=answers, tell=tell))
    await client.flush(60)
    assert told == ([(6, "h", ev.Withdrawn(TicketId("t")))] if hangs == "tell" else [])
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


@pytest.mark.spec("A18")
async def test_bug_in_a_command_ends_the_connection_and_is_no_absence_of_the_arbiter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arbiter, reload = NextEpoch(monkeypatch), messages.ReloadCommand("m")
    monkeypatch.setattr(admin, "find_actor", lambda _: arbiter.actor)

    async def listen(*_: object) -> tuple[messages.SequencedCommand, ...]:
        return (messages.SequencedCommand(1, reload),)

    def on_command(command: messages.Command) -> None:
        if command is reload:
            raise KeyError("a bug")

    arbiter.actor.methods["listen"] = listen
    client = HolderClient("chat", HolderId("h"), lambda: (), on_command)
    await asyncio.wait(client.session._tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(KeyError, match="a bug"):
        client.check()
    await let_go(client)


async def test_closing_a_client_is_no_failure() -> None:
    client = joined_client(FakeArbiter())
    client.session.epoch = None
    await client.close()
    client.check()


async def test_cancelled_listening_leaves_no_pending_call() -> None:
    client = joined_client(FakeArbiter())
    listening = asyncio.ensure_future(client.session._listen())
    await asyncio.sleep(0)
    hears = [t for t in asyncio.all_tasks() if "_next_commands" in str(t.get_coro())]
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.wait([listening, *hears], timeout=60)
    assert len(hears) == 1 and hears[0].cancelled()
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
    async with asyncio.timeout(60):
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
    commands = [messages.SequencedCommand(n, messages.ReloadCommand(f"m{n}")) for n in (1, 2, 3)]

    async def listen(
        holder: HolderId, epoch: Epoch, ack: int
    ) -> tuple[messages.SequencedCommand, ...]:
        acks.append(ack)
        if ack == 3:
            raise StaleEpoch(epoch, Epoch(6))
        return tuple(commands[:2]) if ack == 0 else tuple(commands[ack:])

    taken: list[messages.Command] = []
    client = joined_client(FakeArbiter(listen=listen))
    client.session._on_command = taken.append
    with pytest.raises(StaleEpoch):
        await client.session._listen()
    assert acks == [0, 2, 3] and taken == [each.command for each in commands]
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
    held = ev.HeldTicket(
        TicketId("t"), "m", types.Phase.ASLEEP, 0, Span(0), (), types.Need(Bytes(1)), ""
    )
    client.session._held_tickets = lambda: (held,)
    await arbiter.is_joined_by(client)
    client.tell(ev.Withdrawn(TicketId("v")))
    await client.flush(5)
    assert client.epoch == 6 and [said.tickets for said in arbiter.joined] == [(held,)]
    assert arbiter.told == [*unwanted, ev.Withdrawn(TicketId("v"))]
    assert client.timeouts == HASTY and arbiter.joined[0].is_driver  # no actor has this handle
    await let_go(client)
