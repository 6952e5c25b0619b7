"""What a node agent still has to say is said until somebody has heard it."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.node import reports
from arbiter.node.device_probe import Tree
from arbiter.node.reports import Reports
from arbiter.protocol.rpc import ConnectionLost, RayPeer
from arbiter.units import Bytes, DeviceId, Epoch, NodeId, TicketId
from tests.support.fake_arbiter import FakeArbiter
from tests.support.waits import eventually

N, T = NodeId("n"), TicketId("t")
SEEN = ev.NodeSeen(N, ())


class ReportReceiver:
    """An arbiter in epoch 5; `meanwhile` happens while it hears."""

    def __init__(self, *listed: int) -> None:
        self.listed, self.heard = set(listed), list[tuple[ev.Event, ...]]()
        self.meanwhile: Callable[[], None] = lambda: None
        self.reports = Reports(N, lambda: SEEN, lambda: set(self.listed))
        self.reports._arbiter = RayPeer(FakeArbiter(report=self.report))
        self.reports._epoch = Epoch(5)

    async def report(self, node: NodeId, epoch: Epoch, said: tuple[ev.Event, ...]) -> Epoch:
        self.heard.append(said)
        self.meanwhile()
        return Epoch(5)


class BreakingPeer:
    """A connection that breaks; each of its calls notices when told."""

    is_open = True

    def __init__(self) -> None:
        self.breaks, self.is_closed = dict[str, asyncio.Event](), False

    async def call(self, name: str, *_: object) -> None:
        self.breaks[name] = asyncio.Event()
        await self.breaks[name].wait()
        raise ConnectionLost(name)

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.spec("A10")
async def test_engine_bytes_are_back_when_the_driver_lists_none_of_its_processes() -> None:
    receiver = ReportReceiver(7)
    receiver.reports.note_ended(T, 7, 8)
    await receiver.reports.send_ends()
    receiver.reports.note_returned()
    assert receiver.reports.are_open and not receiver.reports.unsent_ends
    assert receiver.reports.trees() == [Tree(T, frozenset({7}))]
    receiver.listed = {9}
    receiver.reports.note_returned()
    await receiver.reports.send_ends()
    said = [[event.bytes_back for event in events] for events in receiver.heard]  # type: ignore[attr-defined]
    assert said == [[False], [True]] and not receiver.reports.are_open
    assert receiver.reports.trees() == []


@pytest.mark.spec("A10")
async def test_to_end_again_what_is_dead_brings_no_bytes_back_that_are_still_listed() -> None:
    """The arbiter has it ended as well, once its holder has let go of it."""
    receiver = ReportReceiver(7)
    receiver.reports.note_ended(T, 7)
    receiver.reports.note_ended(T)
    assert receiver.reports.unsent_ends == {T: ev.EngineGone(N, T, False)}
    receiver.listed = set()
    receiver.reports.note_ended(T)
    assert receiver.reports.unsent_ends == {T: ev.EngineGone(N, T, True)}
    await receiver.reports.send_ends()
    assert not receiver.reports.are_open


async def test_engine_bytes_without_a_driver_are_back_with_the_last_process() -> None:
    receiver = ReportReceiver()
    receiver.reports.note_ended(T, 7)
    assert receiver.reports.unsent_ends == {T: ev.EngineGone(N, T, True)}


@pytest.mark.spec("A18")
async def test_unreceived_report_is_sent_again() -> None:
    receiver = ReportReceiver()

    async def died(*_: object) -> None:
        raise ActorDiedError()

    receiver.reports.note_ended(T, 7)
    receiver.reports._arbiter = RayPeer(FakeArbiter(report=died))
    await receiver.reports.send_ends()
    assert T in receiver.reports.unsent_ends


@pytest.mark.spec("A18")
async def test_broken_call_closes_no_connection_made_since() -> None:
    """A check and a report run beside each other, and both fail with the connection they share."""
    receiver, old, new = ReportReceiver(), BreakingPeer(), BreakingPeer()
    receiver.reports._arbiter = old
    calls = receiver.reports.send(()), receiver.reports._check(T)
    said, checked = (asyncio.ensure_future(call) for call in calls)
    await eventually(lambda: len(old.breaks) == 2)
    old.breaks["report"].set()
    assert not await said
    receiver.reports._arbiter = new  # the next report has connected again
    old.breaks["check_grant"].set()
    assert await checked is None
    assert receiver.reports._arbiter is new and old.is_closed and not new.is_closed


@pytest.mark.spec("A10", "A18")
async def test_ray_that_does_not_say_where_the_arbiter_is_stops_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread waits for it, however many reports have given up."""
    receiver, has_turn, answers = ReportReceiver(), threading.Event(), threading.Event()
    had_turn: list[bool] = []

    def get_actor(*_: object, **__: object) -> None:
        had_turn.append(has_turn.wait(5))
        answers.wait(60)
        raise ValueError("no arbiter")

    monkeypatch.setattr(reports.ray, "get_actor", get_actor)
    monkeypatch.setattr(reports, "REPORT_S", 0.05)
    receiver.reports._arbiter = None
    asyncio.get_running_loop().call_soon(has_turn.set)
    try:
        for _ in range(3):
            assert not await receiver.reports.send(())
        await eventually(lambda: had_turn)
        assert had_turn == [True]
    finally:
        answers.set()


@pytest.mark.spec("A18")
async def test_bug_beside_a_report_is_no_absence_of_the_arbiter() -> None:
    async def report(*_: object) -> None:
        raise ValueError("a bug")

    receiver = ReportReceiver()
    receiver.reports._arbiter = RayPeer(FakeArbiter(report=report))
    with pytest.raises(ValueError, match="a bug"):
        await receiver.reports.send(())


@pytest.mark.spec("A18")
async def test_bug_of_the_arbiter_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    receiver = ReportReceiver()

    async def fails(*_: object) -> None:
        raise RayTaskError("check_grant", "there", KeyError("a bug"))

    for _ in range(3):
        receiver.reports._arbiter = RayPeer(FakeArbiter(check_grant=fails))
        assert await receiver.reports._check(T) is None
    [line] = [r.getMessage() for r in caplog.records if "the arbiter failed" in r.getMessage()]
    assert "check_grant" in line


async def test_report_made_during_a_send_is_not_lost() -> None:
    receiver = ReportReceiver()
    receiver.reports.note_gone(T, bytes_back=False)
    receiver.meanwhile = lambda: receiver.reports.note_gone(T, bytes_back=True)
    await receiver.reports.send_ends()
    assert receiver.reports.unsent_ends == {T: ev.EngineGone(N, T, True)}


@pytest.mark.spec("A18")
async def test_new_epoch_is_told_the_devices_first() -> None:
    receiver = ReportReceiver()
    receiver.reports._epoch = Epoch(4)
    said = ev.EngineGone(N, T, True)
    assert await receiver.reports.send((said,))
    assert receiver.heard == [(said,), (SEEN, said)]


@pytest.mark.spec("A18")
async def test_introduction_that_broke_is_made_with_the_next_report() -> None:
    """An arbiter that does not know the node drops its readings, and grants nothing there."""
    receiver, said = ReportReceiver(), ev.EngineGone(N, T, True)
    heard: list[tuple[ev.Event, ...]] = []

    async def report(_: NodeId, epoch: Epoch, events: tuple[ev.Event, ...]) -> Epoch:
        if epoch == 6:
            if breaks.pop():
                raise ConnectionLost("report")
            heard.append(events)
        return Epoch(6)

    breaks = [False, True]
    peer = RayPeer(FakeArbiter(report=report))
    receiver.reports._arbiter = peer
    assert not await receiver.reports.send((said,))
    receiver.reports._arbiter = peer
    assert await receiver.reports.send((said,))
    assert heard == [(SEEN, said)]


@pytest.mark.spec("A18")
async def test_reports_beside_each_other_are_both_heard_in_a_new_epoch() -> None:
    """The arbiter drops what is said to an earlier one, and both were sent to that."""
    receiver, both_sent, heard = ReportReceiver(), asyncio.Barrier(2), list[ev.Event]()

    async def report(_: NodeId, epoch: Epoch, said: tuple[ev.Event, ...]) -> Epoch:
        if epoch == 5:
            await both_sent.wait()
        else:
            heard.extend(said)
        return Epoch(6)

    receiver.reports._arbiter = RayPeer(FakeArbiter(report=report))
    gone = [ev.EngineGone(N, TicketId(name), True) for name in ("t", "u")]
    async with asyncio.timeout(60):
        assert await asyncio.gather(*(receiver.reports.send((one,)) for one in gone)) == [
            True,
            True,
        ]
    assert heard == [SEEN, gone[0], SEEN, gone[1]] or heard == [SEEN, gone[1], SEEN, gone[0]]


@pytest.mark.spec("B1")
async def test_devices_that_have_changed_are_told_with_what_is_said_next() -> None:
    receiver, said = ReportReceiver(), ev.EngineGone(N, T, True)
    seen = [SEEN]
    receiver.reports._introduction = lambda: seen[0]
    assert await receiver.reports.send((said,))
    gpu = types.DeviceSpec(DeviceId("n/gpu:0"), types.DeviceKind.GPU, Bytes(5), "A10G", "GPU-a")
    seen[0] = ev.NodeSeen(N, (gpu,))
    assert await receiver.reports.send((said,)) and await receiver.reports.send((said,))
    assert receiver.heard == [(said,), (seen[0], said), (said,)]
    seen[0] = ev.NodeSeen(N, (gpu,), (ev.DeviceUnreadable(gpu.device, "Timeout"),))
    assert await receiver.reports.send((said,))
    assert receiver.heard[-1] == (said,)  # it is there as before


@pytest.mark.spec("B1", "B6")
async def test_gpu_that_never_answered_and_is_lost_is_told_with_what_is_said_next() -> None:
    """The device list is the same, but the arbiter had tickets wait for that GPU."""
    receiver, said = ReportReceiver(), ev.EngineGone(N, T, True)
    unread = ev.DeviceUnreadable(DeviceId("n/gpu:0"), "Timeout")
    seen = [ev.NodeSeen(N, (), (unread,)), SEEN]
    receiver.reports._introduction = lambda: seen[0]
    assert await receiver.reports.send((said,)) and await receiver.reports.send((said,))
    del seen[0]
    assert await receiver.reports.send((said,)) and await receiver.reports.send((said,))
    assert receiver.heard == [(said,), (said,), (SEEN, said), (said,)]
