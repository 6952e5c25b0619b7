"""What a client hears of the arbiter, and its leases, over both ways."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from arbiter.core.types import Floor
from arbiter.errors import ArbiterUnavailable, QuotaExceeded, UnknownHostCopy, UnknownModel
from arbiter.leases import Lease
from deployments.client import AsyncClient, Client, asynchronous
from deployments.client import leases as client_leases
from deployments.client.arbiter_rows import (
    Device,
    Event,
    HostCopy,
    ModelResidency,
    Ticket,
    Waiting,
)
from deployments.client.connection import Connection
from deployments.client.typed_errors import FrontUnreachable
from deployments.front.access.auth import Denied
from deployments.front.routes import leases, plan, residency
from deployments.front.status import arbiter_gateway
from tests.support.answering_front import MODEL, AnsweringFront, both
from tests.support.ports import free_port

STATE = {
    "sequence": 7,
    "devices": [
        {"device": "n/cpu:0", "node": "n", "kind": "cpu", "budget_bytes": 9, "charged_bytes": 4,
         "free_bytes": 5, "pressure": "nominal", "uuid": ""}
    ],
    "tickets": [
        {"ticket": "t", "capability": "all", "model": MODEL, "state": "resident", "inflight": 1,
         "charged_bytes": {"n/cpu:0": 4}, "in_state_s": 1.0, "ram_bytes": 0, "lease": None}
    ],
    "queue": [
        {"position": 1, "ticket": "u", "model": "other", "waited_s": 0.5, "predicted_s": None,
         "capability": "all", "left_s": None}
    ],
    "cooldowns": [], "floors": [], "load_times": [], "hours": [],
}  # fmt: skip
PLAN = {
    "answer": "after_evicting", "model": "unknown", "need_bytes": 4, "wait_s": 0.5, "load_s": 1.0,
    "victims": [{"model": MODEL}], "sentences": ["It leaves.", "Then there is room."],
}  # fmt: skip


class Arbiter:
    """Answers each method with what the test gave it."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"state": STATE, "plan": PLAN}
        self.asked: list[tuple[Any, ...]] = []

    async def __call__(self, method: str, *args: Any, within_s: float = 0) -> Any:
        self.asked.append((method, *args))
        answer = self.answers[method]
        if callable(answer):
            answer = await answer(*args)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def arbiter(monkeypatch: pytest.MonkeyPatch) -> Arbiter:
    made = Arbiter()
    for module in (arbiter_gateway, leases, plan, residency):
        monkeypatch.setattr(module, "call_arbiter", made)
    return made


@pytest.fixture
def front(tmp_path: Path, arbiter: Arbiter) -> AnsweringFront:
    return AnsweringFront(tmp_path)


@pytest.fixture
async def clients(front: AnsweringFront) -> AsyncIterator[dict[str, AsyncClient]]:
    async with both(front) as made:
        yield made


@pytest.mark.spec("J7")
async def test_status_and_plan_are_typed(clients: dict[str, AsyncClient], arbiter: Arbiter) -> None:
    for client in clients.values():
        status = await client.status()
        assert status.sequence == 7 and status.plain == STATE
        assert status.devices == (Device("n/cpu:0", "n", "cpu", 9, 4, 5, "nominal"),)
        [ticket] = status.of_model(MODEL)
        assert ticket == Ticket("t", "all", MODEL, "resident", 1, {"n/cpu:0": 4})
        assert status.queue == (Waiting(1, "u", "other", 0.5, None),)
        said = await client.plan(gb=0.5)
        assert (said.answer, said.victims, said.wait_s) == ("after_evicting", (MODEL,), 0.5)
        assert str(said) == "It leaves. Then there is room."
        with pytest.raises(UnknownModel):
            await client.plan("none")


@pytest.mark.spec("D8", "J7")
async def test_where_models_are_is_read_and_set(
    clients: dict[str, AsyncClient], arbiter: Arbiter
) -> None:
    arbiter.answers |= dict.fromkeys(("set_floor", "load", "unload"))
    loading = STATE | {"tickets": [STATE["tickets"][0] | {"state": "loading"}]}
    for client in clients.values():
        arbiter.answers["state"] = STATE
        where = (await client.residency())[MODEL]
        assert where == ModelResidency(MODEL, "all", "device", "cold", 0, None)
        assert await client.unload(MODEL) == ("t",) and arbiter.asked[-1] == ("unload", "t")
        arbiter.answers["state"] = loading
        where = (await client.residency())[MODEL]
        assert (where.level, where.loading_s) == ("loading", 1.0)
        await client.load(MODEL)
        assert arbiter.asked[-1] == ("load", "all", MODEL)
        await client.set_floor(MODEL, "host")
        assert arbiter.asked[-1] == ("set_floor", "all", MODEL, Floor.HOST)
        arbiter.answers["load"] = UnknownModel("none", "", (MODEL,))
        with pytest.raises(UnknownModel):
            await client.load("none")
        arbiter.answers["load"] = None


@pytest.mark.spec("D8", "J7")
async def test_name_with_signs_of_urls_is_the_same_over_http_and_by_handle(
    clients: dict[str, AsyncClient], arbiter: Arbiter
) -> None:
    name = "what is 50%25: é?#"
    arbiter.answers["drop_host_copy"] = True
    for client in clients.values():
        assert await client.drop_host_copy(name) is True
        assert arbiter.asked[-1] == ("drop_host_copy", name)


@pytest.mark.spec("D8", "J7")
async def test_host_copies_are_seen_and_dropped(
    clients: dict[str, AsyncClient], arbiter: Arbiter
) -> None:
    row = {"key": "ab12", "node": "n", "ticket": "lease:@host:c", "models": [["all", MODEL]],
           "users": ["t"], "size_bytes": 9, "is_leaving": False, "socket": ""}  # fmt: skip
    arbiter.answers |= {"state": STATE | {"copies": [row]}, "drop_host_copy": False}
    for client in clients.values():
        [seen] = await client.host_copies()
        assert seen == HostCopy("ab12", "n", (MODEL,), ("t",), 9, False, "")
        assert await client.drop_host_copy("ab12") is False
        assert arbiter.asked[-1] == ("drop_host_copy", "ab12")
        arbiter.answers["drop_host_copy"] = UnknownHostCopy("ab12")
        with pytest.raises(UnknownHostCopy, match="ab12"):
            await client.drop_host_copy("ab12")
        arbiter.answers["drop_host_copy"] = False


@pytest.mark.spec("J7")
async def test_subscriber_goes_on_where_it_was_when_the_stream_breaks(
    clients: dict[str, AsyncClient], arbiter: Arbiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynchronous, "AGAIN_S", 0.01)

    async def log(after: int, wait_s: float) -> Any:
        if after == 8 and ("events", 8, wait_s) not in arbiter.asked[:-1]:
            return ArbiterUnavailable(0.0)  # which breaks the stream
        if after >= 9:
            await asyncio.Event().wait()
        return [{"seq": after + 1, "kind": "model_load", "model": MODEL}]

    arbiter.answers["events"] = log
    for client in clients.values():
        arbiter.asked.clear()
        heard = []
        async for event in client.subscribe():
            heard.append(event)
            if len(heard) == 2:
                break
        assert [event.sequence for event in heard] == [8, 9]
        assert heard[0] == Event(8, "model_load", {"seq": 8, "kind": "model_load", "model": MODEL})


class HandClock:
    """Stands in place of the module `time`."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self._step_s = 1_000.0, step_s

    def monotonic(self) -> float:
        self.now_s += self._step_s
        return self.now_s


@pytest.mark.spec("J7")
async def test_subscriber_goes_on_when_a_stream_breaks_that_was_quiet_for_long(
    clients: dict[str, AsyncClient], arbiter: Arbiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    monkeypatch.setattr(asynchronous, "AGAIN_S", 0.01)
    monkeypatch.setattr(asynchronous, "time", clock)
    steps: dict[int, list[str]] = {}  # by where a subscriber begins

    async def log(after: int, wait_s: float) -> Any:
        mine = steps[after // 100]
        step = mine.pop(0) if mine else "break"
        if step == "quiet":
            clock.now_s += 3 * asynchronous.AWAY_S
            return []
        if step == "break":
            return ArbiterUnavailable(0.0)
        return [{"seq": after + 1, "kind": "model_load"}]

    arbiter.answers["events"] = log
    for begin, client in enumerate(clients.values(), 1):
        steps[begin] = ["quiet", "break", "event"]
        async with aclosing(client.subscribe(100 * begin)) as events:
            assert (await anext(events)).sequence == 100 * begin + 1


@pytest.mark.spec("J7")
async def test_subscriber_goes_on_where_a_front_starts_anew_and_ends_where_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve's proxy answers for the front meanwhile."""
    monkeypatch.setattr(asynchronous, "AGAIN_S", 0.0)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["after"])
        match len(asked):
            case 2:
                return httpx.Response(503, json={"error": {"message": "", "code": "front_lost"}})
            case 4:
                return httpx.Response(401, json={"error": {"message": "", "code": "no_key"}})
        event = json.dumps({"seq": len(asked), "kind": "model_load"})
        return httpx.Response(200, text=f"data: {event}\n\n")

    front = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://localhost")
    async with AsyncClient("http://localhost") as client:
        connection = Connection(front, "the front", client._connection.lease_way)
        monkeypatch.setattr(client, "_connection", connection)
        heard = []
        with pytest.raises(Denied):
            async for event in client.subscribe(0):
                heard.append(event.sequence)
    assert (heard, asked) == ([1, 3], ["0", "1", "1", "3"])


async def test_subscriber_hears_of_a_front_that_is_away_for_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = HandClock(step_s=asynchronous.AWAY_S / 4)
    monkeypatch.setattr(asynchronous, "AGAIN_S", 0.0)
    monkeypatch.setattr(asynchronous, "time", clock)
    async with AsyncClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(FrontUnreachable):
            await anext(client.subscribe(7))
    assert clock.now_s > 1_000 + asynchronous.AWAY_S


class SilentFront:
    """Stands for a handle whose deployment never answers, and for the response of it."""

    def __init__(self) -> None:
        self.respond, self.was_cancelled = self, threading.Event()

    def options(self, *, stream: bool) -> "SilentFront":
        return self

    def remote(self, asked: Any) -> "SilentFront":
        return self

    def __iter__(self) -> Iterator[Any]:
        assert self.was_cancelled.wait(60)
        return iter([])

    def cancel(self) -> None:
        self.was_cancelled.set()


@pytest.mark.spec("A15")
def test_lease_call_by_handle_ends_where_no_front_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front = SilentFront()
    monkeypatch.setattr(client_leases, "HTTP_S", 0.01)
    way = client_leases.by_handle(front, "key")
    with pytest.raises(ConnectionError, match=r"did not answer within 0\.0 s"):
        way.put("lease-1", {"bytes": 1})
    assert front.was_cancelled.is_set()


@pytest.mark.spec("J7", "A15")
async def test_lease_is_held_by_a_key_and_given_back(
    clients: dict[str, AsyncClient], arbiter: Arbiter
) -> None:
    devices = {"n/cpu:0": 1 << 30}

    async def hear(call: Any) -> Any:
        return {"state": "held", "devices_bytes": devices, "node": "n"}

    arbiter.answers |= {"lease": hear, "end_lease": None}
    # Over HTTP alone: by handle a process says its node, which it has in a cluster.
    async with clients["http"].lease(1.0, name="job") as held:
        assert isinstance(held, Lease) and held.devices == devices
    assert ("end_lease", held.id, "default") in arbiter.asked  # a heartbeat may be under way
    arbiter.answers["lease"] = QuotaExceeded("default", 1, 2, 2, "leases")
    with pytest.raises(QuotaExceeded, match="has 1 leases"):
        async with clients["http"].lease(1.0):
            pytest.fail("it was refused")
    with pytest.raises(QuotaExceeded):
        async with clients["handle"].lease(1.0, pid=None):
            pytest.fail("it was refused")


@pytest.mark.spec("J7", "A15")
def test_plain_client_leases_and_subscribes(front: AnsweringFront, arbiter: Arbiter) -> None:
    async def hear(call: Any) -> Any:
        return {"state": "held", "devices_bytes": {}, "node": "n"}

    async def log(after: int, wait_s: float) -> Any:
        return [{"seq": after + 1, "kind": "model_load"}]

    arbiter.answers |= {"lease": hear, "end_lease": None, "events": log}
    with front.serving() as url, Client(url, key=front.key) as client:
        with client.lease(1.0) as held:
            assert held.state == "held"
        assert ("end_lease", held.id, "default") in arbiter.asked
        for event in client.subscribe(after=3):
            assert event.sequence == 4
            break
        assert client.status().sequence == 7


def test_client_takes_the_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBITER_URL", "http://front:9/")
    assert str(AsyncClient()._connection._http.base_url) == "http://front:9"
    assert "authorization" not in AsyncClient(key="")._connection._http.headers
    monkeypatch.setenv("ARBITER_KEY", "arb-1")
    assert AsyncClient()._connection._http.headers["authorization"] == "Bearer arb-1"
