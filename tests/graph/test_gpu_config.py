"""The configurations for GPUs as they are shipped, but for their engines and sizes, and the
commands of the operator on the first, run as commands."""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from arbiter.units import MIB
from deployments.client import Client
from deployments.config.fields import parse_size
from deployments.front.access import keys
from tests.graph.conftest import (
    BIN,
    ROOT,
    Graph,
    as_users,
    served,
    until,
)
from tests.support.graph_commands import environment, send
from tests.support.ports import free_port

SMALLER = 100  # a GPU's 20 GiB are 200 MiB of this machine
CHAT, OTHER, EMBEDDING = "qwen3-8b", "qwen3-4b", "bge-m3"
DRAW = "sdxl"
GATE = "gate"  # a load of OTHER ends once it is there
COLD_S = 90  # a replica starts for the request, and its holder gives the arbiter up after 10 s
HELLO = {"model": CHAT, "messages": [{"role": "user", "content": "Who holds the memory?"}]}


def with_fake_engines(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """No GPU, no hub: engines that hold memory and give every request the same answer."""
    config["http_options"]["port"] = free_port()
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["arbiter"]["state_file"] = str(folder / "arbiter.sqlite")
    for capability in table["capabilities"].values():
        capability["engine"] = "tests.support.fake_engine:build"
        for model in capability["models"].values():
            need = {part: parse_size(size) // SMALLER for part, size in model["need"].items()}
            model["need"] = need | {"context": 24 * MIB}
            model["source"], model["engine_args"] = "fake", {"bytes": need["weights"]}
    (gate := folder / GATE).touch()
    if other := table["capabilities"]["chat"]["models"].get(OTHER):
        other["engine_args"]["gate"] = str(gate)
    return config


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    folder = tmp_path_factory.mktemp("gpus")
    config = yaml.safe_load((ROOT / "serve_config.gpu.yaml").read_text())
    config = with_fake_engines(config, folder)
    with served(folder, config, PYTHONPATH=str(ROOT)) as running:
        yield running


def arbiter(graph: Graph, *words: str) -> subprocess.CompletedProcess[str]:
    """The installed command, as a person at this machine runs it."""
    path = keys.keys_path(None, graph.table["arbiter"]["state_file"])
    token = keys.first_key_path(path).read_text().strip()
    env = as_users({"ARBITER_KEY": token, "ARBITER_URL": graph.url, "PYTHONPATH": str(ROOT)})
    command = [BIN / "arbiter", *words]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def said(graph: Graph, *words: str) -> Any:
    done = arbiter(graph, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ticket(graph: Graph, model: str) -> str:
    """Of a model that is loaded; a new epoch of the arbiter hears of it from its holder."""

    def known() -> list[str]:
        return [t["ticket"] for t in graph.state()["tickets"] if t["model"] == model]

    [found] = until(known, 60, f"{model} has its ticket")
    return found


@pytest.mark.spec("H0")
def test_the_configuration_for_gpus_deploys_and_serves(gpus: Graph) -> None:
    status, answer = gpus.post("/v1/chat/completions", HELLO)
    assert (status, answer["model"]) == (200, CHAT)
    status, answer = gpus.post("/v1/embeddings", {"model": EMBEDDING, "input": "a lease"})
    assert status == 200 and answer["data"][0]["embedding"] == [0.6, 0.8]
    done = subprocess.run(
        [BIN / "serve", "status", "-a", gpus.dashboard],
        env=as_users({}) | {"RAY_AUTH_MODE": "token"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    applications = yaml.safe_load(done.stdout)["applications"]
    states = {name: app["status"] for name, app in applications.items()}
    assert states == {name: "RUNNING" for name in ("front", "jobs", *gpus.table["capabilities"])}


@pytest.mark.spec("H0")
@pytest.mark.parametrize("name", ["chat", "embedding", "image", "asr", "tts", "vad"])
def test_each_capability_is_scaled_by_the_arbiters_policy(gpus: Graph, name: str) -> None:
    """Where it cannot be made, Serve says so in its log and scales by itself; the capability runs
    all the same."""
    says = f"'deployments.scaling:CapabilityPolicy' for deployment 'Deployment(name='{name}'"
    until(lambda: says in (gpus.folder / "serve.log").read_text(), 60, says)


@pytest.mark.spec("K3")
def test_the_command_explains_a_ticket(gpus: Graph) -> None:
    gpus.post("/v1/chat/completions", HELLO)
    name = ticket(gpus, CHAT)
    done = arbiter(gpus, "explain", name)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{CHAT} ({name}) is resident for ")
    assert said(gpus, "explain", name)["state"] == "resident"
    failed = arbiter(gpus, "explain", "no-such")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "(404 ticket_not_found): no ticket 'no-such'" in failed.stderr


@pytest.mark.spec("K3")
def test_a_dry_run_answers_for_models_and_sizes_and_loads_nothing(gpus: Graph) -> None:
    gpus.post("/v1/chat/completions", HELLO)
    name = ticket(gpus, CHAT)
    assert said(gpus, "plan", CHAT)["is_resident"]
    cold = said(gpus, "plan", EMBEDDING)
    assert cold["answer"] in ("now", "after_evicting") and cold["goes_to_bytes"]
    never = said(gpus, "plan", "--gb", "100000")
    assert (never["answer"], never["goes_to_bytes"]) == ("never", {})
    assert arbiter(gpus, "plan", CHAT).stdout.splitlines()[1].startswith("It is resident")
    assert ticket(gpus, CHAT) == name
    assert not [t for t in gpus.state()["tickets"] if t["ticket"] == "dry run"]


@pytest.mark.spec("D8")
def test_the_command_sets_a_floor(gpus: Graph) -> None:
    assert arbiter(gpus, "floor", OTHER, "device").returncode == 0
    until(lambda: said(gpus, "residency")[OTHER]["level"] == "device", 60, "it is loaded")
    assert said(gpus, "residency")[OTHER]["floor"] == "device"
    assert said(gpus, "floor", OTHER, "cold") == {"model": OTHER, "floor": "cold"}
    until(lambda: said(gpus, "unload", OTHER)["tickets"] == [], 60, "it is gone")
    failed = arbiter(gpus, "floor", "no-such-model", "device")
    assert failed.returncode == 1
    assert "no-such-model was refused (404 " in failed.stderr


@pytest.mark.spec("D8")
def test_load_in_flight_is_read_everywhere_and_unloaded_by_hand_it_leaves_once_loaded(
    gpus: Graph,
) -> None:
    def seen() -> dict[str, Any]:
        found: dict[str, Any] = send(gpus, "GET", "/arbiter/residency")["models"][OTHER]
        return found

    (gpus.folder / GATE).unlink()
    try:
        assert send(gpus, "POST", f"/arbiter/models/load/{OTHER}") == {"model": OTHER}
        [ticket] = until(lambda: seen()["loading_s"] and seen()["tickets"], 60, "it loads")
        shown = said(gpus, "residency")[OTHER]
        assert (shown["level"], shown["tickets"]) == ("loading", {ticket: "loading"})
        with Client(gpus.url, key=environment(gpus)["ARBITER_KEY"]) as python:
            row = python.residency()[OTHER]
            assert row.level == "loading" and row.loading_s and row.loading_s > shown["loading_s"]
        assert said(gpus, "unload", OTHER) == {"model": OTHER, "tickets": [ticket]}
    finally:
        (gpus.folder / GATE).touch()
    ends = ("model_load", "eviction", "model_unload")

    def told() -> list[dict[str, Any]]:
        return [e for e in gpus.events() if e["ticket"] == ticket and e["kind"] in ends]

    until(lambda: len(told()) == len(ends), 60, "it has come and gone")
    assert [(e["kind"], e.get("reason")) for e in told()] == [
        ("model_load", None), ("eviction", "manual"), ("model_unload", "manual")
    ]  # fmt: skip
    assert seen()["level"] == "cold"


@pytest.mark.spec("K3")
def test_the_command_records_and_what_if_reads_it(gpus: Graph, tmp_path: Path) -> None:
    log, epoch = tmp_path / "log.jsonl", gpus.state()["epoch"]
    where = ("--address", gpus.address)
    assert said(gpus, "record", str(log), *where) == {"recording": str(log)}
    until(lambda: gpus.state()["epoch"] > epoch, 60, "a new epoch has begun")
    for model in (CHAT, OTHER):
        assert gpus.post("/v1/chat/completions", HELLO | {"model": model})[0] == 200
    done = arbiter(gpus, "record", *where)
    assert (done.returncode, done.stdout) == (0, "nothing is recorded any more\n")
    found = said(gpus, "whatif", str(log), "--policy", "time_of_day")
    assert found["decided_as_recorded"] == found["events"] > 0
    assert "time_of_day" in arbiter(gpus, "whatif", str(log), "--policy", "time_of_day").stdout


@pytest.mark.spec("A20")
def test_the_command_replaces_the_arbiter_and_keeps_engines(gpus: Graph) -> None:
    assert gpus.post("/v1/chat/completions", HELLO)[0] == 200
    before, engines, epoch = ticket(gpus, CHAT), gpus.engines(), gpus.state()["epoch"]
    report = said(gpus, "upgrade", "--address", gpus.address)
    assert report["before"] == report["after"] and report["epoch"] > epoch
    assert (ticket(gpus, CHAT), gpus.engines()) == (before, engines)
    assert gpus.post("/v1/chat/completions", HELLO)[0] == 200


@pytest.mark.spec("H0")
def test_the_configuration_for_a_larger_gpu_deploys_over_it_and_serves(gpus: Graph) -> None:
    """And the first again, which the tests below ask."""
    larger = yaml.safe_load((ROOT / "serve_config.gpu80.yaml").read_text())
    larger = with_fake_engines(larger, gpus.folder)
    larger["http_options"] = gpus.config["http_options"]
    for config, model in ((larger, "qwen3-30b-a3b"), (gpus.config, CHAT)):
        gpus.deploy(config)
        until(partial(serves, gpus, model), 90, f"{model} is served")


def serves(graph: Graph, model: str) -> bool:
    status, answer = graph.post("/v1/chat/completions", HELLO | {"model": model})
    return (status, answer.get("model")) == (200, model)


@pytest.mark.spec("A20")
def test_the_command_ends_the_arbiter_and_every_engine(gpus: Graph) -> None:
    """What follows in this file has no arbiter: no front starts another."""
    assert gpus.post("/v1/chat/completions", HELLO)[0] == 200
    assert gpus.engines()
    where = ("--address", gpus.address)
    assert said(gpus, "down", *where) == {"arbiter": "stopped", "tickets_cut_off": 0}
    until(lambda: not gpus.engines(), 60, "no engine is left")
    done = arbiter(gpus, "down", *where)
    assert done.returncode == 0 and "arbiter: there is none" in done.stdout
    failed = arbiter(gpus, "status")
    assert failed.returncode == 1
    assert "arbiter_unavailable" in failed.stderr and "Try again in" in failed.stderr
    assert "it starts with the front" in said(gpus, "upgrade", *where)["arbiter"]
    failed = arbiter(gpus, "record", "x", *where)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("arbiter record: the arbiter was not reachable")


@pytest.mark.spec("A18", "A20", "J8", "J9")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO | {"model": OTHER}),  # by the replica that is there
        (
            "/v1/images/generations",
            {"model": DRAW, "prompt": "a lease"},
        ),  # by a new replica
        ("/ready", None),
    ],
)
def test_cold_request_after_arbiter_down_gets_503_with_retry_after(
    gpus: Graph, path: str, body: object | None
) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(gpus.url + path, data, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=COLD_S)
    assert caught.value.code == 503
    assert int(caught.value.headers["retry-after"]) >= 1
    assert json.load(caught.value)["error"]["code"] == "arbiter_unavailable"
    assert gpus.engines() == []
    assert gpus.get("/health") == {"status": "ok"}
