"""Lease device memory from outside Serve: a training job, a notebook, any program (A15).

    with lease(gb=2, name="training") as held:
        while not held.notice.is_set():   # the memory is needed: save, and leave
            train_one_step()

Blocks until the memory is there; a thread beats for it and listens for notice. Inside the Ray
cluster it asks the arbiter directly, elsewhere the front over HTTP with a key of scope `lease`.
"""

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from arbiter.errors import ArbiterUnavailable, LeaseRefused, RequestError
from arbiter.loopback import is_loopback
from arbiter.response_errors import error_of_response, kinds, may_pass
from arbiter.units import DEFAULT_TENANT

URL = "http://127.0.0.1:8000"
WAIT_S = 2.0  # one call; the arbiter gives a lease up after 10 s without one
AGAIN_S = 0.5  # between calls that did not get through; a restart takes 1-2 s
GIVE_UP_S = 30.0  # without any answer before the grant; three times the longest outage expected
HTTP_S = 5.0  # beyond what the call itself waits; both together are less than the lapse
LAPSE_S = 10.0  # without a heartbeat through, until the arbiter has said its bound (lease_lapse)
LEAST_S = 0.001  # left of a term or a wait that is over; none at all would be refused as a mistake
GIB = 1 << 30

Plain = dict[str, Any]


class LeaseLost(Exception):
    """Says that the lease has ended: its term is over, its notice ran out, or its heartbeats did
    not come through for too long. The memory may belong to another ticket by now."""

    def __init__(self, lease: str, reason: str) -> None:
        super().__init__(lease, reason)
        self.lease, self.reason = lease, reason

    def __str__(self) -> str:
        return f"lease {self.lease} is over ({self.reason}); give its memory back"


class LeaseTransport(Protocol):
    """Calls the arbiter. Raises RequestError when it refuses, OSError when it is away."""

    def put(self, lease: str, body: Plain) -> Plain: ...
    def delete(self, lease: str, tenant: str | None) -> None: ...


class HttpTransport:
    """Calls the front over HTTP. `url`: else ARBITER_URL, else port 8000 of this machine. `key`: of
    scope `lease`; else ARBITER_KEY. A refusal is raised as the error of its code, with the status
    and the front's message; as LeaseRefused where the code is none of the arbiter's."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self._url = (url or os.environ.get("ARBITER_URL", URL)).rstrip("/")
        self._key = key or os.environ.get("ARBITER_KEY", "")

    def put(self, lease: str, body: Plain) -> Plain:
        return self._send("PUT", lease, body)

    def delete(self, lease: str, tenant: str | None) -> None:
        self._send("DELETE", lease, None)  # the key says whose it is

    def _send(self, method: str, lease: str, body: Plain | None) -> Plain:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        address = f"{self._url}/arbiter/leases/{lease}"
        request = urllib.request.Request(address, data, headers, method=method)
        wait_s = (body or {}).get("wait_s", 0.0)
        # A key for this machine goes to no proxy that the environment names.
        is_here = is_loopback(urlsplit(self._url).hostname or "")
        opens = _direct().open if is_here else urllib.request.urlopen
        try:
            try:
                with opens(request, timeout=HTTP_S + wait_s) as answer:
                    return _answer(answer.read())
            except urllib.error.HTTPError as error:
                raise _refusal(error) from None
        except http.client.HTTPException as error:
            raise ConnectionError(f"{address} broke off: {error!r}") from error


@cache
def _direct() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _refusal(answer: urllib.error.HTTPError) -> Exception:
    """Returns the error of a response. A refusal of the arbiter has a code; a failure without one
    may pass, so it counts as an arbiter that is away."""
    headers = {name.lower(): value for name, value in answer.headers.items()}
    refusal = error_of_response(answer.code, headers, answer.read(), _kind_of)
    return ConnectionError(str(refusal)) if may_pass(refusal) else refusal


def _kind_of(code: str, status: int) -> type[RequestError]:
    return kinds().get(code, LeaseRefused)


def _answer(body: bytes) -> Plain:
    """Returns the lease state of a response. Raises ConnectionError for what no arbiter said: a
    proxy in between, or half an answer."""
    try:
        reply: Plain = json.loads(body)
        if isinstance(reply["state"], str):
            return reply
    except (ValueError, KeyError, TypeError):
        pass
    raise ConnectionError(f"no answer of the arbiter's: {body[:500]!r}")


class RayTransport:
    """Calls the arbiter from within the cluster. The process is measured on its own node."""

    def put(self, lease: str, body: Plain) -> Plain:
        from arbiter.protocol import ray_internals
        from arbiter.protocol.json_codec import plain
        from arbiter.protocol.lease_schema import call_of

        own = {"node": ray_internals.own_node()} if body.get("pid") and not body.get("node") else {}
        reply: Plain = plain(self._call("lease", call_of(lease, {**body, **own})))
        return reply

    def delete(self, lease: str, tenant: str | None) -> None:
        self._call("end_lease", lease, tenant or DEFAULT_TENANT)

    def _call(self, method: str, *arguments: Any) -> Any:
        import ray

        from arbiter.client.admin import find_arbiter
        from arbiter.protocol.ray_internals import raised_there

        try:
            handle = find_arbiter()
            if handle is None:
                raise ConnectionError("no arbiter")
            return ray.get(getattr(handle, method).remote(*arguments), timeout=HTTP_S + WAIT_S)
        except ray.exceptions.RayError as error:
            if refusal := raised_there(error, RequestError):
                raise refusal from None
            raise ConnectionError(str(error)) from error


def transport() -> LeaseTransport:
    """Returns the way to the arbiter: Ray where this process is connected and ARBITER_URL is not
    set, else HTTP."""
    if "ARBITER_URL" not in os.environ and is_in_ray():
        return RayTransport()
    return HttpTransport()


def is_in_ray() -> bool:
    import sys

    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized())


@dataclass(eq=False)
class Lease:
    """Keeps one lease of this process, by heartbeats. One thread uses it; any may wait for `notice`
    and `ended`."""

    name: str
    body: Plain  # what is said of it with each call
    way: LeaseTransport
    on_notice: Callable[["Lease"], None] | None = None
    id: str = field(default_factory=lambda: f"lease-{uuid.uuid4().hex[:10]}")
    devices: dict[str, int] = field(default_factory=dict)  # bytes by device
    reason: str = ""  # why it is to leave, or has ended
    gone_by_s: float | None = None  # monotonic; when notice runs out
    notice: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    state: str = ""
    lapse_s: float = LAPSE_S  # the lease is over after so long without an answer
    _held_since_s: float | None = None  # monotonic
    _thread: threading.Thread | None = None
    _taking: threading.RLock = field(default_factory=threading.RLock)  # two may call at once

    def acquire(self, within_s: float | None = None) -> "Lease":
        """Waits for the memory, at most `within_s` seconds. Raises LeaseRefused, QuotaExceeded,
        NeverFits, DeadlineUnmet and other refusals of `arbiter.errors`, the same by each way;
        LeaseLost when the lease ended while it waited; ArbiterUnavailable after GIVE_UP_S without
        an answer."""
        began = answered_s = time.monotonic()
        while self.state in ("", "queued") and not self.ended.is_set():  # or another gave it up
            if within_s is not None:  # an arbiter that begins anew counts from this call
                waited_s = time.monotonic() - began
                self.body["deadline_s"] = max(LEAST_S, within_s - waited_s)
            try:
                self._take_reply(self.way.put(self.id, self._heartbeat()))
                answered_s = time.monotonic()
            except (OSError, ArbiterUnavailable):
                if time.monotonic() - answered_s > GIVE_UP_S:
                    raise ArbiterUnavailable(time.monotonic() - began) from None
                time.sleep(AGAIN_S)
            except BaseException:
                self.release()
                raise
        if self.ended.is_set():
            raise LeaseLost(self.id, self.reason)
        self._thread = threading.Thread(target=self._beat, name=self.id, daemon=True)
        self._thread.start()
        return self

    def measure(self, pid: int) -> None:
        """Has the memory of process `pid` and its children counted on the lease. The arbiter is
        told at once, because until it knows, what the process holds is charged beside the lease. A
        refusal ends the lease."""
        self.body["pid"] = pid
        if self._thread is None or self.ended.is_set():
            return  # with the first call
        try:
            self._take_reply(self.way.put(self.id, {**self._heartbeat(), "wait_s": 0.0}))
        except (OSError, ArbiterUnavailable):
            return  # the next beat says it again
        except RequestError as error:
            self._end(str(error))

    def check(self) -> None:
        """Raises LeaseLost once it is over."""
        if self.ended.is_set():
            raise LeaseLost(self.id, self.reason)

    @property
    def left_s(self) -> float | None:
        """Seconds until the memory must be back; None before notice."""
        return None if self.gone_by_s is None else max(0.0, self.gone_by_s - time.monotonic())

    def release(self) -> None:
        """Gives the lease back; idempotent. Free the memory first: what this process still holds
        stays charged until it is seen free. Raises nothing where the arbiter is away, because a
        lease without heartbeats ends by itself."""
        self.ended.set()
        try:
            self.way.delete(self.id, self.body.get("tenant"))
        except (OSError, RequestError):
            return  # without heartbeats it ends by itself

    def _heartbeat(self) -> Plain:
        """Returns the body of a call. Once the lease is held, its term is what is left of it: an
        arbiter that begins anew takes the term as it is said."""
        body = {**self.body, "devices": self.devices, "seen": self.state, "wait_s": WAIT_S}
        if self._held_since_s is not None:
            held_s = time.monotonic() - self._held_since_s
            body["term_s"] = max(LEAST_S, self.body["term_s"] - held_s)
        return body

    def _beat(self) -> None:
        answered_s = time.monotonic()
        try:
            while not self.ended.is_set():
                try:
                    self._take_reply(self.way.put(self.id, self._heartbeat()))
                    answered_s = time.monotonic()
                except (OSError, ArbiterUnavailable) as away:
                    if time.monotonic() - answered_s > self.lapse_s:
                        self._end(f"no heartbeat came through for {self.lapse_s:.0f} s: {away}")
                    self.ended.wait(AGAIN_S)
                except RequestError as error:
                    self._end(str(error))
        finally:
            if not self.ended.is_set():
                self._end("its heartbeats failed")

    def _take_reply(self, reply: Plain) -> None:
        with self._taking:
            self._apply_reply(reply)

    def _apply_reply(self, reply: Plain) -> None:
        if self.ended.is_set():
            return
        self.state, self.reason = reply["state"], reply.get("reason") or self.reason
        self.devices = reply.get("devices_bytes") or self.devices
        self.lapse_s = reply.get("lapse_s") or self.lapse_s
        if self.body.get("node") is None and reply.get("node"):
            self.body["node"] = reply["node"]
        if self.state == "held" and self._held_since_s is None:
            self._held_since_s = time.monotonic()
        if self.state == "leaving" and not self.notice.is_set():
            self._warn(reply.get("left_s"))
            self.notice.set()
            if self.on_notice:
                self.on_notice(self)
        if self.state == "ended":
            self._end(self.reason or "ended")

    def _warn(self, left_s: float | None) -> None:
        """Notes when the memory must be back: `left_s` from now, or the agreed notice if None."""
        grace_s = self.body["notice_s"] if left_s is None else left_s
        self.gone_by_s = time.monotonic() + grace_s

    def _end(self, reason: str) -> None:
        self.reason, self.state = reason, "ended"
        if self.gone_by_s is None:
            self._warn(None)
        self.notice.set()
        self.ended.set()


def ask(
    gb: float,
    *,
    name: str = "",
    preemptible: bool = False,
    notice_s: float = 10.0,
    term_s: float = 3600.0,
    tenant: str | None = None,
    node: str | None = None,
    pid: int | None = None,
    on_notice: Callable[[Lease], None] | None = None,
    way: LeaseTransport | None = None,
) -> Lease:
    """Makes a lease of `gb` GiB (2**30 bytes), which `acquire` then waits for.

    `term_s`: seconds from the grant until it ends. `preemptible`: the arbiter may ask for the
    memory before that, for another ticket, `notice_s` seconds ahead; `on_notice` is called then,
    once, in the heartbeat's thread. `node`: where, if there are several. `pid`: the process whose
    memory it is; without it, what becomes foreign on the lease's devices counts on the lease.
    `tenant`: within the cluster only, because over HTTP the key says it. `way`: the way to the
    arbiter, by default `transport()`."""
    body: Plain = {
        "bytes": round(gb * GIB),
        "name": name or f"pid-{os.getpid()}",
        "term_s": term_s,
        "notice_s": notice_s,
        "preemptible": preemptible,
        "node": node,
        "pid": pid,
    }
    if tenant is not None:
        body["tenant"] = tenant
    return Lease(name, body, way or transport(), on_notice)


@contextmanager
def lease(gb: float, *, within_s: float | None = None, **how: Any) -> Iterator[Lease]:
    """Holds a lease for the length of a `with` block; `how` as for `ask`, errors as for
    `Lease.acquire`. This process is measured, so allocate in it what the lease is for."""
    held = ask(gb, **{"pid": os.getpid(), **how}).acquire(within_s)
    try:
        yield held
    finally:
        held.release()
