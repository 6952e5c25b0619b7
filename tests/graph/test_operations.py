"""Zero means zero; command line and front tell the truth; a new table restarts nothing."""

import copy
import http.client
import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import yaml
from openai import OpenAI

from deployments.client import Client
from tests.graph.conftest import BIN, DOWNSCALE_S, EVENT_FILE, KEEP_WARM_S, Graph, until
from tests.support.graph_commands import drain, environment, send, unload_all
from tests.support.graph_metrics import ray_answer
from tests.support.graph_processes import log_of, victims
from tests.support.ray_dashboard import APPLICATIONS

CHAT, LEFT = "tiny-chat", "left-chat"
VAD, RERANK, EMBEDDING = "silero-vad", "minilm-reranker", "all-minilm-l6-v2"
HELLO = [{"role": "user", "content": "Who holds the memory?"}]
PRIVATE = "The key is under the third stone. "


OFFERED = """
POST /v1/chat/completions
POST /v1/prewarm
POST /v1/acquire
POST /v1/completions
POST /v1/responses
GET /v1/responses/{response_id}
DELETE /v1/responses/{response_id}
POST /v1/responses/{response_id}/cancel
GET /v1/responses/{response_id}/input_items
GET /v1/jobs
GET /v1/jobs/{job_id}
DELETE /v1/jobs/{job_id}
GET /v1/jobs/{job_id}/result
GET /v1/jobs/{job_id}/events
POST /v1/jobs/{job_id}/cancel
POST /v1/embeddings
POST /v1/rerank
POST /v2/rerank
POST /rerank
POST /v1/score
POST /score
POST /v1/classify
POST /classify
POST /v1/images/generations
POST /v1/images/edits
POST /v1/images/variations
POST /v1/audio/transcriptions
POST /v1/audio/translations
POST /v1/audio/speech
POST /v1/audio/vad
POST /v1/vad
GET /v1/audio/voices
POST /v1/messages
POST /v1/messages/count_tokens
POST /api/chat
POST /api/generate
POST /api/embed
POST /api/show
POST /api/pull
POST /api/push
POST /api/create
POST /api/copy
DELETE /api/delete
GET /api/version
GET /api/tags
GET /api/ps
HEAD /
GET /
GET /console/{name}
POST /v1/files
GET /v1/files
GET /v1/files/{file_id}
DELETE /v1/files/{file_id}
GET /v1/files/{file_id}/content
POST /v1/batches
GET /v1/batches
GET /v1/batches/{batch_id}
POST /v1/batches/{batch_id}/cancel
GET /v1/models
GET /v1/models/{model}
GET /health
GET /ready
GET /metrics
GET /arbiter/state
GET /arbiter/explain/{ticket}
POST /arbiter/plan
POST /arbiter/free
GET /api/v1/config
PUT /api/v1/config
GET /arbiter/settings
PUT /arbiter/settings
GET /arbiter/view
GET /arbiter/view/adapters
GET /arbiter/view/stream
GET /arbiter/events
GET /arbiter/events/recent
GET /arbiter/host_copies
DELETE /arbiter/host_copies/{key}
GET /arbiter/leases
PUT /arbiter/leases/{lease}
DELETE /arbiter/leases/{lease}
DELETE /arbiter/tenants/{tenant}/kept
POST /arbiter/leases/{ticket}/drain
POST /arbiter/leases/cleanup
POST /arbiter/queue/{ticket}/cancel
POST /arbiter/queue/{ticket}/raise
GET /arbiter/remotes
GET /arbiter/residency
PUT /arbiter/residency/{model}
POST /arbiter/compact
POST /arbiter/models/grow/{model}
POST /arbiter/models/load/{model}
POST /arbiter/models/shrink/{model}
POST /arbiter/models/unload/{model}
POST /arbiter/pressure
GET /arbiter/jobs
GET /arbiter/jobs/{job_id}
DELETE /arbiter/jobs/{job_id}
"""


def replicas(graph: Graph, capability: str) -> int:
    """As Serve's own REST lists them."""
    details = ray_answer(graph, APPLICATIONS)
    return len(details["applications"][capability]["deployments"][capability]["replicas"])


@pytest.mark.spec("A8", "H0", "J9")
def test_idle_system_scales_to_zero_and_then_answers_a_request(
    graph: Graph, client: OpenAI
) -> None:
    until(lambda: unload_all(graph), 60, "what other tests keep warm for longer has left")
    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    until(lambda: not graph.state()["tickets"], KEEP_WARM_S + 20, "every ticket is closed")
    until(lambda: not graph.engines(), 60, "no engine process is left")
    until(lambda: replicas(graph, "chat") == 0, DOWNSCALE_S + 60, "Serve lists no replica of chat")
    assert graph.get("/ready")["capabilities"]["chat"]["state"] == "scaled_to_zero"
    last = graph.state()["sequence"]
    a_client_leaves_before_there_is_a_replica(graph)
    answer = client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    assert answer.choices
    told = {e.get("model") for e in graph.events() if e["seq"] > last}
    assert CHAT in told and LEFT not in told


def a_client_leaves_before_there_is_a_replica(graph: Graph) -> None:
    connection = http.client.HTTPConnection(graph.url.removeprefix("http://"), timeout=60)
    body = json.dumps({"model": LEFT, "messages": HELLO})
    headers = {"content-type": "application/json", "x-request-id": "left-early"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    log = log_of(graph, "front")
    assert log
    until(lambda: "left-early" in log.read_text(errors="replace"), 60, "the front has it")
    connection.close()
    assert not [h for h in graph.state()["holders"] if h["capability"] == "chat"]


@pytest.mark.spec("H0")
def test_replica_stays_while_a_handle_is_held_or_a_ticket_waits_and_an_idle_one_leaves(
    graph: Graph, client: OpenAI
) -> None:
    until(lambda: unload_all(graph), 60, "what other tests keep warm for longer has left")
    key = environment(graph)["ARBITER_KEY"]
    with (
        Client(graph.url, key=key) as python,
        python.acquire(VAD, term_s=120),
        ThreadPoolExecutor(1) as pool,
    ):
        [device] = [d for d in graph.state()["devices"] if d["kind"] == "cpu"]
        python.rerank("memory", ["RAM", "a cat"], model=RERANK)
        until(lambda: is_idle(graph, RERANK), 60, "its use has ended in the arbiter's books, too")
        gb = 0.98 * device["free_bytes"] / (1 << 30)
        held = send(graph, "POST", "/arbiter/free", {"gb": gb, "term_s": 120})
        try:
            queued = pool.submit(client.embeddings.create, model=EMBEDDING, input="a")
            until(lambda: EMBEDDING in waiting(graph), 60, "the embedding's ticket waits")
            until(lambda: replicas(graph, "rerank") == 0, DOWNSCALE_S + 60, "the idle one leaves")
            assert EMBEDDING in waiting(graph)
            assert [replicas(graph, name) for name in ("vad", "embedding")] == [1, 1]
        finally:
            drain(graph, held["lease"]["ticket"])
        assert queued.result(60).data


def is_idle(graph: Graph, model: str) -> bool:
    return all(t["inflight"] == 0 for t in graph.state()["tickets"] if t["model"] == model)


def waiting(graph: Graph) -> set[str]:
    """Models whose tickets are in the queue."""
    return {row["model"] for row in graph.state()["queue"]}


@pytest.mark.spec("J9")
def test_readiness_says_what_each_capability_is_doing(graph: Graph, client: OpenAI) -> None:
    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    report = graph.get("/ready")["capabilities"]
    assert report["chat"]["state"] == "ready"
    assert graph.get("/health") == {"status": "ok"}


@pytest.mark.spec("J9", "A18")
def test_readiness_says_that_the_arbiter_is_away(graph: Graph) -> None:
    (pid,) = victims(graph, "arbiter")
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            graph.get("/ready")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert caught.value.code == 503
    assert int(caught.value.headers["retry-after"]) >= 1
    assert json.load(caught.value)["error"]["code"] == "arbiter_unavailable"
    assert graph.get("/ready")["capabilities"]


@pytest.mark.spec("B7")
def test_status_shows_devices_and_tickets(graph: Graph, client: OpenAI) -> None:
    def status() -> str:
        client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
        return arbiter(graph, "status")

    # An arbiter that was stopped takes a model for idle until it has heard what was used meanwhile.
    text = status()
    text = text if CHAT in text else status()
    assert "cpu:0" in text
    assert CHAT in text
    said = json.loads(arbiter(graph, "status", "--json"))
    now = graph.state()
    assert {key: said[key] for key in _STABLE} == {key: now[key] for key in _STABLE}


# What must not differ between two looks at a living system.
_STABLE = ("epoch", "version", "policy", "table")


@pytest.mark.spec("K1")
def test_events_tell_of_loads_with_bytes_and_seconds(graph: Graph, client: OpenAI) -> None:
    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    lines = [json.loads(line) for line in arbiter(graph, "events", "--json").splitlines()]
    loads = [e for e in lines if e["kind"] == "model_load" and e.get("model") == CHAT]
    assert loads
    assert loads[-1]["size_bytes"] > 0
    assert loads[-1]["took_s"] > 0
    assert [e["seq"] for e in lines] == sorted(e["seq"] for e in lines)


@pytest.mark.spec("K1")
def test_no_event_and_no_line_of_the_event_file_has_a_text_of_a_request(graph: Graph) -> None:
    """Of a request that was answered, and of a request that its engine refused as too long."""
    for name, times, status in (("the-one-told", 1, 200), ("the-one-refused", 400, 400)):
        said = [{"role": "user", "content": PRIVATE * times}]
        body = {"model": CHAT, "messages": said, "max_tokens": 2}
        headers = {"x-request-id": name}
        assert graph.post("/v1/chat/completions", body, headers=headers)[0] == status

    def run_of(name: str) -> list[dict[str, Any]]:
        return [e for e in graph.events() if e.get("request_id") == name]

    (run,) = until(lambda: run_of("the-one-told"), 60, "the request is told")
    assert (run["kind"], run["model"], run["outcome"]) == ("capability_run", CHAT, "answered")
    assert run["took_s"] > 0 and run["ticket"]
    until(lambda: run_of("the-one-refused"), 60, "the refused request is told")
    lines = (graph.folder / EVENT_FILE).read_text()
    assert "the-one-told" in lines and "the-one-refused" in lines
    for text in (PRIVATE.strip(), HELLO[0]["content"]):
        assert text not in json.dumps(graph.events()) and text not in lines


@pytest.mark.spec("K1")
def test_the_event_stream_resumes_behind_the_last_event_seen(graph: Graph) -> None:
    seen = graph.events()[-3]["seq"]
    request = urllib.request.Request(
        f"{graph.url}/arbiter/events", headers={"Last-Event-ID": str(seen)}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        first = next(line for line in stream if line.startswith(b"id: "))
    assert int(first[4:]) == seen + 1


@pytest.mark.spec("L0")
def test_http_offers_exactly_the_documented_routes(graph: Graph) -> None:
    """What commands an engine or the arbiter is not to be had over HTTP, whatever the path."""
    offered = {
        (method.upper(), path)
        for path, methods in graph.get("/openapi.json")["paths"].items()
        for method in methods
    }
    assert offered == {tuple(line.split()) for line in OFFERED.splitlines() if line}
    for path in ("/control/sleep", "/v1/load_lora_adapter", "/v1/chat/../../control/sleep"):
        status, _ = graph.post(path, {"model": CHAT})
        assert status in (404, 405)


def test_a_changed_table_is_served_without_a_restart(graph: Graph, client: OpenAI) -> None:
    config = copy.deepcopy(graph.config)
    table = config["applications"][0]["deployments"][0]["user_config"]
    models = table["capabilities"]["chat"]["models"]
    models["second-chat"] = models[CHAT]
    with in_use(client):
        before = graph.state()["epoch"], tickets(graph)
        deploy_by_command(graph, config)
        until(lambda: any(m.id == "second-chat" for m in client.models.list()), 60, "it is listed")
        answer = client.chat.completions.create(model="second-chat", messages=HELLO, max_tokens=2)
        assert answer.model == "second-chat"
        assert (graph.state()["epoch"], tickets(graph)) == before
    graph.deploy(graph.config)
    until(lambda: all(m.id != "second-chat" for m in client.models.list()), 60, "it is gone")


def deploy_by_command(graph: Graph, config: dict[str, Any]) -> None:
    """As a person does it; other tests ask Serve's REST API themselves."""
    file = graph.folder / "changed.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [BIN / "serve", "deploy", file, "-a", graph.dashboard]
    env = os.environ | {"RAY_AUTH_MODE": "token"}
    subprocess.run(command, check=True, env=env, timeout=60, capture_output=True)


def tickets(graph: Graph) -> list[str]:
    """Those of CHAT; a restart of its engine would bring another."""
    return [t["ticket"] for t in graph.state()["tickets"] if t["model"] == CHAT]


@contextmanager
def in_use(client: OpenAI) -> Iterator[None]:
    """CHAT answers one request after the other, each of them in full."""
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(load)
        try:
            client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
            yield
        finally:
            stop.set()
        asking.result()


def arbiter(graph: Graph, *args: str) -> str:
    command = [BIN / "arbiter", *args, "--url", graph.url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
