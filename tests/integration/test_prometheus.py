"""A real Prometheus scrapes the page of a core in which everything has happened."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from arbiter.metrics.counters import Counters
from arbiter.metrics.table import AGE, UP
from deployments.front.status.metrics_page import exposition
from deployments.monitoring.files import write
from tests.support.metrics import busy_core, scrape
from tests.support.ports import free_port
from tests.support.prometheus import prometheus_of, queries
from tests.support.waits import eventually


@pytest.fixture
def target() -> Iterator[str]:
    """Host and port of a page that does not change."""
    front = {UP: {(): True}, AGE: {(): 0.0}}
    page = exposition({**scrape(busy_core(), Counters()), **front})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.mark.spec("K2")
async def test_every_query_has_data_where_everything_has_happened(
    target: str, tmp_path: Path
) -> None:
    write(tmp_path, target, "http", has_key=False)
    missing = queries()
    with prometheus_of(tmp_path, free_port()) as running:

        def has_all() -> bool:
            missing[:] = running.without_data(missing)
            return not missing

        await eventually(has_all, 60)
        rules = await eventually(running.rules, 60)
    assert {rule["health"] for rule in rules} == {"ok"}
