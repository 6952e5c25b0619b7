"""`arbiter lease` around a command, on the running system."""

import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.graph.conftest import BIN, ROOT, Graph, until
from tests.support.graph_commands import environment, run_command, send

TRAINER = [sys.executable, "-m", "tests.support.trainer", "100"]


def leased(graph: Graph) -> list[dict[str, Any]]:
    """Those whose memory has been measured."""
    found = [t for t in graph.state()["tickets"] if t["lease"]]
    return [t for t in found if sum(t["measured_bytes"].values()) > 100 << 20]


@pytest.mark.spec("A15", "L1")
def test_a_command_runs_while_its_memory_is_leased_and_ends_when_it_is_drained(
    graph: Graph,
) -> None:
    command = [BIN / "arbiter", "lease", "--gb", "0.2", "--name", "job", "--", *TRAINER]
    job = subprocess.Popen(command, cwd=ROOT, env=environment(graph), stdout=subprocess.PIPE)
    try:
        [lease] = until(lambda: leased(graph), 60, "the job runs and is measured")
        assert "job" in run_command(graph, "leases")
        run_command(graph, "drain", lease["ticket"])
        assert job.wait(20) == 0  # the trainer obeys SIGTERM
    finally:
        job.kill()
        job.communicate()
    until(lambda: not leased(graph), 20, "its bytes are back")
    assert run_command(graph, "cleanup").startswith("ended: none")


@pytest.mark.spec("A15", "L1")
def test_lease_request_without_a_key_is_refused(graph: Graph) -> None:
    address = f"{graph.url}/arbiter/leases/mine"
    request = urllib.request.Request(address, b'{"bytes": 1}', method="PUT")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 401
    key = environment(graph)["ARBITER_KEY"]
    request.add_header("authorization", f"Bearer {key}")
    request.data = b'{"bytes": 1, "tenants": "x"}'
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 400 and b'"param": "tenants"' in caught.value.read()


@pytest.mark.spec("A15")
def test_cleanup_ends_a_lease_whose_holder_has_gone(graph: Graph) -> None:
    """Its only call was the first."""
    send(graph, "PUT", "/arbiter/leases/left", {"bytes": 1 << 20, "wait_s": 3})
    [lease] = [t["ticket"] for t in graph.state()["tickets"] if t["lease"]]
    assert lease in run_command(graph, "leases")
    until(lambda: lease in run_command(graph, "cleanup"), 30, "its heartbeats are missed")
    until(lambda: not any(t["lease"] for t in graph.state()["tickets"]), 10, "it is off the books")
