"""A capability, an engine and a policy from files outside the repository, by configuration alone;
and what the front says of applications, paths and processes that are not there.
"""

import copy
import http.client
import json
import os
import select
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ollama import Client

from deployments.front.proxy import TAKEN_S, FrontAway
from tests.graph.conftest import (
    BIN,
    IN_FLIGHT,
    ROOT,
    Graph,
    as_users,
    command_of,
    started,
    until,
)
from tests.support import graph_processes
from tests.support.contributing import addition, package

FRONT_QUEUED = 8  # before the front, in Serve's proxy
HELD_BYTES = 32 << 20  # by the front, of bodies
QUEUED, GATE = 2, "narrow-gate"  # of the capability `narrow`, whose load ends when a test says so
POLICY = "my_package.evict_largest:price"
BROKEN = '''"""A builder that fails as one does whose library is not installed."""

import a_library_that_is_not_installed
'''
FAILS = '''"""A deployment that Serve tries to start once."""

from ray import serve


@serve.deployment(max_constructor_retry_count=1)
class Fails:
    def __init__(self) -> None:
        raise RuntimeError("told to fail")


app = Fails.bind()
'''


def _write(outside: Path) -> None:
    (outside / "my_package" / "broken.py").write_text(BROKEN)
    (outside / "my_package" / "fails.py").write_text(FAILS)
    (outside / "parrot").mkdir()


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    outside = package(tmp_path_factory.mktemp("outside"))
    (files := outside / "files").mkdir()  # of models: nothing is written there while they load
    _write(outside)

    def change(config: dict[str, Any]) -> None:
        added = addition()
        capabilities = added["capabilities"]
        capabilities["echo"]["models"]["parrot"]["source"] = str(outside / "parrot")
        models = {"none": {"source": str(files), "need": {"weights": "1 MiB"}}}
        capabilities["broken"] = {**capabilities["echo"], "models": models}
        bad = {"source": str(files), "need": {"weights": "1 MiB"}}
        bad["engine_args"] = {"fail": "error"}
        engine = "tests.support.fake_engine:FakeEngine"
        sick = {"role": "text", "engine": engine, "paths": ["/v1/sick"], "models": {"sick": bad}}
        capabilities["sick"] = sick
        quick = {"source": str(files), "need": {"weights": "1 MiB"}, "keep_warm_s": 1}
        paths = ["/v1/mirror", "/v1/completions"]
        mirror = {"engine": "tests.support.mirror_engine:build", "paths": paths}
        models = {name: {**quick, "can_sleep": False} for name in ("mirror", "kept", "brief")}
        capabilities["mirror"] = {"role": "text", "models": models} | mirror
        models = {"unbuilt": {"source": str(files), "need": {"weights": "1 MiB"}}}
        unbuilt = {"class": "my_package.nowhere:Patient", "models": models}
        capabilities["unbuilt"] = {**capabilities["echo"], **unbuilt}
        models = {"held": {"source": str(files), "need": {"weights": "1 MiB"}}}
        row = {"paths": ["/v1/held"], "managed": "external", "models": models}
        capabilities["held"] = {"role": "text", "engine": engine} | row
        gated = {"source": str(files), "need": {"weights": "1 MiB"}}
        gated["engine_args"] = {"gate": str(outside / GATE)}
        row = {"engine": engine, "paths": ["/v1/narrow"], "models": {"narrow": gated}}
        capabilities["narrow"] = {"role": "text", **row}
        front, [own] = config["applications"][0], added["applications"]
        front["deployments"][0]["max_queued_requests"] = FRONT_QUEUED
        broken = {"name": "broken", "route_prefix": None, "import_path": "my_package.broken:build"}
        # The file has these applications itself; the front deploys the others.
        del (held := json.loads(json.dumps(own).replace("echo", "held")))["args"]["class"]
        narrow = json.loads(json.dumps(held).replace("held", "narrow"))
        narrow["deployments"][0] |= {"max_ongoing_requests": 1, "max_queued_requests": QUEUED}
        broken |= {"args": {"capability": "broken"}}
        fails = {"name": "fails", "route_prefix": "/fails", "import_path": "my_package.fails:app"}
        config["applications"] = [front, held, narrow, broken, fails]
        table = front["deployments"][0]["user_config"]
        table["capabilities"] = capabilities
        table["arbiter"] |= {"evict": POLICY, "pipelines": []}
        table["front"]["bodies_bytes"] = HELD_BYTES

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(outside), str(ROOT)]))
        with started(tmp_path_factory.mktemp("graph"), change) as running:
            yield running


def post(graph: Graph, path: str, body: bytes, kind: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(graph.url).netloc, timeout=120)
    connection.request("POST", path, body, {"content-type": kind})
    return connection.getresponse()


@pytest.mark.spec("H9")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", b'{"model": "parrot", "text": "Hello"}'),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nparrot\r\n'
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            b"\x00\xff\r\n--b--\r\n",
        ),
    ],
    ids=["json", "multipart"],
)
def test_capability_and_engine_from_outside_files_answer_on_their_own_path(
    extended: Graph, kind: str, body: bytes
) -> None:
    answer = post(extended, "/v1/echo", body, kind)
    assert answer.status == 200
    assert answer.headers["content-type"] == kind
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.read() == b"You said: " + body + b"!"


@pytest.mark.spec("A7", "H9")
def test_class_of_an_outside_capability_refuses_with_its_own_error(extended: Graph) -> None:
    """Raised while the model is in use, which ends the use."""
    long = json.dumps({"model": "parrot", "text": "x" * 2_000}).encode()
    answer = post(extended, "/v1/echo", long, "application/json")
    assert answer.status == 413
    assert json.load(answer)["error"]["code"] == "too_long"
    [ticket] = [t for t in extended.state()["tickets"] if t["model"] == "parrot"]
    until(lambda: not in_flight(extended, ticket["ticket"]), 60, "it is released")


def in_flight(graph: Graph, ticket: str) -> int:
    return sum(t["inflight"] for t in graph.state()["tickets"] if t["ticket"] == ticket)


@pytest.mark.spec("J1", "J2")
def test_no_extension_field_reaches_the_engine_and_stay_warm_keeps_its_model(
    extended: Graph,
) -> None:
    fields = {
        "x_client_id": "ann", "x_priority": "low", "x_deadline_s": 60, "x_stay_warm": 600,
        "x_conversation_id": "c-1",
    }  # fmt: skip
    headers = {name.replace("_", "-"): str(value) for name, value in fields.items()}
    for body, sent in (({"model": "mirror"}, headers), ({"model": "mirror"} | fields, {})):
        status, answer = extended.post("/v1/mirror", body, headers=sent)
        assert status == 200
        assert json.loads(answer["body"]) == {"model": "mirror"}
        assert not headers.keys() & answer["headers"].keys()
    Client(host=extended.url, timeout=60).generate("kept", "", keep_alive="10m")  # Ollama's
    for _ in range(3):  # all have a keep-warm of a second
        assert extended.post("/v1/mirror", {"model": "brief"})[0] == 200
        until(lambda: "brief" not in models_of(extended), 60, "its keep-warm time is over")
        assert {"mirror", "kept"} <= models_of(extended)


def models_of(graph: Graph) -> set[str]:
    return {t["model"] for t in graph.state()["tickets"]}


@pytest.mark.spec("D2")
def test_model_that_a_control_plane_has_not_loaded_is_409_at_once(extended: Graph) -> None:
    answer = post(extended, "/v1/held", b'{"model": "held"}', "application/json")
    assert (answer.status, json.load(answer)["error"]["code"]) == (409, "not_resident")
    assert not [t for t in extended.state()["tickets"] if t["model"] == "held"]


@pytest.mark.spec("H9")
def test_outside_path_and_policy_are_described(extended: Graph) -> None:
    assert "/v1/echo" in extended.get("/openapi.json")["paths"]
    assert extended.state()["table"]["arbiter"]["evict"] == POLICY
    assert {card["id"] for card in extended.get("/v1/models")["data"]} == {
        "parrot", "none", "unbuilt", "sick", "held", "narrow", "mirror", "kept", "brief",
    }  # fmt: skip


@pytest.mark.spec("J9")
def test_failed_application_and_failed_load_read_failed_with_their_cause(extended: Graph) -> None:
    def failed(capability: str) -> str:
        found = extended.get("/ready")["capabilities"][capability]
        return str(found["cause"]) if found["state"] == "failed" else ""

    cause = until(lambda: failed("broken"), 60, "the application that cannot be built has failed")
    assert "a_library_that_is_not_installed" in cause
    assert "No module named 'my_package.nowhere'" in failed("unbuilt")
    assert not failed("echo") and not failed("sick")
    answer = post(extended, "/v1/echo", b'{"model": "none"}', "application/json")
    assert (answer.status, json.load(answer)["error"]["code"]) == (503, "capability_failed")
    answer = post(extended, "/v1/sick", b'{"model": "sick"}', "application/json")
    assert (answer.status, json.load(answer)["error"]["code"]) == (503, "load_failed")
    assert "told to fail" in failed("sick")


@pytest.mark.spec("J8")
def test_application_that_failed_is_503_with_when_to_come_back_by_serve_itself(
    extended: Graph,
) -> None:
    def refused() -> tuple[int, int, str] | None:
        """Until Serve has given the deployment up, a request waits for a replica of it."""
        connection = patient(extended)
        connection.request("GET", "/fails")
        answer = answer_of(connection)
        return answer if "front_away" not in answer[2] else None

    status, retry_after, said = until(refused, 120, "Serve has given it up")
    assert (status, retry_after) == (503, FrontAway.retry_after_s)
    assert "Fails" in said and "failed to deploy" in said


@pytest.mark.spec("A2", "M2")
def test_row_that_comes_and_goes_while_it_runs_restarts_nothing(extended: Graph) -> None:
    body = b'{"model": "parrot"}'
    assert post(extended, "/v1/echo", body, "application/json").status == 200
    [before] = [t["ticket"] for t in extended.state()["tickets"] if t["model"] == "parrot"]
    running = replicas(extended)
    config = copy.deepcopy(extended.config)
    rows = config["applications"][0]["deployments"][0]["user_config"]["capabilities"]
    rows["late"] = copy.deepcopy(rows["echo"]) | {"paths": ["/v1/late"]}
    rows["late"]["models"] = {"late": rows["echo"]["models"]["parrot"]}
    extended.deploy(config)
    late = b'{"model": "late"}'
    until(
        lambda: post(extended, "/v1/late", late, "application/json").status == 200,
        60,
        "the new capability answers",
    )
    assert running <= replicas(extended)
    assert before in {t["ticket"] for t in extended.state()["tickets"]}
    extended.deploy(extended.config)
    until(lambda: "late" not in applications(extended), 60, "its application is gone")
    assert {"echo", "held"} <= applications(extended)
    assert running <= replicas(extended)


def replicas(graph: Graph) -> set[int]:
    """Pids of the front and of the capability that answered before."""
    mine = ("ray::ServeReplica:front", "ray::ServeReplica:echo")
    return {pid for pid in graph.workers() if command_of(pid).startswith(mine)}


def applications(graph: Graph) -> set[str]:
    """As Serve lists them."""
    done = subprocess.run(
        [BIN / "serve", "status", "-a", graph.dashboard],
        env=as_users({}) | {"RAY_AUTH_MODE": "token"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(yaml.safe_load(done.stdout)["applications"])


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/none", 404, "invalid_request_error"),
        ("POST", "/none", 404, "invalid_request_error"),
        ("GET", "/v1/echo", 405, "invalid_request_error"),
        ("POST", "/v1/messages/none", 404, "not_found_error"),  # Anthropic's
        ("GET", "/api/none", 404, None),  # Ollama's has no type
        ("POST", "/api/none", 404, None),
    ],
)
def test_unknown_paths_answer_in_the_form_of_their_api_with_the_requests_id(
    extended: Graph, method: str, path: str, status: int, kind: str | None
) -> None:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(extended.url).netloc, timeout=60)
    connection.request(method, path, headers={"x-request-id": "mine-1"})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["x-request-id"]) == (status, "mine-1")
    said = json.load(answer)
    if kind is None:
        assert path in said.pop("error") and not said
    else:
        assert said["error"]["type"] == kind
        assert said.get("type") == ("error" if kind == "not_found_error" else None)


@pytest.mark.spec("L3")
def test_request_id_that_is_not_ascii_is_no_server_error(extended: Graph) -> None:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(extended.url).netloc, timeout=60)
    connection.putrequest("GET", "/health")
    connection.putheader("x-request-id", b"\xff\xfe")
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.headers["x-request-id"].isascii()


@pytest.mark.spec("L3")
@pytest.mark.parametrize("method", ["GET", "POST"])  # the second goes past Serve
@pytest.mark.parametrize(
    "name",
    [
        "serve_multiplexed_model_id",
        "serve-multiplexed-model-id",
        "x-session-id",
    ],
)
def test_header_of_serve_that_is_not_utf_8_is_400_and_names_the_header(
    extended: Graph, method: str, name: str
) -> None:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(extended.url).netloc, timeout=60)
    path = "/health" if method == "GET" else "/v1/echo"
    connection.request(method, path, b"", {name: b"\xff\xfe"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.load(answer)["error"]["param"] == name


@pytest.mark.spec("J8")
def test_requests_in_a_front_that_dies_are_503(extended: Graph) -> None:
    """The front waits for bodies that have not come whole; it has begun no response. One request
    more than it takes is refused, whichever comes last: then the others are in the front."""
    connections = [begun(extended) for _ in range(IN_FLIGHT + 1)]
    answered, _, _ = select.select([c.sock for c in connections], [], [], 60)
    [refused] = [c for c in connections if c.sock in answered]
    assert refused.getresponse().status == 429
    waiting = [c for c in connections if c is not refused]
    [front] = [p for p in extended.workers() if command_of(p).startswith("ray::ServeReplica:front")]
    os.kill(front, signal.SIGKILL)
    for connection in waiting:
        answer = connection.getresponse()
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert json.load(answer)["error"]["code"] == "front_lost"
    body = b'{"model": "parrot"}'
    until(
        lambda: post(extended, "/v1/echo", body, "application/json").status == 200,
        120,
        "another front takes its place",
    )


@pytest.mark.spec("J8", "L3")
def test_bodies_beyond_what_the_front_holds_of_all_are_429_and_harm_no_other(
    extended: Graph,
) -> None:
    """Of two that are sent but for their end the front holds one; the other is refused."""
    large, end = b" " * (HELD_BYTES * 5 // 8), b'{"model": "unknown"}'
    connections = [begun(extended, large, len(large + end)) for _ in range(2)]
    answered, _, _ = select.select([c.sock for c in connections], [], [], 60)
    [refused] = [c for c in connections if c.sock in answered]
    answer = refused.getresponse()
    assert (answer.status, int(answer.headers["retry-after"])) == (429, 1)
    assert json.load(answer)["error"]["code"] == "queue_full"
    small = post(extended, "/v1/echo", b'{"model": "parrot"}', "application/json")
    assert small.status == 200
    [held] = [c for c in connections if c is not refused]
    held.send(end)
    assert held.getresponse().status == 404, "its body is read to its end, which names no model"
    later = post(extended, "/v1/echo", large + end, "application/json")
    assert later.status == 404, "what was held is held no more"


@pytest.mark.spec("J8")
def test_full_queue_of_serve_is_429_and_what_it_holds_is_answered(extended: Graph) -> None:
    """One request is in the replica, where its model loads; the others are in Serve's queue."""
    narrow = extended.table["capabilities"]["narrow"]["models"]["narrow"]
    gate = Path(narrow["engine_args"]["gate"])

    def asked() -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(extended.url).netloc)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/narrow", b'{"model": "narrow"}', headers)
        return connection

    first = asked()
    until(gate.with_suffix(".reached").exists, 60, "its model loads")
    others = [asked() for _ in range(QUEUED + 1)]
    answered, _, _ = select.select([c.sock for c in others], [], [], 60)
    [refused] = [c for c in others if c.sock in answered]
    answer = refused.getresponse()
    assert (answer.status, int(answer.headers["retry-after"])) == (429, 1)
    error = json.load(answer)["error"]
    assert error["code"] == "queue_full" and f"bound {QUEUED}" in error["message"]
    gate.touch()
    kept = [first, *(c for c in others if c is not refused)]
    assert [c.getresponse().status for c in kept] == [200] * (1 + QUEUED)


def listed(graph: Graph) -> http.client.HTTPConnection:
    """A request that goes by Serve's proxy, as all but inference do."""
    connection = patient(graph)
    connection.request("GET", "/v1/models")
    return connection


def echoed(graph: Graph) -> http.client.HTTPConnection:
    """A request for inference, which goes to the front's socket where there is one."""
    connection = patient(graph)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/echo", b'{"model": "parrot"}', headers)
    return connection


def patient(graph: Graph) -> http.client.HTTPConnection:
    netloc = urllib.parse.urlsplit(graph.url).netloc
    return http.client.HTTPConnection(netloc, timeout=TAKEN_S + 90)


def answer_of(connection: http.client.HTTPConnection) -> tuple[int, int, str]:
    """Status, Retry-After and body."""
    answer = connection.getresponse()
    said = answer.status, int(answer.headers.get("retry-after", 0)), answer.read().decode()
    connection.close()
    return said


@pytest.mark.spec("J8", "J9")
def test_requests_are_503_in_bounded_time_while_the_front_that_died_is_not_back(
    extended: Graph,
) -> None:
    """No controller of Serve starts another. Requests wait in Serve's proxy, as many as its queue
    holds, and each of them for TAKEN_S; Serve itself would have them wait without a bound. The
    first may find the dead front still listed, and be told that it is lost."""
    [front] = graph_processes.replicas(extended, "front")
    [controller] = graph_processes.victims(extended, "controller")
    waiting, answers = list[http.client.HTTPConnection](), list[tuple[int, int, str]]()

    def is_full() -> bool:
        waiting.append(listed(extended))
        answered, _, _ = select.select([c.sock for c in waiting], [], [], 0.1)
        for connection in [c for c in waiting if c.sock in answered]:
            waiting.remove(connection)
            answers.append(answer_of(connection))
        return any("backpressure" in said for *_, said in answers)

    os.kill(controller, signal.SIGSTOP)
    try:
        os.kill(front, signal.SIGKILL)
        until(is_full, 90, "the queue before the front is full")
        assert waiting
        waiting.append(echoed(extended))
        answers += [answer_of(connection) for connection in waiting]
    finally:
        os.kill(controller, signal.SIGCONT)
    assert {status for status, *_ in answers} == {503}
    assert all(retry_after >= 1 for _, retry_after, _ in answers)
    away = [said for _, retry_after, said in answers if retry_after == FrontAway.retry_after_s]
    assert away and {json.loads(said)["error"]["code"] for said in away} == {FrontAway.code}
    until(lambda: answer_of(listed(extended))[0] == 200, 120, "another front answers")


def begun(graph: Graph, part: bytes = b"{", length: int = 100) -> http.client.HTTPConnection:
    """A request of whose body only this part is sent."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(graph.url).netloc, timeout=60)
    connection.putrequest("POST", "/v1/echo")
    connection.putheader("content-length", str(length))
    connection.endheaders(part)
    return connection
