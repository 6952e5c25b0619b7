"""What became of each request, told without a message of its own."""

import asyncio

import pytest
from ray.exceptions import RayError

from arbiter.client import session as module
from arbiter.client.request_log import RequestLog
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import Epoch, HolderId, TicketId, seconds
from tests.support.core_driver import CoreDriver
from tests.support.fake_arbiter import FakeArbiter, joined_client

TICKET = TicketId("a-1")
HOLDER = HolderId("h")


def noted(runs: RequestLog, request: str) -> None:
    runs.note(TICKET, "a", seconds(2), "answered", request)


@pytest.mark.spec("K1")
def test_runs_are_bounded_and_dropped_ones_are_counted() -> None:
    runs = RequestLog(most=2)
    for number in range(5):
        noted(runs, f"r{number}")
    kept, dropped = runs.untold()
    assert ([run.request for run in kept], dropped) == (["r0", "r1"], 3)
    noted(runs, "r5")  # while the heartbeat is on its way
    runs.forget_told(ev.Renewed(HOLDER, (), kept, dropped))
    assert runs.untold() == ((), 1)


@pytest.mark.spec("C10")
def test_requests_are_counted_by_client_also_those_whose_run_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("arbiter.client.request_log.CLIENTS_MOST", 2)
    runs = RequestLog(most=1)
    for name in ("a", "a", "b", "c", "d"):
        runs.note(TICKET, "m", seconds(1), "answered", "", types.Client("t", name))
    usage = runs.usage()
    assert {(u.client.name, u.requests_count) for u in usage} == {("a", 2), ("b", 1), ("", 2)}
    runs.note(TICKET, "m", seconds(1), "answered", "", types.Client("t", "a"))
    runs.forget_told(ev.Renewed(HOLDER, (), usage=usage))
    assert runs.usage() == (ev.Usage(types.Client("t", "a"), 1),)


@pytest.mark.spec("K2")
def test_times_count_all_requests_and_are_told_once() -> None:
    runs = RequestLog(most=1)
    for took_s, outcome in ((0.25, "answered"), (2, "answered"), (0.5, "load_failed")):
        runs.note(TICKET, "a", seconds(took_s), outcome, "")
    told = {times.outcome: times.took for times in runs.times()}
    assert {word: (sum(t.counts), t.sum) for word, t in told.items()} == {
        "answered": (2, 2.25),
        "refused": (1, 0.5),
    }
    renewed = ev.Renewed(HOLDER, (), request_times=runs.times())
    runs.note(TICKET, "a", seconds(4), "answered", "")  # while the heartbeat is on its way
    runs.forget_told(renewed)
    [left] = runs.times()
    assert (left.outcome, sum(left.took.counts), left.took.sum) == ("answered", 1, 4.0)


@pytest.mark.spec("K1", "A5")
async def test_runs_go_with_the_heartbeat_and_again_when_it_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.0)
    heard: list[ev.Renewed] = []
    twice = asyncio.Event()

    async def renew(epoch: Epoch, renewed: ev.Renewed) -> Epoch:
        heard.append(renewed)
        if len(heard) == 1:
            raise RayError("lost on its way")
        twice.set()
        client.session._tasks[1].cancel()
        return epoch

    client = joined_client(FakeArbiter(renew=renew))
    monkeypatch.setattr(client.session, "lose", lambda epoch: None)  # stays in the epoch
    noted(client.request_log, "r")
    async with asyncio.timeout(60):
        await twice.wait()
    assert [[run.request for run in each.runs] for each in heard] == [["r"], ["r"]]
    client.session.epoch = None
    await client.close()


@pytest.mark.spec("K1")
def test_runs_in_a_heartbeat_become_events_without_request_text() -> None:
    driver = CoreDriver()
    driver.at(
        1,
        ev.Renewed(
            HolderId("h"), (), (ev.FinishedRequest(TICKET, "a", seconds(2), "left", "r"),), 7
        ),
    )
    run, dropped = (t for t in driver.logged if t.kind in ("capability_run", "runs_dropped"))
    assert (run.ticket, run.took) == (TICKET, seconds(2))
    assert run.data == {
        "holder": "h", "capability": "text", "model": "a", "outcome": "left", "request_id": "r",
    }  # fmt: skip
    assert dropped.data["dropped"] == 7
