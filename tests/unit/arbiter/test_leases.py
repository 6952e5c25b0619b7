"""The client of a lease: what passes by itself, what is an answer, and how long it goes on."""

import http.client
import io
import json
import pickle
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from arbiter import leases
from arbiter.client import admin
from arbiter.errors import (
    ArbiterClosing,
    DeadlineUnmet,
    HolderQuarantined,
    LeaseRefused,
    NeverFits,
    QuotaExceeded,
    RequestError,
    UnderPressure,
)
from arbiter.units import Bytes, TicketId
from tests.support.fake_arbiter import FakeArbiter
from tests.support.scripted_front import ScriptedFront

HELD = {"state": "held", "devices_bytes": {"n/cpu:0": 1 << 30}, "node": "n"}
pytestmark = pytest.mark.spec("A15")


class ScriptedTransport:
    """A door that answers as told; `bodies` are what was said through it."""

    def __init__(self, answer: Callable[[int], dict[str, Any]]) -> None:
        self.answer, self.bodies = answer, []  # type: ignore[var-annotated]

    def put(self, lease: str, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        return self.answer(len(self.bodies))

    def delete(self, lease: str, tenant: str | None) -> None: ...


def raising(error: Exception) -> Callable[..., Any]:
    def answer(*_: object, **__: object) -> Any:
        raise error

    return answer


def held(answer: Callable[[int], dict[str, Any]]) -> tuple[leases.Lease, ScriptedTransport]:
    """Acquired; from the second call on the door answers so."""
    way = ScriptedTransport(lambda n: HELD if n == 1 else answer(n))
    return leases.ask(1, notice_s=20, way=way).acquire(), way


class HalfBody(io.BytesIO):
    """The body of an answer that breaks off."""

    def read(self, *_: object) -> bytes:
        raise http.client.IncompleteRead(self.getvalue())


def failure(status: int, body: bytes | io.BytesIO) -> urllib.error.HTTPError:
    read = body if isinstance(body, io.BytesIO) else io.BytesIO(body)
    return urllib.error.HTTPError("http://x", status, "no", Message(), read)


def refusal(code: str) -> bytes:
    return json.dumps({"error": {"message": "why", "code": code}}).encode()


@pytest.mark.parametrize(
    "error",
    [
        failure(500, b"Internal Server Error"),
        failure(502, b"<html>"),
        failure(503, refusal("arbiter_unavailable")),
        failure(503, HalfBody(b"{")),
        http.client.IncompleteRead(b"{"),
        http.client.BadStatusLine("x"),
    ],
)
def test_transient_failure_of_a_lease_call_is_retried(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", raising(error))
    with pytest.raises(ConnectionError):
        leases.HttpTransport("http://x").put("l", {})


@pytest.mark.spec("L1")
def test_key_for_this_machine_goes_to_no_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front = ScriptedFront()
    front.says("PUT", "/arbiter/leases/l", HELD)
    with front.serving() as url, socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert leases.HttpTransport(url, "arb-mine").put("l", {}) == HELD
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert front.requests[0].headers["authorization"] == "Bearer arb-mine"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"{}", b'{"state": "he'])
def test_answer_that_is_not_a_lease_state_is_retried(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(body))
    with pytest.raises(ConnectionError):
        leases.HttpTransport("http://x").put("l", {})


@pytest.mark.parametrize("kind", [UnderPressure, HolderQuarantined, ArbiterClosing])
def test_lease_refusal_with_503_is_raised_and_not_retried(
    kind: type[RequestError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", raising(failure(503, refusal(kind.code))))
    with pytest.raises(kind, match="why"):
        leases.HttpTransport("http://x").put("l", {})


REFUSALS = [
    LeaseRefused("term", "is too long"),
    QuotaExceeded("t", 1, 2, 2, "leases"),
    NeverFits(TicketId("l"), Bytes(9), Bytes(8)),
    DeadlineUnmet(TicketId("l"), 1.0, 3.0),
]


@pytest.mark.parametrize("error", REFUSALS, ids=[error.code for error in REFUSALS])
def test_refusal_has_the_type_over_http_that_it_has_within_the_cluster(error: RequestError) -> None:
    front = ScriptedFront()
    said = "PUT", "/arbiter/leases/l", error.status_code, error.code, str(error)
    front.refuses(*said, **{"retry-after": "3"})
    with front.serving() as url, pytest.raises(type(error)) as caught:
        leases.HttpTransport(url, "k").put("l", {})
    told = caught.value
    assert (str(told), told.status_code, told.code) == (str(error), error.status_code, error.code)
    assert told.retry_after_s == 3.0
    again = pickle.loads(pickle.dumps(told))
    assert (type(again), again) == (type(told), told)


def test_refusal_that_is_none_of_the_arbiters_is_a_refused_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", raising(failure(401, refusal("no_such_key"))))
    with pytest.raises(LeaseRefused, match="why"):
        leases.HttpTransport("http://x").put("l", {})


def test_lease_client_without_heartbeats_ends_with_its_notice_left() -> None:
    """After the lapse that the arbiter said with its last answer."""
    away = raising(ConnectionError("away"))
    way = ScriptedTransport(lambda n: {**HELD, "lapse_s": 0.01} if n == 1 else away())
    lease = leases.ask(1, notice_s=20, way=way).acquire()
    assert lease.ended.wait(60) and lease.notice.is_set()
    assert "away" in lease.reason and lease.left_s is not None and 5 < lease.left_s <= 20


def test_notice_without_a_time_leaves_the_notice_that_was_agreed() -> None:
    lease, _ = held(lambda _: {**HELD, "state": "leaving", "reason": "swap", "left_s": None})
    assert lease.notice.wait(60) and lease.left_s is not None and lease.left_s > 5
    lease.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_heartbeats_that_fail_for_a_bug_end_the_lease_for_all_to_see() -> None:
    lease, _ = held(raising(KeyError("bug")))
    assert lease.ended.wait(60) and lease.reason and lease.left_s is not None
    for thread in [t for t in threading.enumerate() if t.name == lease.id]:
        thread.join(60)  # so that its end is told within this test


def test_pid_to_measure_is_sent_before_the_next_heartbeat() -> None:
    stop = threading.Event()

    def slow(_: int) -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            stop.wait(10)
        return HELD

    lease, way = held(slow)
    lease.measure(77)
    assert [b["wait_s"] for b in way.bodies if b["pid"] == 77] == [0.0]
    lease.release()
    stop.set()


def test_a_process_that_is_refused_ends_the_lease() -> None:
    lease, _ = held(raising(LeaseRefused("pid", "77 is no process")))
    lease.measure(77)
    assert lease.ended.wait(60) and "no process" in lease.reason


def test_lease_heartbeat_repeats_the_rest_of_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = leases.ask(1, term_s=100, way=ScriptedTransport(lambda _: HELD))
    assert lease._heartbeat()["term_s"] == 100
    now = 50.0
    monkeypatch.setattr(leases.time, "monotonic", lambda: now)
    lease._take_reply(HELD)
    now = 90.0
    assert lease._heartbeat()["term_s"] == 60
    now = 900.0
    assert 0 < lease._heartbeat()["term_s"] < 1


@pytest.mark.spec("A18")
def test_wait_for_a_lease_is_bounded_from_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arbiter that begins anew meanwhile takes the deadline as it is sent."""
    now = 50.0

    def answer(number: int) -> dict[str, Any]:
        nonlocal now
        now += 20
        return {"state": "queued"} if number < 3 else HELD

    monkeypatch.setattr(leases.time, "monotonic", lambda: now)
    way = ScriptedTransport(answer)
    leases.ask(1, way=way).acquire(within_s=30).release()
    first, second, third = (body["deadline_s"] for body in way.bodies[:3])
    assert (first, second) == (30, 10) and 0 < third < 1


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (RayTaskError("lease", "far away", QuotaExceeded("t", 1, 2, 2, "bytes")), QuotaExceeded),
        (RayTaskError("lease", "far away", KeyError("a bug")), ConnectionError),
        (RayActorError(), ConnectionError),
        (GetTimeoutError("late"), ConnectionError),
    ],
    ids=["refused", "failed", "died", "late"],
)
def test_ray_transport_raises_refusals_and_treats_other_errors_as_transient(
    monkeypatch: pytest.MonkeyPatch, error: Exception, heard: type[Exception]
) -> None:
    arbiter = FakeArbiter(lease=sent, end_lease=sent)  # type: ignore[arg-type]
    monkeypatch.setattr(admin, "find_arbiter", lambda: arbiter)
    monkeypatch.setattr("ray.get", raising(error))
    with pytest.raises(heard):
        leases.RayTransport().put("job", {"bytes": 1})
    with pytest.raises(heard):
        leases.RayTransport().delete("job", None)


def test_ray_transport_without_an_arbiter_raises_connection_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin, "find_arbiter", lambda: None)
    with pytest.raises(ConnectionError):
        leases.RayTransport().put("job", {"bytes": 1})


def sent(*_: object) -> None:
    """Stands for a reference; `ray.get` is the test's."""
