"""The system as a person starts it: by `serve run` of the shipped file with no variable set, or by
`make serve` of a file that `arbiter init` wrote. `make serve` ends in `arbiter serve`, which is
`serve run` with its lines in a file."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.cli.cluster.serve import RULE, ask_ready
from deployments.front.proxy import TAKEN_S
from models import shipped, vllm_classes
from models.make_models import default_folder
from tests.graph.conftest import BIN, ROOT, Graph, command_of, stop, until
from tests.support import graph_processes
from tests.support.hub_server import PINNED, hub_server
from tests.support.ports import free_port

ARBITER = [sys.executable, "-m", "deployments.cli"]
MAKE = ["make", "--no-print-directory", "serve", f"VENV={sys.prefix}"]
INSTALLED = f"{sys.prefix}/.installed-cpu"
HELLO = [{"role": "user", "content": "hi"}]
ADAPTERS = default_folder() / "small-chat-adapters"
CHAT = {"model": "small-chat", "messages": HELLO, "max_tokens": 2, "temperature": 0}
EMBED = {"model": "all-minilm-l6-v2", "input": "hi"}
# What a person may have set before `make serve`, which leaves it alone: of some variables of
# deployments/config/start_variables.py what Ray and Serve take without them.
RAYS_OWN = {
    "RAY_preload_python_modules": "",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(4 << 20),
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "HF_HUB_OFFLINE": "0",
}


@contextlib.contextmanager
def own_home() -> Iterator[tuple[Path, dict[str, str]]]:
    """A home and a place for temporary files, by which Ray finds no other cluster; and an
    environment of those and the PATH alone."""
    with tempfile.TemporaryDirectory(prefix="plain-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        made = home / ".cache" / "serve-arbiter"
        made.mkdir(parents=True)
        shipped.unpack_all(default_folder())  # as `make models` does
        (made / "models").symlink_to(default_folder())
        vllm_classes.inspect(default_folder())  # into the cache of vLLM, of which it has a copy
        shutil.copytree(Path.home() / ".cache" / "vllm", home / ".cache" / "vllm")
        (home / ".ray").mkdir()
        (home / ".ray" / "config.json").write_text('{"usage_stats": false}')  # no report goes out
        yield home, {"HOME": folder, "TMPDIR": folder, "PATH": os.environ["PATH"]}


@contextlib.contextmanager
def running(command: list[str], file: Path, env: dict[str, str]) -> Iterator[Graph]:
    """What the command starts of a configuration, until the test is over."""
    home, config = file.parent, yaml.safe_load(file.read_text())
    with (home / "said.log").open("wb") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True
        )
    port = config["http_options"]["port"]
    try:
        yield Graph(f"http://127.0.0.1:{port}", process, home, config)
    finally:
        stop(process)


def is_installed(*more: str) -> bool:
    """Whether make has nothing to install for this checkout; it only looks."""
    look = ["make", "--question", INSTALLED, f"VENV={sys.prefix}", *more]
    code = subprocess.run(look, cwd=ROOT, timeout=60, check=False).returncode
    assert code in (0, 1), "make could not look"
    return code == 0


@contextlib.contextmanager
def plain_start(**variables: str) -> Iterator[Graph]:
    assert is_installed(), f"{INSTALLED} is older than this checkout: `make install` comes first"
    with own_home() as (home, bare):
        env, file = bare | RAYS_OWN | variables, home / "serve_config.yaml"
        words = ["init", str(file), "--cpu", "--port", str(free_port())]
        subprocess.run([*ARBITER, *words], cwd=ROOT, env=env, timeout=60, check=True)
        have_adapters(home / "adapters", file)
        with running([*MAKE, f"CONFIG={file}"], file, env) as graph:
            yield graph


def have_adapters(folder: Path, file: Path) -> None:
    """As the owner of a configuration writes it: an adapter in a folder, one of an organisation of
    the hub, and where they are."""
    shutil.copytree(ADAPTERS / "french", folder / "near")
    (folder / "remote.json").write_text(json.dumps({"far": f"hf://our-org/french@{PINNED}/"}))
    text, shipped_one = file.read_text(), f"folder: ~/.cache/serve-arbiter/models/{ADAPTERS.name}"
    assert text.count(shipped_one) == 1
    file.write_text(text.replace(shipped_one, f'folder: {folder}, urls: ["hf://our-org/"]'))


def content(graph: Graph, model: str) -> str:
    messages = [{"role": "user", "content": "71"}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    status, answer = graph.post("/v1/chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def said(graph: Graph) -> str:
    return (graph.folder / "said.log").read_text()


def has_spare(graph: Graph) -> bool:
    """A worker of Ray at hand for the next replica."""
    return any(command_of(pid).startswith("ray::IDLE") for pid in graph.workers())


def is_ready(graph: Graph) -> bool:
    assert graph.process.poll() is None, f"make serve ended: {said(graph)[-2000:]}"
    return said(graph).count(RULE) == 2


def is_warm(graph: Graph) -> bool:
    assert graph.process.poll() is None, f"serve run ended: {said(graph)[-2000:]}"
    nodes = (ask_ready(graph.url) or {"nodes": {}})["nodes"]
    return bool(nodes) and all(row["state"] == "ready" for row in nodes.values())


@pytest.mark.spec("H0", "J8", "L3")
def test_serve_run_of_the_shipped_file_answers_with_no_variable_set() -> None:
    """But for the port, which another may have; and beside an application that fails."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    assert config["http_options"]["port"] == 8000
    config["http_options"]["port"] = free_port()
    config["applications"].append(never_starts("fails", "/fails"))
    with own_home() as (home, env):
        (file := home / "serve_config.yaml").write_text(yaml.safe_dump(config))
        with running([str(BIN / "serve"), "run", str(file)], file, env) as graph:
            until(lambda: is_warm(graph), 400, "its front and its node are ready")
            status, answer = graph.post("/v1/chat/completions", CHAT)
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == 2
            assert 0.35 < share_lent(graph) < 0.45
            knows_what_serve_gets_wrong(graph)
            says_when_to_come_back_without_a_front(graph)


def share_lent(graph: Graph) -> float:
    """What the device lends, divided by what all models of the table need together."""
    table = graph.config["applications"][0]["deployments"][0]["user_config"]
    models = [model for row in table["capabilities"].values() for model in row["models"]]
    plans = [graph.post("/arbiter/plan", {"model": model}) for model in models]
    assert [status for status, _ in plans] == [200] * 8, plans
    [device] = [row for row in graph.state()["devices"] if row["kind"] == "cpu"]
    return float(device["budget_bytes"]) / sum(plan["need_bytes"] for _, plan in plans)


@pytest.mark.spec("J8")
def test_serve_run_whose_front_never_starts_says_when_to_come_back() -> None:
    """No front has put a middleware around the proxy, but its application has been built; so it is
    where Serve starts another proxy."""
    http_options, front = {"port": free_port()}, never_starts("front", "/")
    config = {"http_options": http_options, "applications": [front]}
    once = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1"}  # each try is a process and its imports
    with own_home() as (home, env):
        (file := home / "serve_config.yaml").write_text(yaml.safe_dump(config))
        with running([str(BIN / "serve"), "run", str(file)], file, env | once) as graph:
            assert until(lambda: given_up(graph, "/health"), 180, "it is given up") == (503, "10")
            [proxy] = graph_processes.victims(graph, "proxy")
            os.kill(proxy, signal.SIGKILL)
            assert until(lambda: given_up(graph, "/health"), 180, "another serves") == (503, "10")


def never_starts(name: str, route_prefix: str) -> dict[str, Any]:
    """An application of a front that takes its table for bad."""
    deployments = [{"name": "front", "user_config": {"arbiter": "none"}}]
    built = {"import_path": "deployments.app:front", "deployments": deployments}
    return {"name": name, "route_prefix": route_prefix, **built}


def knows_what_serve_gets_wrong(graph: Graph) -> None:
    """Although its proxy was started without our middlewares."""
    with contextlib.closing(connected(graph)) as connection:
        connection.putrequest("GET", "/health")
        connection.putheader("x-request-id", b"\xff\xfe")
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
    assert until(lambda: given_up(graph, "/fails/health"), 180, "it is given up") == (503, "10")


def says_when_to_come_back_without_a_front(graph: Graph) -> None:
    """A request that is in the front when it dies is told so. With Serve's controller stopped no
    other front comes, and a request that comes meanwhile waits for TAKEN_S."""
    [front] = graph_processes.replicas(graph, "front")
    [controller] = graph_processes.victims(graph, "controller")
    with contextlib.closing(connected(graph)) as held:
        held.putrequest("POST", "/v1/chat/completions")
        held.putheader("content-length", "100")
        held.endheaders(b"{")
        assert graph.get("/health"), "a later request is answered, so the front has this one"
        os.kill(controller, signal.SIGSTOP)
        try:
            os.kill(front, signal.SIGKILL)
            assert refused(held) == (503, "2", "front_lost")
            until(lambda: without_front(graph) == (503, "10", "front_away"), 180, "it is away")
        finally:
            os.kill(controller, signal.SIGCONT)
    until(lambda: without_front(graph) is None, 120, "another front answers")


def without_front(graph: Graph) -> tuple[int, str | None, str] | None:
    """None: a front answers."""
    with contextlib.closing(connected(graph, TAKEN_S + 60)) as connection:
        connection.request("GET", "/v1/models")
        return refused(connection)


def refused(connection: http.client.HTTPConnection) -> tuple[int, str | None, str] | None:
    """Status, Retry-After and code; None: it is answered."""
    answer = connection.getresponse()
    said = json.load(answer)
    if answer.status == 200:
        return None
    return answer.status, answer.headers["retry-after"], said["error"]["code"]


def given_up(graph: Graph, path: str) -> tuple[int, str | None] | None:
    """Status and Retry-After, once Serve has given an application up. Before that it may not
    listen, and then a request waits for a replica."""
    with contextlib.closing(connected(graph, 5)) as connection:
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
        except (ConnectionError, TimeoutError):
            return None
        is_serves = b"failed to deploy" in answer.read()
        return (answer.status, answer.headers["retry-after"]) if is_serves else None


def connected(graph: Graph, within_s: float = 60) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urllib.parse.urlsplit(graph.url).netloc, timeout=within_s)


def test_what_make_would_install_is_known_without_installing() -> None:
    """An environment may be another checkout's as well, so no test changes it."""
    before = os.stat(INSTALLED).st_mtime_ns
    assert not is_installed("--what-if=pyproject.toml")
    assert os.stat(INSTALLED).st_mtime_ns == before


@pytest.mark.spec("H0", "M1", "M2", "F2")
def test_plain_serve_run_of_a_written_file_answers_and_is_warm() -> None:
    """With HF_HUB_OFFLINE=0 it asks a hub for adapters."""
    models = {("our-org/french", PINNED): ADAPTERS / "french"}
    with hub_server(models) as hub, plain_start(HF_ENDPOINT=hub.url) as graph:
        until(lambda: is_ready(graph), 400, "it says that it is ready")
        assert has_spare(graph), "the next replica starts as fast as any"
        *steps, box = said(graph).split(RULE)[:2]
        done = re.findall(r"^  ok +(\w+)", "".join(steps), re.M)
        starts = done.index("configuration")
        assert set(done[:starts]) == {"models"}, "nothing is left to install"
        assert done[starts:] == [
            "configuration",
            "Ray",
            "front",
            "arbiter",
            "imports",
            "capabilities",
        ]
        assert f"{graph.url}/v1 (OpenAI)" in box and "failed" not in box
        report = graph.get("/ready")
        assert {row["state"] for row in report["nodes"].values()} == {"ready"}
        assert report["capabilities"].keys() == graph.table["capabilities"].keys()
        [curl] = re.findall(r"^curl .*$", box, re.M)
        pasted = subprocess.run(curl, shell=True, capture_output=True, timeout=120, check=True)
        assert b'"role":"assistant"' in pasted.stdout
        status, answer = graph.post("/v1/chat/completions", CHAT)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 2
        status, answer = graph.post("/v1/embeddings", EMBED)
        assert status == 200, answer
        assert len(answer["data"][0]["embedding"]) == 384
        assert {t["model"] for t in graph.state()["tickets"]} & {"small-chat", EMBED["model"]}
        assert content(graph, "far") == content(graph, "near") != content(graph, "small-chat")
        assert any(path.startswith("/our-org/french/resolve/") for path, _ in hub.asked)
        [log] = (graph.folder / ".cache" / "serve-arbiter" / "logs").iterdir()
        assert "Started a local Ray instance" in log.read_text()
        assert "Ray instance" not in said(graph)
        stop(graph.process)
        assert "ok     stopping" in said(graph)
