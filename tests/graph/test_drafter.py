"""A target and its drafter are one ticket of one engine, on real vLLM."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI

from tests.graph.conftest import BIN, ROOT, Graph, until
from tests.support.graph_commands import by_hand, environment, send, unload_all

TARGET, DRAFTER, ALONE = "drafted-chat", "drafting-chat", "plain-chat"
MIB = 1 << 20
LEFT = 800 * MIB  # room for the target (700 MiB) or the drafter (214), not for both


def target(graph: Graph) -> dict[str, Any] | None:
    """Its one ticket."""
    tickets = [t for t in graph.state()["tickets"] if t["model"] in (TARGET, DRAFTER)]
    assert len(tickets) <= 1
    return tickets[0] if tickets else None


def answer(client: OpenAI, model: str) -> str:
    """Greedy, from the plain prompt: the two have templates of their own."""
    asked = client.completions.create(
        model=model, prompt="A lease is", max_tokens=48, temperature=0
    )
    return asked.choices[0].text


@contextmanager
def all_but(graph: Graph, left_bytes: int) -> Iterator[None]:
    """A lease on the rest of the empty device."""
    [device] = [d for d in graph.state()["devices"] if d["kind"] == "cpu"]
    gigabytes = str((device["free_bytes"] - left_bytes) / 1e9)
    command = [BIN / "arbiter", "lease", "--gb", gigabytes, "--name", "crowd", "--"]
    waits = [sys.executable, "-c", "input()"]
    job = subprocess.Popen(
        [*command, *waits], cwd=ROOT, env=environment(graph), stdin=subprocess.PIPE
    )
    try:
        until(lambda: [t for t in graph.state()["tickets"] if t["lease"]], 60, "it is leased")
        yield
    finally:
        job.communicate(b"\n", timeout=60)


def beside(graph: Graph) -> int:
    """How many models other than the pair are loaded, each in one process."""
    return sum(t["model"] != TARGET and t["lease"] is None for t in graph.state()["tickets"])


@pytest.mark.spec("A13")
def test_target_waits_for_room_for_its_drafter_too_and_answers_as_the_target_alone(
    graph: Graph, client: OpenAI
) -> None:
    alone = answer(client, ALONE)
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    with ThreadPoolExecutor(1) as asking:
        with all_but(graph, LEFT):
            together = asking.submit(answer, client, TARGET)
            until(lambda: target(graph), 60, "the target is requested")
            [device] = [d for d in graph.state()["devices"] if d["kind"] == "cpu"]
            assert device["free_bytes"] >= 700 * MIB, "the target alone would have had room"
            assert (target(graph) or {})["state"] == "queued"
        assert together.result(60) == alone
    held = target(graph) or {}
    assert held["model"] == TARGET and held["state"] == "resident"
    assert held["drafter_bytes"] > 100 * MIB
    assert sum(held["charged_bytes"].values()) >= 700 * MIB + held["drafter_bytes"]
    # Of the pair the frontend and its core. Where the voice has a replica, the pipeline loads it.
    until(lambda: len(graph.engines()) == 2 + beside(graph), 30, "the pair is one engine")
    until(lambda: by_hand(graph, "unload", TARGET) and not target(graph), 30, "the pair is gone")
    until(lambda: len(graph.engines()) == beside(graph), 30, "its processes have ended")


@pytest.mark.spec("F9")
def test_drafter_leaves_under_pressure_its_text_goes_on_and_it_is_back_with_the_next_load(
    graph: Graph, client: OpenAI
) -> None:
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    said = answer(client, TARGET)
    before, engines = target(graph) or {}, set(graph.engines())
    assert before["drafter_bytes"] > 100 * MIB
    try:
        send(graph, "POST", "/arbiter/pressure", {"where": graph.node, "level": "low"})
        until(lambda: (target(graph) or {}).get("drafter_bytes") == 0, 60, "the drafter has left")
        assert answer(client, TARGET) == said
        assert set(graph.engines()) == engines, "no process was started for it"
    finally:
        send(graph, "POST", "/arbiter/pressure", {"where": graph.node, "level": "nominal"})
    after = target(graph) or {}
    assert (after["ticket"], after["state"]) == (before["ticket"], "resident")
    held = sum(before["charged_bytes"].values()) - sum(after["charged_bytes"].values())
    assert held >= 0.9 * before["drafter_bytes"]
    until(lambda: by_hand(graph, "unload", TARGET) and not target(graph), 60, "the target is gone")
    assert answer(client, TARGET) == said
    assert (target(graph) or {})["drafter_bytes"] == before["drafter_bytes"]
    until(lambda: by_hand(graph, "unload", TARGET) and not target(graph), 60, "it is gone")
