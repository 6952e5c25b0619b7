"""What only a GPU can tell, of the whole graph on one: bytes that NVML names against the books, and
models that load, sleep, wake, are killed and make room for each other and for strangers.

    python -m benchmarks.on_gpu --seconds 20

It takes some five minutes, of which the models take one; `--only-make` makes them beforehand. Two
Llamas of 1.1 billion random weights share room for one of them with an encoder of 0.3 billion
and the tiny models of pictures. The steps run one after the other; a step that fails is told with
its error, and the next goes on. With neither GPU nor driver it stops at once.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml

from arbiter.units import GIB, MIB
from benchmarks import report, servers
from benchmarks.calls import FACT, LOOK, PICTURE, TOKENS, Call, answer
from benchmarks.first_token import until
from benchmarks.gpu_models import DRAFTED, ONE, TWO, UNSIZED, configured, make_all
from deployments.front.access import keys
from models.make_models import default_folder
from models.train_vision import QUESTIONS

BACK_WITHIN_S = 30.0
LEFT_BYTES = 3 * GIB  # by a stranger that presses, its own context of half a GiB aside
MOVES = ("model_load", "model_unload", "model_wake", "wake_unverified", "not_asleep")
LONG = " ".join(f"the {number}th part of memory is lent," for number in range(250))


class Gpu:
    """The first GPU of this machine, asked of NVML."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used(self) -> int:
        """Bytes, the driver's own included."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def total(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def by_pid(self) -> dict[int, int]:
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {process.pid: int(process.usedGpuMemory or 0) for process in listed}


class Graph:
    """The running system, as its owner asks it."""

    def __init__(self, url: str, state_file: Path, gpu: Gpu) -> None:
        self.url, self.gpu = url, gpu
        self.texts: dict[str, set[str]] = {ONE.name: set(), TWO.name: set()}  # of the same prompt
        self._key = keys.first_key_path(keys.keys_path(None, str(state_file))).read_text().strip()

    def send(self, method: str, path: str, body: object = None) -> Any:
        head = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, head, method=method)
        with urllib.request.urlopen(request, timeout=60) as said:
            return json.load(said)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.send("GET", "/arbiter/state")
        return state

    def device(self) -> dict[str, Any]:
        gpus = [row for row in self.state()["devices"] if "gpu:" in row["device"]]
        if not gpus:
            raise RuntimeError("the arbiter knows no GPU")
        return dict(gpus[0])

    def ticket(self, model: str) -> dict[str, Any] | None:
        return next((t for t in self.state()["tickets"] if t["model"] == model), None)

    def level(self, model: str) -> str:
        ticket = self.ticket(model)
        return "gone" if ticket is None else str(ticket["state"])

    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.send("GET", "/arbiter/events/recent")["events"]
        return events

    def unload(self, model: str) -> None:
        """Until it is gone: a model that answers, or whose bytes are changing, is asked again."""

        def gone() -> bool:
            if self.ticket(model) is not None:
                self.send("POST", f"/arbiter/models/unload/{model}")
            return self.ticket(model) is None

        until(gone, BACK_WITHIN_S, f"{model} is gone")

    def chat(self, model: str, text: str = "Who holds the memory?", **more: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        fields = {"messages": messages, **TOKENS, **more}
        said, took_s = answer(self.url, Call("/v1/chat/completions", fields), model)
        return json.loads(said), took_s

    def text(self, model: str, **more: Any) -> str:
        return str(self.chat(model, **more)[0]["choices"][0]["message"]["content"])

    def books(self) -> dict[str, Any]:
        """The device as the arbiter has it, beside NVML."""
        time.sleep(1.5)  # a reading each second
        row = self.device()
        kept = "budget_bytes measured_bytes foreign_bytes free_bytes is_exact".split()
        pids = {str(pid): size // MIB for pid, size in self.gpu.by_pid().items()}
        tickets = [
            {k: t[k] for k in ("model", "state", "need_bytes", "measured_bytes")}
            for t in self.state()["tickets"]
        ]
        return {
            "nvml_used_mib": self.gpu.used() // MIB,
            "nvml_by_pid_mib": pids,
            "device": {name: row.get(name) for name in kept},
            "tickets": tickets,
        }


# -- the steps -------------------------------------------------------------------------------------


def introduced(graph: Graph) -> dict[str, Any]:
    until(lambda: any("gpu:" in d["device"] for d in graph.state()["devices"]), 60, "a GPU")
    return {"device": graph.device(), **graph.books()}


def loaded(graph: Graph) -> dict[str, Any]:
    """First loads, the zygote's imports among them."""
    figures: dict[str, Any] = {}
    for shape in (ONE, TWO, ONE):
        said, took_s = graph.chat(shape.name)
        graph.texts[shape.name].add(said["choices"][0]["message"]["content"])
        figures.setdefault(f"{shape.name}_s", []).append(took_s)
        figures[f"after_{shape.name}"] = graph.books()
    return figures


def woken(graph: Graph, rounds: int = 5) -> dict[str, Any]:
    """Each request puts the other to sleep. Answers of one model stay as before its first sleep."""
    times = []
    for _ in range(rounds):
        for shape in (TWO, ONE):
            said, took_s = graph.chat(shape.name)
            graph.texts[shape.name].add(said["choices"][0]["message"]["content"])
            times.append(took_s)
    kinds = [e for e in graph.events() if e["kind"] in MOVES]
    return {
        "swap_s": report.Sample(tuple(times)),
        "different_answers": {name: len(texts) for name, texts in graph.texts.items()},
        "last_events": kinds[-8:],
        **graph.books(),
    }


def under_load(graph: Graph, seconds: float, clients: int = 4) -> dict[str, Any]:
    """Clients of both models at once: evictions under load, and no request lost."""
    ends_s = time.monotonic() + seconds
    times: dict[str, list[float]] = {ONE.name: [], TWO.name: []}
    failures: list[str] = []

    def ask(model: str) -> None:
        while time.monotonic() < ends_s:
            try:
                times[model].append(graph.chat(model, max_tokens=32)[1])
            except (RuntimeError, OSError) as error:
                failures.append(repr(error)[:300])

    before = len([e for e in graph.events() if e["kind"] == "eviction"])
    threads = [threading.Thread(target=ask, args=(shape.name,)) for shape in (ONE, TWO) * clients]
    most = 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, graph.gpu.used())
        time.sleep(0.02)
    evictions = [e for e in graph.events() if e["kind"] == "eviction"]
    return {
        "answers": {model: len(took) for model, took in times.items()},
        "seconds": {m: report.Sample(tuple(took)) for m, took in times.items() if took},
        "failures": failures,
        "evictions": len(evictions) - before,
        "most_used_mib": most // MIB,
        **graph.books(),
    }


def small_ones(graph: Graph) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    embed = Call("/v1/embeddings", {"input": "a ticket"})
    draw = Call("/v1/images/generations", {"prompt": FACT.caption, "x_seed": 3})
    look = Call("/v1/chat/completions", {"messages": LOOK, **TOKENS})
    for model, call in (("encoder", embed), ("tiny-draw", draw), ("tiny-describe", look)):
        figures[model] = [answer(graph.url, call, model)[1] for _ in range(3)]
    figures["seen"] = graph.text("tiny-describe", messages=LOOK)
    return {**figures, **graph.books()}


def adapters(graph: Graph) -> dict[str, Any]:
    """The base and eight adapters at once, and each alone."""
    folder = default_folder() / "small-chat-adapters"
    adapter_names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    names = ["small-chat", *(f"small-chat:{name}" for name in adapter_names)]
    alone = {name: graph.text(name, max_tokens=32) for name in names}
    together: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda n=name: together.update({n: graph.text(n, max_tokens=32)}))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = sum(alone[name] == together.get(name) for name in names)
    return {
        "names": len(names),
        "answer_as_alone": same,
        "different_texts": len(set(alone.values())),
    }


def unsized(graph: Graph) -> dict[str, Any]:
    """What a model of no stated size is granted at its first load and at the next, beside what
    it takes."""
    figures: dict[str, Any] = {}
    for when in ("first", "next"):
        graph.text(UNSIZED)
        time.sleep(4)  # two readings teach what it takes
        row = graph.ticket(UNSIZED) or {}
        figures[when] = {"granted": row["need_bytes"], "measured": row["measured_bytes"]}
        graph.unload(UNSIZED)
    return figures


def drafted(graph: Graph) -> dict[str, Any]:
    """A drafter leaves under low pressure, its text goes on, and it is back with the next load."""

    def ask() -> str:
        fields = {"prompt": "A lease is", "max_tokens": 48, "temperature": 0}
        said, _ = answer(graph.url, Call("/v1/completions", fields), DRAFTED)
        return str(json.loads(said)["choices"][0]["text"])

    def drafter() -> int | None:
        return (graph.ticket(DRAFTED) or {}).get("drafter_bytes")

    texts, failures, stop = [ask()], [], threading.Event()
    before, pids = graph.ticket(DRAFTED) or {}, set(graph.gpu.by_pid())
    device = graph.device()

    def go_on() -> None:
        while not stop.is_set():
            try:
                texts.append(ask())
            except FAILURES as error:
                failures.append(repr(error)[:300])

    thread = threading.Thread(target=go_on)
    thread.start()
    start_s = time.monotonic()
    try:
        graph.send("POST", "/arbiter/pressure", {"where": device["node"], "level": "low"})
        until(lambda: drafter() == 0, 60, "the drafter has left")
        took_s = time.monotonic() - start_s
        time.sleep(1.5)
        after, pids_after = graph.ticket(DRAFTED) or {}, set(graph.gpu.by_pid())
    finally:
        graph.send("POST", "/arbiter/pressure", {"where": device["node"], "level": "nominal"})
        stop.set()
        thread.join()
    graph.unload(DRAFTED)
    texts.append(ask())
    return {
        "answers": len(texts),
        "different_texts": len(set(texts)),
        "failures": failures,
        "left_s": took_s,
        "same_ticket": before.get("ticket") == after.get("ticket"),
        "drafter_bytes": [before.get("drafter_bytes"), after.get("drafter_bytes"), drafter()],
        "charged": [before.get("charged_bytes"), after.get("charged_bytes")],
        "measured": [before.get("measured_bytes"), after.get("measured_bytes")],
        "engines": {"ended": sorted(pids - pids_after), "came": sorted(pids_after - pids)},
    }


def pictures(graph: Graph) -> dict[str, Any]:
    """A picture that an engine has seen is not encoded again, by it or by the next."""

    def counts() -> tuple[int, int]:
        rows = [s["slab"] for s in graph.state()["slabs"]]
        mine = [
            r for r in rows if (r["owner"], r["content"]) == ("vision/tiny-describe", "picture")
        ]
        used: dict[str, Any] = max(
            mine, key=lambda row: (row["ticket"] or "", row["rows_count"]), default={}
        )
        return used.get("misses_count", 0), used.get("hits_count", 0)

    def see(kind: str) -> str:
        """Words before the picture, so that no other question has its tokens in the KV cache."""
        part = {"type": "image_url", "image_url": {"url": PICTURE}}
        asked = [{"type": "text", "text": QUESTIONS[kind][0]}, part]
        return graph.text("tiny-describe", messages=[{"role": "user", "content": asked}])

    figures: dict[str, Any] = {"at_first": counts()}
    for when, kind in (("again", "shape"), ("next_engine", "background")):
        if when == "next_engine":
            graph.unload("tiny-describe")
        said = see(kind)
        time.sleep(2.5)  # an agent tells of slabs each second or two
        figures[when] = {"misses_and_hits": counts(), "seen": said}
    return figures


def conversation(graph: Graph) -> dict[str, Any]:
    """Known tokens of a long prompt while its engine lives, and after it was unloaded."""
    figures: dict[str, Any] = {}
    for when in ("cold", "warm", "next_engine"):
        if when == "next_engine":
            time.sleep(2)
            graph.unload(ONE.name)
            graph.text(ONE.name)
        said, took_s = graph.chat(ONE.name, text=LONG)
        details = said["usage"].get("prompt_tokens_details") or {}
        figures[when] = {
            "seconds": took_s,
            "prompt": said["usage"]["prompt_tokens"],
            "known": details.get("cached_tokens"),
        }
    return figures


def killed(graph: Graph) -> dict[str, Any]:
    """SIGKILL of an engine: seconds until NVML has its bytes back, and until the
    arbiter knows."""
    graph.text(ONE.name)
    held, pid = max((size, pid) for pid, size in graph.gpu.by_pid().items())  # it is the largest
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    if not name.startswith("engine"):
        raise RuntimeError(f"NVML's process {pid} is {name} here, and no engine")
    before = graph.gpu.used()
    start_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: graph.gpu.used() <= before - 0.9 * held, BACK_WITHIN_S, "bytes are back")
    back_s = time.monotonic() - start_s
    until(lambda: graph.level(ONE.name) != "resident", BACK_WITHIN_S, "the arbiter knows")
    known_s = time.monotonic() - start_s
    again = graph.text(ONE.name)
    return {"held_mib": held // MIB, "back_s": back_s, "known_s": known_s, "again": again}


FAILURES = (RuntimeError, OSError, LookupError, ValueError, TypeError, AssertionError)

STRANGER = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def stranger(size_bytes: int) -> Iterator[int]:
    """A process without a ticket that holds so much; yields its pid."""
    command = [sys.executable, "-c", STRANGER, str(size_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline().strip() != b"held":
            raise RuntimeError("the stranger got no memory")
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()


def foreign(graph: Graph) -> dict[str, Any]:
    """What a process without a ticket holds is named, and charged once it takes from the arena."""
    before = graph.device()["foreign_bytes"]
    with stranger(4 * GIB) as pid:
        held = graph.gpu.by_pid()[pid]
        start_s = time.monotonic()

        def named() -> bool:
            processes = graph.device()["foreign_processes"]
            return any(p["pid"] == pid for p in processes)

        until(named, BACK_WITHIN_S, "the stranger is named")
        seen_s = time.monotonic() - start_s
        row = graph.device()
    return {"held_mib": held // MIB, "seen_s": seen_s, "before": before, "device": row}


def pressed(graph: Graph) -> dict[str, Any]:
    """A stranger takes nearly all of the card: idle models that are not text leave, and NVML's
    bytes of ours fall."""
    answer(graph.url, Call("/v1/embeddings", {"input": "a ticket"}), "encoder")
    graph.text(ONE.name)
    time.sleep(3)
    before, levels = graph.books(), {m: graph.level(m) for m in ("encoder", ONE.name)}
    with stranger(graph.gpu.total() - graph.gpu.used() - LEFT_BYTES):
        start_s = time.monotonic()
        with contextlib.suppress(RuntimeError):
            until(lambda: graph.level("encoder") != "resident", BACK_WITHIN_S, "it left")
        took_s = time.monotonic() - start_s
        during = graph.books()
        after = {m: graph.level(m) for m in ("encoder", ONE.name)}
    events = [e for e in graph.events() if "pressure" in json.dumps(e)]
    return {
        "before": before,
        "during": during,
        "levels": [levels, after],
        "took_s": took_s,
        "events": events[-6:],
    }


def emptied(graph: Graph) -> dict[str, Any]:
    """What is left on the card once every model was unloaded."""
    for ticket in graph.state()["tickets"]:
        graph.unload(ticket["model"])
    until(lambda: not graph.state()["tickets"], 60, "all are gone")
    return graph.books()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="of load")
    parser.add_argument("--only-make", action="store_true", help="the models")
    help_ = "the Llamas as vLLM runs them by default, compiled and with graphs"
    parser.add_argument("--compiled", action="store_true", help=help_)
    parser.add_argument("--steps", nargs="+", help="by name; default: all, which are written down")
    args = parser.parse_args()
    encoder = make_all()
    if args.only_make:
        return
    gpu = Gpu()
    figures: dict[str, Any] = {"used_before_mib": gpu.used() // MIB}
    steps: list[tuple[str, Callable[[Graph], dict[str, Any]]]] = [
        ("introduced", introduced),
        ("loaded", loaded),
        ("woken", woken),
        ("under_load", lambda graph: under_load(graph, args.seconds)),
        ("small_ones", small_ones),
        ("pictures", pictures),
        ("adapters", adapters),
        ("unsized", unsized),
        ("drafted", drafted),
        ("conversation", conversation),
        ("killed", killed),
        ("foreign", foreign),
        ("pressed", pressed),
        ("emptied", emptied),
    ]
    with tempfile.TemporaryDirectory() as folder:
        state_file = Path(folder) / "arbiter.sqlite"
        config = configured(encoder, state_file, is_compiled=args.compiled)
        with servers.our_graph(config, "default") as url:
            graph = Graph(url, state_file, gpu)
            for name, step in steps:
                if args.steps and name not in args.steps:
                    continue
                start_s = time.monotonic()
                try:
                    figures[name] = step(graph)
                except FAILURES as error:
                    traceback.print_exc()
                    figures[name] = {"failed": repr(error)}
                took_s = time.monotonic() - start_s
                told = json.dumps(figures[name], default=str)
                print(f"{name} ({took_s:.1f} s): {told}", flush=True)
                if not args.steps:  # a later step may end it, and a part is no record
                    report.write("on_gpu", figures, label="compiled" if args.compiled else None)


if __name__ == "__main__":
    main()
