"""`arbiter lease` around a command, on the running system."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.graph.conftest import BIN, ROOT, Graph, until
from tests.support.graph_commands import environment, run_command, send

CHAT = "tiny-chat"
HELLO = {
    "model": CHAT,
    "messages": [{"role": "user", "content": "Who holds the memory?"}],
    "max_tokens": 2,
}
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


@pytest.mark.spec("A15")
def test_freed_memory_is_held_for_its_term_and_what_left_returns(graph: Graph) -> None:
    graph.post("/v1/chat/completions", HELLO)
    idle = until(lambda: idle_tickets(graph, CHAT), 30, "the model is idle")
    [device] = [d for d in graph.state()["devices"] if d["kind"] == "cpu"]
    held = sum(sum(t["charged_bytes"].values()) for t in idle)
    gb = (device["free_bytes"] + held / 2) / (1 << 30)
    planned = json.loads(run_command(graph, "free", "--gb", str(gb), "--dry-run", "--json"))
    assert planned["lease"] is None and planned["plan"]["victims"]
    graph.post("/v1/chat/completions", HELLO)  # it leaves by itself after a few seconds
    until(lambda: idle_tickets(graph, CHAT), 30, "the model is idle again")
    done = json.loads(run_command(graph, "free", "--gb", str(gb), "--for", "10m", "--json"))
    lease = done["lease"]["ticket"]
    assert done["lease"]["state"] == "held"
    went = {victim["ticket"] for victim in done["plan"]["victims"]}
    assert went and not went & {t["ticket"] for t in graph.state()["tickets"]}
    assert "free" in run_command(graph, "leases")
    run_command(graph, "drain", lease)
    models = {victim["model"] for victim in done["plan"]["victims"]}
    until(
        lambda: models & {t["model"] for t in graph.state()["tickets"] if t["state"] == "resident"},
        60,
        "what left is loaded again without a request",
    )
    told = [e for e in graph.events() if e["kind"] == "freed_return"]
    assert told[-1]["ticket"] == lease


def idle_tickets(graph: Graph, model: str) -> list[dict[str, Any]]:
    tickets = [t for t in graph.state()["tickets"] if t["model"] == model]
    return [t for t in tickets if t["state"] == "resident" and not t["inflight"]]
