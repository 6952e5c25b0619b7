"""A target and its drafter are two tickets of one engine, on real vLLM."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI

from tests.graph.conftest import BIN, ROOT, Graph, until
from tests.graph.test_leases import environment
from tests.graph.test_residency import emptied, said

TARGET, DRAFTER, ALONE = "drafted-chat", "small-chat", "plain-chat"
MIB = 1 << 20
LEFT = 800 * MIB  # room for the target (700 MiB) or the drafter (214), not for both


def pair(graph: Graph) -> dict[str, dict[str, Any]]:
    """Their tickets, by model."""
    return {t["model"]: t for t in graph.state()["tickets"] if t["model"] in (TARGET, DRAFTER)}


def granted(graph: Graph) -> list[tuple[int, str]]:
    return [
        (e["seq"], e["model"]) for e in graph.events()
        if e["kind"] == "ticket_granted" and e["model"] in (TARGET, DRAFTER)
    ]  # fmt: skip


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
        until(lambda: [t for t in graph.state()["tickets"] if t["lease"]], 30, "it is leased")
        yield
    finally:
        job.communicate(b"\n", timeout=30)


@pytest.mark.spec("A13")
def test_target_and_drafter_are_granted_all_or_none_and_answer_as_the_target_alone(
    graph: Graph, client: OpenAI
) -> None:
    alone = answer(client, ALONE)
    until(lambda: emptied(graph), 60, "nothing is loaded")
    before = granted(graph)
    with ThreadPoolExecutor(1) as asking:
        with all_but(graph, LEFT):
            together = asking.submit(answer, client, TARGET)
            until(lambda: len(pair(graph)) == 2, 60, "both are asked for")
            [device] = [d for d in graph.state()["devices"] if d["kind"] == "cpu"]
            assert device["free_bytes"] >= 700 * MIB, "either of them would have had room"
            assert {t["state"] for t in pair(graph).values()} == {"queued"}
            assert granted(graph) == before
        assert together.result(60) == alone
    [first, second] = granted(graph)[len(before) :]
    assert {first[1], second[1]} == {TARGET, DRAFTER}
    both = pair(graph)
    assert both[DRAFTER]["shares_process_with"] == both[TARGET]["ticket"]
    assert {t["state"] for t in both.values()} == {"resident"}
    assert len(graph.engines()) == 2  # of one engine: the frontend and its core
    measured = {m: sum(t["measured_bytes"].values()) for m, t in both.items()}
    assert all(size > 50 * MIB for size in measured.values()), measured
    until(lambda: said(graph, "unload", TARGET) and not pair(graph), 30, "both are gone")
    assert not graph.engines()
