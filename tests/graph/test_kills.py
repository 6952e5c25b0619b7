"""Any process of the whole graph killed while the official client streams from the real engines.

Every request is answered or refused with a typed error, the next one is served, and afterwards the
books equal what the kernel measures and no engine is left that no ticket names.
"""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import APIError, OpenAI

from tests.graph.conftest import Graph, command_of, name_of, pids, until
from tests.support.engine_host import device_bytes

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


def victims(graph: Graph, kind: str) -> list[int]:
    """Pids of that kind in this graph and no other."""
    if kind == "engine":
        return graph.engines()
    if kind == "zygote":  # its forks keep its command line, but not its name
        return [p for p in pids() if name_of(p) == "zygote" and graph.node in command_of(p)]
    return [p for p in graph.workers() if VICTIMS[kind] in command_of(p)]


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


@pytest.mark.spec("A18", "A19", "B1")
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
        try:
            until(lambda: outcomes["answered"] >= 4, 60, "the load is under way")
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            killed_at = outcomes["answered"]
            until(lambda: outcomes["answered"] >= killed_at + 8, 90, f"served again; {outcomes}")
        finally:
            stop.set()
        for one in loads:
            one.result()
    assert set(outcomes) <= {"answered", "engine_lost", "arbiter_unavailable"}
    until(lambda: books_are_true(graph), 20, "the books equal the measured bytes")
    assert stream_once(client) == "answered"


def books_are_true(graph: Graph) -> bool:
    """The books equal what the kernel says now, nothing is overcommitted, and there is an engine
    for each ticket that holds bytes and none besides."""
    state = graph.state()
    holding = [t for t in state["tickets"] if t["state"] not in ("queued", "closed")]
    if not state["devices"] or any(t["state"] == "reclaiming" for t in holding):
        return False  # a new epoch has not heard of its node, or bytes are on their way back
    roots = {os.getpgid(pid) for pid in graph.engines()}
    if len(roots) != len(holding):
        return False
    kernel_bytes = sum(device_bytes(root) for root in roots)
    cpu = next(d for d in state["devices"] if d["kind"] == "cpu")
    close = abs(cpu["measured_bytes"] - kernel_bytes) <= 0.05 * kernel_bytes  # B1
    return close and cpu["free_bytes"] >= 0 and cpu["charged_bytes"] >= cpu["measured_bytes"]
