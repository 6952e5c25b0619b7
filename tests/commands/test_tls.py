"""The proxies for TLS of docs/deploy.md, as they stand there, in Caddy and nginx themselves."""

import re
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deployments.front.middleware.body_limit import MAX_FILE_FORM_BYTES
from tests.support.tls_proxies import ANSWERED_S, NAME, Proxy, block, proxy_before

UPLOAD_BYTES = 40 << 20  # nginx takes 1 MiB where nothing is said
PIECE = bytes(1 << 20)
EVENT = b"data: {}\n\n"

pytestmark = pytest.mark.spec("M3")


class Upstream(ThreadingHTTPServer):
    """Stands for the front: streams one event, and the next when it is told; counts what is
    uploaded."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.first_was_read, self.client_left = threading.Event(), threading.Event()
        self.hosts: list[str] = []


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_GET(self) -> None:
        """A stream, as the front sends it, of the type that is asked for."""
        self.server.hosts.append(self.headers["host"])
        self.send_response(200)
        self.send_header("content-type", self.headers["accept"])
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._send_chunk(EVENT)
        if self.path == "/until-the-client-leaves":
            self.connection.settimeout(ANSWERED_S)
            if self.connection.recv(1) == b"":
                self.server.client_left.set()
            return
        self.server.first_was_read.wait(ANSWERED_S)
        self._send_chunk(EVENT)
        self.wfile.write(b"0\r\n\r\n")

    def do_POST(self) -> None:
        """Says how much came, as soon as it has."""
        size = 0
        while size < int(self.headers["content-length"]) and (piece := self.rfile.read(len(PIECE))):
            size += len(piece)
        said = str(size).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows what fails."""


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.first_was_read.set()
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module", params=["caddy", "nginx"])
def proxy(request: pytest.FixtureRequest, upstream: Upstream) -> Iterator[Proxy]:
    with proxy_before(upstream.server_address[1], request.param) as running:
        yield running


@pytest.mark.parametrize("kind", ["text/event-stream", "audio/wav"])
def test_stream_passes_the_proxy_of_the_docs_as_it_comes_and_by_the_name_of_the_client(
    proxy: Proxy, upstream: Upstream, kind: str
) -> None:
    """The second event is sent only when the first was read."""
    upstream.first_was_read.clear()
    with closing(proxy.connect()) as connection:
        connection.request("GET", "/", headers={"accept": kind})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (200, kind)
        assert answer.read(len(EVENT)) == EVENT
        upstream.first_was_read.set()
        assert answer.read() == EVENT
    assert upstream.hosts[-1] == NAME


@pytest.mark.spec("J8")
def test_client_that_leaves_the_proxy_of_the_docs_leaves_the_front(
    proxy: Proxy, upstream: Upstream
) -> None:
    upstream.client_left.clear()
    with closing(proxy.connect()) as connection:
        headers = {"accept": "text/event-stream"}
        connection.request("GET", "/until-the-client-leaves", headers=headers)
        assert connection.getresponse().read(len(EVENT)) == EVENT
        assert not upstream.client_left.is_set()
    assert upstream.client_left.wait(ANSWERED_S)


def test_upload_passes_the_proxy_of_the_docs(proxy: Proxy) -> None:
    """Also where the answer comes at once behind its last byte."""
    with closing(proxy.connect()) as connection:
        headers = {"content-length": str(UPLOAD_BYTES)}
        connection.request("POST", "/v1/files", (PIECE for _ in range(UPLOAD_BYTES >> 20)), headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, str(UPLOAD_BYTES).encode())


def test_nginx_of_the_docs_takes_what_the_front_takes() -> None:
    [most] = re.findall(r"client_max_body_size (\d+)m;", block("nginx"))
    assert int(most) << 20 >= MAX_FILE_FORM_BYTES
