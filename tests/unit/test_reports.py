"""What a node agent still has to say is said until somebody has heard it."""

from collections.abc import Callable

import pytest
from ray.exceptions import ActorDiedError

from arbiter.core import events as ev
from arbiter.node.reports import Reports
from arbiter.protocol.rpc import RayPeer
from arbiter.units import Epoch, NodeId, TicketId
from tests.support.lines import FakeArbiter

N, T = NodeId("n"), TicketId("t")
SEEN = ev.NodeSeen(N, ())


class Hearing:
    """An arbiter in its fifth life; `meanwhile` happens while it hears."""

    def __init__(self, *listed: int) -> None:
        self.listed, self.heard = set(listed), list[tuple[ev.Event, ...]]()
        self.meanwhile: Callable[[], None] = lambda: None
        self.reports = Reports(N, lambda: (), lambda: set(self.listed))
        self.reports._arbiter = RayPeer(FakeArbiter(report=self.report))
        self.reports._epoch = Epoch(5)

    async def report(self, node: NodeId, epoch: Epoch, said: tuple[ev.Event, ...]) -> Epoch:
        self.heard.append(said)
        self.meanwhile()
        return Epoch(5)


@pytest.mark.spec("A10")
async def test_bytes_are_back_when_the_driver_lists_none_of_its_processes() -> None:
    hearing = Hearing(7)
    hearing.reports.note_ended(T, 7, 8)
    await hearing.reports.say_all_gone()
    hearing.reports.see_returned()
    assert hearing.reports.are_open and not hearing.reports.gone
    hearing.listed = {9}
    hearing.reports.see_returned()
    await hearing.reports.say_all_gone()
    said = [[event.bytes_back for event in events] for events in hearing.heard]  # type: ignore[attr-defined]
    assert said == [[False], [True]] and not hearing.reports.are_open


async def test_without_a_driver_they_are_back_with_the_last_process() -> None:
    hearing = Hearing()
    hearing.reports.note_ended(T, 7)
    assert hearing.reports.gone == {T: ev.EngineGone(N, T, True)}


@pytest.mark.spec("A18")
async def test_what_nobody_heard_is_said_again() -> None:
    hearing = Hearing()

    async def died(*_: object) -> None:
        raise ActorDiedError()

    hearing.reports.note_ended(T, 7)
    hearing.reports._arbiter = RayPeer(FakeArbiter(report=died))
    await hearing.reports.say_all_gone()
    assert T in hearing.reports.gone


async def test_a_later_word_is_not_lost_while_the_earlier_is_heard() -> None:
    hearing = Hearing()
    hearing.reports.note_gone(T, bytes_back=False)
    hearing.meanwhile = lambda: hearing.reports.note_gone(T, bytes_back=True)
    await hearing.reports.say_all_gone()
    assert hearing.reports.gone == {T: ev.EngineGone(N, T, True)}


@pytest.mark.spec("A18")
async def test_another_life_of_the_arbiter_hears_of_the_devices_first() -> None:
    hearing = Hearing()
    hearing.reports._epoch = Epoch(4)
    said = ev.EngineGone(N, T, True)
    assert await hearing.reports.say((said,))
    assert hearing.heard == [(said,), (SEEN, said)]
