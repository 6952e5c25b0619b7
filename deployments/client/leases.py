"""Leases through the front, for the thread that beats for one: over HTTP or by handle (A15)."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from arbiter.leases import HTTP_S, Plain
from arbiter.response_errors import may_pass
from deployments.client.typed_errors import error_of_response
from deployments.config.proxy_trust import httpx_options
from deployments.front.by_handle import HandleRequest

Reply = tuple[int, dict[str, str], bytes]  # status, headers, body
Send = Callable[[str, str, bytes, float], Reply]  # of a method, a path, a body and seconds


class FrontLeases:
    """A LeaseTransport. Raises the same typed errors as the client does."""

    def __init__(self, send: Send, node: Callable[[], str] | None = None) -> None:
        """`node`: of this process, where it is one of the cluster's."""
        self._send, self._node = send, node

    def put(self, lease: str, body: Plain) -> Plain:
        """Raises RequestError, ConnectionError where the arbiter is away."""
        is_here = self._node is not None and body.get("pid") and not body.get("node")
        own = {"node": self._node()} if is_here and self._node else {}
        reply = self._ask("PUT", lease, {**body, **own}, body.get("wait_s", 0.0))
        if not isinstance(reply.get("state"), str):
            raise ConnectionError(f"no answer of the arbiter's: {reply!r}")
        return reply

    def delete(self, lease: str, tenant: str | None) -> None:
        """Raises as `put`. The key says whose it is, not `tenant`."""
        self._ask("DELETE", lease, None, 0.0)

    def _ask(self, method: str, lease: str, body: Plain | None, wait_s: float) -> Plain:
        raw = b"" if body is None else json.dumps(body).encode()
        status, headers, reply = self._send(
            method, f"/arbiter/leases/{lease}", raw, HTTP_S + wait_s
        )
        if status >= 400:
            refusal = error_of_response(status, headers, reply)
            raise ConnectionError(str(refusal)) if may_pass(refusal) else refusal
        try:
            answer: Plain = json.loads(reply)
        except ValueError as error:
            raise ConnectionError(f"no answer of the arbiter's: {reply[:500]!r}") from error
        return answer


def over_http(url: str, key: str) -> FrontLeases:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    options = httpx_options(url)

    def send(method: str, path: str, body: bytes, within_s: float) -> Reply:
        try:
            answer = httpx.request(
                method, url + path, content=body, headers=headers, timeout=within_s, **options
            )
        except httpx.HTTPError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        return answer.status_code, dict(answer.headers), answer.content

    return FrontLeases(send)


def _read(response: Any, within_s: float) -> list[Any]:
    """All parts of a response by handle, in a thread of its own, because reading it there has no
    bound. Raises ConnectionError after `within_s`, and what the response raises."""
    reading = ThreadPoolExecutor(1, "lease-call")
    try:
        return reading.submit(list, response).result(within_s)
    except TimeoutError as error:
        response.cancel()  # which ends the thread
        raise ConnectionError(f"the front did not answer within {within_s:.1f} s") from error
    finally:
        reading.shutdown(wait=False)


def by_handle(handle: Any, key: str) -> FrontLeases:
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from arbiter.protocol import ray_internals

    start = handle.options(stream=True).respond.remote
    headers = (
        ("host", "localhost"),
        ("content-type", "application/json"),
        ("authorization", f"Bearer {key}"),
    )

    def send(method: str, path: str, body: bytes, within_s: float) -> Reply:
        try:
            head, *rest = _read(start(HandleRequest(method, path, headers, body)), within_s)
        except (RayError, RayServeException) as error:
            raise ConnectionError(str(error)) from error
        return head.status, head.headers, b"".join(rest)

    return FrontLeases(send, ray_internals.own_node)
