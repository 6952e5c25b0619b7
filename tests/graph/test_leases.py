"""`arbiter lease` around a command, on the running system."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.graph.conftest import BIN, ROOT, Graph, until
from tests.support.graph_commands import (
    CHAT,
    drain,
    environment,
    level,
    read_command,
    run_command,
    send,
    unload_all,
)

HELLO: dict[str, Any] = {
    "model": CHAT,
    "messages": [{"role": "user", "content": "Who holds the memory?"}],
    "max_tokens": 2,
}
IMAGE = "tiny-draw"
DRAW = {"model": IMAGE, "prompt": "a red circle on blue"}
COLLATE_S = 30
RUN_S = 60  # of forty jobs that take a few seconds together, on a busy machine
SLACK_S = 5  # beyond what a ticket was told and its loads took longer: of jobs on a busy machine
TRAINER = [sys.executable, "-m", "tests.support.trainer", "100"]


def leased(graph: Graph) -> list[dict[str, Any]]:
    """Those whose memory has been measured."""
    leases = [t for t in graph.state()["tickets"] if t["lease"]]
    return [t for t in leases if sum(t["measured_bytes"].values()) > 100 << 20]


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
        assert job.wait(60) == 0  # the trainer obeys SIGTERM
    finally:
        job.kill()
        job.communicate()
    until(lambda: not leased(graph), 60, "its bytes are back")
    assert run_command(graph, "cleanup").startswith("ended: none")


@pytest.mark.spec("A15", "L1")
def test_lease_request_without_a_key_is_refused(graph: Graph) -> None:
    address = f"{graph.url}/arbiter/leases/mine"
    request = urllib.request.Request(address, b'{"bytes": 1}', method="PUT")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as refusal:
        assert refusal.code == 401
    key = environment(graph)["ARBITER_KEY"]
    request.add_header("authorization", f"Bearer {key}")
    request.data = b'{"bytes": 1, "tenants": "x"}'
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 400 and b'"param": "tenants"' in caught.value.read()


@pytest.mark.spec("A15")
def test_cleanup_ends_a_lease_whose_holder_has_gone(graph: Graph) -> None:
    """Its only call was the first."""
    send(graph, "PUT", "/arbiter/leases/left", {"bytes": 1 << 20, "wait_s": 3})
    [lease] = [t["ticket"] for t in graph.state()["tickets"] if t["lease"]]
    assert lease in run_command(graph, "leases")
    until(lambda: lease in cleanup(graph), 60, "its heartbeats are missed")
    until(lambda: not any(t["lease"] for t in graph.state()["tickets"]), 60, "it is off the books")


def cleanup(graph: Graph) -> list[str]:
    """The leases that it ended."""
    ended: list[str] = read_command(graph, "cleanup")["ended"]
    return ended


@pytest.mark.spec("A15")
def test_freed_memory_is_held_until_its_lease_is_drained_and_what_left_returns(
    graph: Graph,
) -> None:
    assert "nothing leaves" in run_command(graph, "free", "--gb", "0.01", "--dry-run")
    gb = until(lambda: gb_of_victims(graph), 60, "the model is idle, and would leave")
    done = send(graph, "POST", "/arbiter/free", {"gb": gb, "term_s": 600})
    assert done["lease"]["state"] == "held" and done["plan"]["victims"]
    went = {victim["ticket"] for victim in done["plan"]["victims"]}
    assert not went & {t["ticket"] for t in graph.state()["tickets"]}
    drain(graph, done["lease"]["ticket"])
    models = {victim["model"] for victim in done["plan"]["victims"]}
    until(
        lambda: models & {t["model"] for t in graph.state()["tickets"] if t["state"] == "resident"},
        60,
        "what left is loaded again without a request",
    )
    told = [e for e in graph.events() if e["kind"] == "freed_return"]
    assert told[-1]["ticket"] == done["lease"]["ticket"]


@pytest.mark.spec("A15")
def test_freed_memory_is_held_while_a_command_lives_and_then_what_left_returns(
    graph: Graph,
) -> None:
    gb = until(lambda: gb_of_victims(graph), 60, "the model is idle, and would leave")
    command = [BIN / "arbiter", "free", "--gb", str(gb), "--name", "mine", "--", *TRAINER]
    job = subprocess.Popen(command, cwd=ROOT, env=environment(graph), stdout=subprocess.PIPE)
    try:
        [lease] = until(lambda: leased(graph), 60, "the command runs and is measured")
        assert lease["model"] == "mine" and level(graph) != "device"
        job.terminate()
        job.wait(60)
    finally:
        job.kill()
        job.communicate()
    until(lambda: not leased(graph), 60, "its bytes are back")
    until(lambda: level(graph) == "device", 60, "what left is loaded again without a request")


def victims(graph: Graph, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What would leave; nothing is freed."""
    made = send(graph, "POST", "/arbiter/free", {**body, "dry_run": True})
    victims: list[dict[str, Any]] = made["plan"]["victims"]
    return victims


def gb_of_victims(graph: Graph) -> float:
    """GiB for which an awake model would leave now, as it alone returns; none while none is idle.
    Told anew at each look: models whose keep-warm time ends leave by themselves."""
    if CHAT not in {t["model"] for t in graph.state()["tickets"]}:
        graph.post("/v1/chat/completions", HELLO)
    gb = more_than_free(graph, CHAT)
    leave = {victim["ticket"] for victim in victims(graph, {"gb": gb})}
    awake = {t["ticket"] for t in graph.state()["tickets"] if t["state"] == "resident"}
    return gb if leave & awake else 0.0


def more_than_free(graph: Graph, model: str) -> float:
    """GiB that are there only once a resident model has left."""
    return (cpu(graph)["free_bytes"] + charged(graph, model) / 2) / (1 << 30)


def cpu(graph: Graph) -> dict[str, Any]:
    [device] = [d for d in graph.state()["devices"] if d["kind"] == "cpu"]
    return device


def charged(graph: Graph, model: str) -> int:
    """Bytes of a resident model on the device that computes. After a change of the settings a warm
    model answers before its holder has rejoined."""
    [ticket] = until(
        lambda: [t for t in graph.state()["tickets"] if t["model"] == model],
        60,
        f"the holder of {model} has rejoined",
    )
    return int(sum(b for d, b in ticket["charged_bytes"].items() if d.endswith("cpu:0")))


@pytest.mark.spec("C13")
def test_interleaved_jobs_of_two_models_that_do_not_fit_together_are_collated(
    graph: Graph,
) -> None:
    """A lease leaves room for the larger of both alone. It is drained just before the arbiter
    begins anew with other settings, and stays ended."""
    with collated(graph):
        interleave(graph)
    assert not [t["ticket"] for t in graph.state()["tickets"] if t["lease"]]


@contextmanager
def collated(graph: Graph) -> Iterator[None]:
    read_command(graph, "settings", f"collate_s={COLLATE_S}")
    try:
        yield
    finally:
        read_command(graph, "settings", "collate_s=0")


def interleave(graph: Graph) -> None:
    jobs_of(graph, CHAT, 1)
    largest = charged(graph, CHAT)
    jobs_of(graph, IMAGE, 1)
    largest = max(largest, charged(graph, IMAGE))
    until(lambda: unload_all(graph), 60, "both have left")
    gb = (cpu(graph)["free_bytes"] - largest * 1.05) / (1 << 30)
    held = send(graph, "POST", "/arbiter/free", {"gb": gb, "term_s": 300})
    try:
        began = graph.state()["sequence"]
        with ThreadPoolExecutor(8) as pool:  # four clients of each model, with five jobs each
            took = list(pool.map(lambda model: jobs_of(graph, model, 5), [CHAT, IMAGE] * 4))
        told = [e for e in graph.events() if e["seq"] > began]
        loads = [e for e in told if e["kind"] == "model_load" and e["model"] in (CHAT, IMAGE)]
        assert 2 <= len(loads) <= 4, (loads, took)  # a load, and then at most three swaps
        # One window of the other model, and the loads; each job is bounded by `post`, too.
        swapping_s = sum(e["took_s"] for e in loads)
        assert max(max(each) for each in took) < COLLATE_S + swapping_s + RUN_S
        longer_s = sum(max(0.0, e["took_s"] - e["predicted_ns"] / 1e9) for e in loads)
        for waited_s, told_s in waits(told):
            assert waited_s < told_s + longer_s + SLACK_S, told
        assert cpu(graph)["loading_fraction"] > 0
    finally:
        drain(graph, held["lease"]["ticket"])


def waits(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Of each load whose ticket was told that it waits: the seconds until it had loaded, and those
    that it was told when it joined the queue."""
    joined: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["kind"] == "ticket_waits":
            joined.setdefault(event["ticket"], event)
    loaded = {e["ticket"]: e["unix_s"] for e in events if e["kind"] == "model_load"}
    both = [(loaded[ticket], told) for ticket, told in joined.items() if ticket in loaded]
    assert both, "the second model was told how long it waits for the first one"
    return [(unix_s - told["unix_s"], told["took_s"]) for unix_s, told in both]


def jobs_of(graph: Graph, model: str, count: int) -> list[float]:
    """The seconds that each of some jobs took, one after the other."""
    path, body = "/v1/chat/completions", HELLO
    if model == IMAGE:
        path, body = "/v1/images/generations", DRAW
    took = []
    for _ in range(count):
        began = time.monotonic()
        status, said = graph.post(path, body)
        assert status == 200, said
        took.append(time.monotonic() - began)
    return took
