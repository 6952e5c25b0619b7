"""A training job outside Serve and a model trade memory through the arbiter."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from arbiter import leases
from arbiter.client.admin import call_arbiter
from arbiter.core.types import LeaseConditions
from arbiter.errors import DeadlineUnmet, HolderQuarantined, LeaseRefused, QuotaExceeded
from arbiter.protocol.messages import LeaseCall, lease_ticket
from arbiter.units import MIB, Bytes, seconds
from tests.support.engine_host import ROOT
from tests.support.live_arbiter import LiveArbiter, capability, kill, live_arbiter, model
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A15")]
WHOLE = {"lease_tenant": "1 GiB"}


@contextmanager
def training(mib: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds as much."""
    with started(mib) as process:
        await_memory(process)
        yield process


@contextmanager
def started(mib: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that takes as much when `await_memory` asks it to."""
    command = [sys.executable, "-m", "tests.support.trainer", str(mib), "later"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_memory(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin and process.stdout
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"training\n"


def ask(mib: int, **how: Any) -> leases.Lease:
    return leases.ask(mib / 1024, way=leases.RayTransport(), **how)


def held_by_lease(state: dict[str, Any], mib: int) -> bool:
    """Measured, on the books, of a lease."""
    leases = [t for t in state["tickets"] if t["lease"]]
    return bool(leases) and sum(leases[0]["measured_bytes"].values()) >= mib * MIB


async def ended(d: LiveArbiter) -> dict[str, Any]:
    await d.until(lambda s: not any(t["lease"] for t in s["tickets"]))
    return (await d.events("lease_ended"))[-1]


@pytest.mark.spec("A10", "A16")
async def test_a_training_job_and_a_model_trade_memory() -> None:
    chat = {"chat": capability(a=model(200, can_sleep=False))}
    async with live_arbiter(chat, **WHOLE) as d:
        holder = d.holder()
        await holder.ask.remote("a")
        lease = ask(250, name="train", preemptible=True, notice_s=20)
        await asyncio.to_thread(lease.acquire, 60)
        assert await d.engines() == {} and not lease.notice.is_set()
        with training(200) as job:
            lease.on_notice = lambda _: job.terminate()
            lease.measure(job.pid)
            await d.until(lambda s: held_by_lease(s, 200))
            await d.books_are_true()
            assert await holder.ask.remote("a") == 200
            assert lease.notice.is_set() and job.wait(60) == 0
            await asyncio.to_thread(lease.release)
        kinds = [e["kind"] for e in await d.events()]
        last_load = len(kinds) - kinds[::-1].index("ticket_granted")
        assert kinds.index("lease_granted") < kinds.index("lease_ended") < last_load
        assert (await ended(d))["reason"] == "swap"
        await d.books_are_true()


@pytest.mark.spec("A19")
async def test_the_lease_of_a_job_that_dies_is_reclaiming_within_two_seconds() -> None:
    async with live_arbiter(**WHOLE) as d:
        lease = ask(250, name="train")
        await asyncio.to_thread(lease.acquire)
        with training(200) as job:
            lease.measure(job.pid)
            await d.until(lambda s: held_by_lease(s, 200))
            job.kill()
            state = await d.soon(
                lambda s: not any(t["state"] == "resident" for t in s["tickets"]), within_s=2
            )
            assert {t["state"] for t in state["tickets"]} <= {"reclaiming"}
            assert (await ended(d))["reason"] == "lost"
        assert await asyncio.to_thread(lease.ended.wait, 60)


@pytest.mark.spec("A10", "K1")
async def test_a_process_that_keeps_its_memory_is_waited_for_and_not_killed() -> None:
    async with live_arbiter(**WHOLE) as d:
        lease = ask(250, name="hoarder")
        await asyncio.to_thread(lease.acquire)
        with started(200) as job:
            lease.measure(job.pid)  # what it holds already is none of the lease's
            await asyncio.to_thread(await_memory, job)
            await d.until(lambda s: held_by_lease(s, 200))
            await asyncio.to_thread(lease.release)
            [told] = await eventually(lambda: d.events("quarantine"))
            state = await d.state()
            [kept] = state["tickets"]
            assert (kept["ticket"], kept["state"]) == (told["ticket"], "reclaiming")
            assert told["size_bytes"] >= 200 * MIB and told["took_s"] >= 5
            assert held_by_lease(state, 200) and job.poll() is None
            with pytest.raises(HolderQuarantined):
                await asyncio.to_thread(ask(1, name="again").acquire)
            job.terminate()
            await ended(d)


@pytest.mark.spec("K1")
async def test_lease_beyond_the_cap_or_the_longest_term_is_refused_with_the_bound() -> None:
    async with live_arbiter(lease_tenant="200 MiB", lease_term_most_s=60) as d:
        with pytest.raises(LeaseRefused, match="at most 60"):
            await asyncio.to_thread(ask(10, term_s=61.0).acquire)
        lease = await asyncio.to_thread(ask(150, term_s=2.0, notice_s=0.0).acquire)
        with pytest.raises(QuotaExceeded, match="200"):
            await asyncio.to_thread(ask(100, term_s=2.0).acquire)
        assert (await ended(d))["reason"] == "term"
        [overdue] = await d.events("lease_overdue")  # it was not given back
        assert overdue["ticket"] == lease_ticket("default", lease.id)
        assert overdue["size_bytes"] == 150 * MIB
        assert await asyncio.to_thread(lease.ended.wait, 60)


@pytest.mark.spec("A18")
async def test_a_lease_survives_the_arbiter_and_is_drained_by_hand() -> None:
    async with live_arbiter(**WHOLE) as d:
        lease = ask(100, name="notebook", notice_s=30)
        await asyncio.to_thread(lease.acquire)
        epoch = (await d.state())["epoch"]
        kill(await d.arbiter_pid())
        state = await d.until(lambda s: s["epoch"] > epoch and s["tickets"])
        assert [(t["ticket"], t["state"]) for t in state["tickets"]] == [
            (f"lease:default:{lease.id}", "resident")
        ]
        with pytest.raises(DeadlineUnmet):
            await asyncio.to_thread(ask(350, name="second").acquire, 0.5)
        with pytest.raises(LeaseRefused):
            await asyncio.to_thread(ask(10, pid=4_000_000).acquire)
        await call_arbiter("unload", lease_ticket("default", lease.id))
        assert await asyncio.to_thread(lease.notice.wait, 60)
        assert lease.reason == "manual" and lease.left_s is not None
        await asyncio.to_thread(lease.release)
        assert (await ended(d))["reason"] == "manual"


@pytest.mark.spec("B7")
async def test_largest_fit_of_a_device_is_what_may_be_granted_there_now() -> None:
    async with live_arbiter(**WHOLE) as d:
        [before] = [x for x in (await d.state())["devices"] if x["kind"] == "cpu"]
        fits_mib = before["largest_fit_bytes"] // MIB
        assert 0 < fits_mib <= 400
        lease = await asyncio.to_thread(ask(fits_mib).acquire, 60)
        [after] = [x for x in (await d.state())["devices"] if x["kind"] == "cpu"]
        assert after["largest_fit_bytes"] < MIB
        with pytest.raises(DeadlineUnmet):
            await asyncio.to_thread(ask(1).acquire, 0.5)
        await asyncio.to_thread(lease.release)


@pytest.mark.spec("A6")
async def test_freeing_leaves_a_model_in_use_where_it_is_and_lends_the_rest() -> None:
    """More is asked for than there is; what is idle leaves, and returns afterwards."""
    table = {"chat": capability(a=model(100), b=model(100, can_sleep=False))}
    terms = LeaseConditions("default", seconds(600), seconds(0), frees=True)
    call = LeaseCall("hold", Bytes(350 * MIB), terms, "hold", seen="queued", wait=seconds(10))
    async with live_arbiter(table) as d:
        holder = d.holder()
        assert await holder.ask.remote("b") == 200
        used = await holder.keep.remote("a")
        before = await d.until(
            lambda s: {t["model"]: t["inflight"] for t in s["tickets"]} == {"a": 1, "b": 0}
        )
        engine = (await d.engines())[used]
        answer = await call_arbiter("free", call, True)
        assert [(t["model"], t["why"]) for t in answer["plan"]["stays"]] == [
            ("a", "it is in use (1 in flight)")
        ]
        assert answer["lease"]["state"] == "held"
        charged = {bool(t["lease"]): t["charged_bytes"] for t in (await d.state())["tickets"]}
        [cpu] = [x for x in before["devices"] if x["kind"] == "cpu"]
        rest = cpu["budget_bytes"] - cpu["foreign_bytes"] - charged[False][cpu["device"]]
        assert charged[True] == {cpu["device"]: rest}
        assert await holder.ask.remote("a") == 200 and await d.engines() == {used: engine}
        await call_arbiter("end_lease", "hold", "default")
        await d.until(lambda s: {t["model"]: t["state"] for t in s["tickets"]} == {
            "a": "resident", "b": "resident"
        })  # fmt: skip
        assert (await d.engines())[used] == engine
        assert {e["model"] for e in await d.events("eviction")} == {"b"}
        await d.books_are_true()


async def test_memory_freed_for_a_term_is_lent_until_that_is_over_and_what_left_returns() -> None:
    terms = LeaseConditions("default", seconds(2), seconds(0), frees=True)
    call = LeaseCall("hold", Bytes(350 * MIB), terms, "hold", seen="queued", wait=seconds(10))
    async with live_arbiter({"chat": capability(a=model(100, can_sleep=False))}) as d:
        assert await d.holder().ask.remote("a") == 200
        await d.until(lambda s: s["tickets"][0]["idle_s"] is not None)
        answer = await call_arbiter("free", call, True)
        assert [victim["model"] for victim in answer["plan"]["victims"]] == ["a"]
        end = await ended(d)
        assert (end["ticket"], end["reason"]) == (lease_ticket("default", "hold"), "term")
        await d.until(lambda s: {t["model"]: t["state"] for t in s["tickets"]} == {"a": "resident"})
        told = [(e["kind"], e.get("reason")) for e in await d.events() if e["kind"] in OF_A_HOLD]
        assert told[:3] == [("model_load", None), ("eviction", "free"), ("lease_granted", None)]
        assert told[3] == ("eviction", "term")  # of the lease
        assert {*told[4:6]} == {("lease_ended", "term"), ("freed_return", None)}
        assert told[6:] == [("model_load", None)]
        await d.books_are_true()


OF_A_HOLD = frozenset({"model_load", "eviction", "lease_granted", "lease_ended", "freed_return"})
