"""Any process of the whole graph killed while the official client streams from the real engines.

Every request is answered or refused with a typed error, the next one is served, and afterwards the
books equal what the kernel measures and no engine is left that no ticket names.
"""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import APIError, OpenAI

from tests.graph.conftest import Graph, until
from tests.graph.test_life import engines

CHAT = "tiny-chat"
HELLO = [{"role": "user", "content": "Who holds the memory?"}]

# Part of the command line of each victim. Ray names its workers after their actor.
VICTIMS = {
    "replica": "ray::ServeReplica:chat:chat",
    "engine": "engine",
    "arbiter": "ray::ArbiterActor",
    "node agent": "ray::NodeAgent",
    "zygote": "deployments.engines.zygote",
    "controller": "ray::ServeController",
}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def victims(graph: Graph, kind: str) -> list[int]:
    """Pids of that kind in this graph, engines by their kernel name."""
    if kind == "engine":
        return engines()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = [pid for pid in pids if VICTIMS[kind] in command_of(pid)]
    if kind == "zygote":  # its forks keep its command line, but not its name
        node = graph.state()["devices"][0]["node"]
        return [p for p in found if node in command_of(p) and name_of(p) == "zygote"]
    return found


def stream_once(client: OpenAI) -> str:
    """ "answered", or the code of the typed error it ended with."""
    try:
        stream = client.chat.completions.create(
            model=CHAT, messages=HELLO, max_tokens=64, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = [c.choices[0].delta.content for c in stream if c.choices]
    except APIError as error:
        assert error.code or error.type, f"an error without a type: {error!r}"
        return str(error.code or error.type)
    assert pieces, "an answer without a piece"
    return "answered"


@pytest.mark.spec("A18", "A19")
@pytest.mark.parametrize("kind", sorted(VICTIMS))
def test_a_killed_process_loses_nothing(graph: Graph, client: OpenAI, kind: str) -> None:
    assert stream_once(client) == "answered"
    found = victims(graph, kind)
    assert found, f"no {kind} runs"
    stop = threading.Event()
    outcomes: Counter[str] = Counter()

    def load() -> None:
        while not stop.is_set():
            outcomes[stream_once(client)] += 1

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load) for _ in range(4)]
        before = outcomes["answered"]
        until(lambda: outcomes["answered"] >= before + 4, 60, "the load is under way")
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        killed_at = outcomes["answered"]
        until(lambda: outcomes["answered"] >= killed_at + 8, 90, f"served again; {outcomes}")
        stop.set()
        for one in loads:
            one.result()
    assert outcomes["answered"] > 0
    assert set(outcomes) <= {"answered", "engine_lost", "arbiter_unavailable", "ticket_closed"}
    until(lambda: books_are_true(graph), 20, "the books equal the measured bytes")
    assert stream_once(client) == "answered"


def books_are_true(graph: Graph) -> bool:
    """Nothing overcommitted, nothing measured that is not charged, no engine without a ticket."""
    state = graph.state()
    for device in state["devices"]:
        total = device["free_bytes"] + device["charged_bytes"] + device["foreign_bytes"]
        if total != device["budget_bytes"] or device["measured_bytes"] > device["charged_bytes"]:
            return False
    holding = [t for t in state["tickets"] if t["state"] not in ("queued", "closed")]
    roots = {os.getpgid(pid) for pid in engines()}
    return len(roots) == len(holding) and all(t["state"] != "reclaiming" for t in holding)
