"""A front that answers as a test says, in this process or behind a socket."""

import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # with its query
    headers: dict[str, str]  # names in lower case
    body: Any  # read from JSON; None where there was none


@dataclass
class ScriptedFront:
    """By method and path; what it was not told of, it does not know."""

    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    def says(self, method: str, path: str, value: object, status: int = 200) -> None:
        self.answers[method, path] = Answer(status, {}, json.dumps(value).encode())

    def refuses(
        self, method: str, path: str, status: int, code: str, message: str, **headers: str
    ) -> None:
        """In the form that the real one refuses in."""
        body = json.dumps({"error": {"message": message, "code": code}}).encode()
        self.answers[method, path] = Answer(status, headers, body)

    def streams(self, path: str, text: str) -> None:
        headers = {"content-type": "text/event-stream"}
        self.answers["GET", path] = Answer(200, headers, text.encode())

    def asked(self) -> list[tuple[str, str]]:
        return [(request.method, request.path) for request in self.requests]

    def answer(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        self.requests.append(Request(method, path, headers, json.loads(raw) if raw else None))
        unknown = Answer(404, {}, b'{"detail": "Not Found"}')
        return self.answers.get((method, path), unknown)

    def transport(self) -> httpx.MockTransport:
        def handle(request: httpx.Request) -> httpx.Response:
            path = request.url.raw_path.decode()
            answer = self.answer(request.method, path, dict(request.headers), request.content)
            return httpx.Response(answer.status, headers=answer.headers, content=answer.body)

        return httpx.MockTransport(handle)

    @contextmanager
    def serving(self, tls: ssl.SSLContext | None = None) -> Iterator[str]:
        """Its address, for as long as it listens; over https with `tls`."""
        script = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                answer = script.answer(self.command, self.path, headers, raw)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer.body)))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has left
                    self.end_headers()
                    self.wfile.write(answer.body)

            do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the test reads `requests`."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            scheme = "http" if tls is None else "https"
            yield f"{scheme}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join(60)


class LeaseFront(ScriptedFront):
    """Grants every lease, and tells its holder of another state when the test sets one."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.more = "held", dict[str, Any]()
        self._changed = threading.Condition()

    def becomes(self, state: str, **more: Any) -> None:
        with self._changed:
            self.state, self.more = state, more
            self._changed.notify_all()

    def answer(self, method: str, path: str, headers: dict[str, str], raw: bytes) -> Answer:
        super().answer(method, path, headers, raw)
        lease = path.rpartition("/")[2]
        if method == "DELETE":
            return Answer(200, {}, json.dumps({"lease": lease, "state": "ended"}).encode())
        said = json.loads(raw)
        with self._changed:
            self._changed.wait_for(lambda: said["seen"] != self.state, said["wait_s"])
            devices = {"n/cpu:0": said["bytes"]}
            found = {"state": self.state, "devices_bytes": devices, "node": "n", **self.more}
        return Answer(200, {}, json.dumps(found).encode())
