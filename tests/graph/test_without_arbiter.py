"""The whole graph after `arbiter down`: a cold request gets 503, and hears when to come back."""

import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.graph.conftest import BIN, Graph, as_users, command_of, started, until

# A holder gives the arbiter up after 10 s; a replica that starts for the request takes as long.
COLD_S = 90
CHAT = {
    "model": "tiny-chat",
    "messages": [{"role": "user", "content": "Who holds the memory?"}],
    "max_tokens": 2,
}


def refused(graph: Graph, path: str, body: object | None) -> urllib.error.HTTPError:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(graph.url + path, data, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=COLD_S)
    return caught.value


@pytest.mark.spec("A18", "A20", "J8", "J9")
def test_cold_request_after_arbiter_down_gets_503_with_retry_after(tmp_path: Path) -> None:
    with started(tmp_path) as graph:
        said = subprocess.run(
            [BIN / "arbiter", "down", "--address", ray_address(graph)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=as_users({}),
        )
        assert said.returncode == 0, said.stderr
        until(lambda: not arbiters(graph), 30, "the arbiter's process has ended")
        for path, body in (("/v1/chat/completions", CHAT), ("/ready", None)):
            error = refused(graph, path, body)
            assert error.code == 503, path
            assert int(error.headers["retry-after"]) >= 1
            assert json.load(error)["error"]["code"] == "arbiter_unavailable"
        assert graph.engines() == []
        assert graph.get("/health") == {"status": "ok"}


def ray_address(graph: Graph) -> str:
    """Of its own cluster; there may be others on this machine."""
    commands = (command_of(pid) for pid in graph.workers())
    found = next(filter(None, (re.search(r"--gcs-address=(\S+)", line) for line in commands)))
    return found[1]


def arbiters(graph: Graph) -> list[int]:
    return [p for p in graph.workers() if "ray::ArbiterActor" in command_of(p)]
