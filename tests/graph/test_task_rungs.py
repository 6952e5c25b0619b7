"""Rungs that fail, wait and stay warm, on the running system."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import APIError, OpenAI

from tests.graph.conftest import Graph, until
from tests.graph.test_tasks import PLAIN, TINY, WIDE, leased
from tests.support.graph_commands import level
from tests.support.graph_tasks import HELLO, answered, tasks

# Above what a turn of the tests' keep-warm takes to be seen, and well below a test's patience.
STAYS_S = 5


def tickets(graph: Graph, model: str) -> list[dict[str, Any]]:
    return [t for t in graph.state()["tickets"] if t["model"] == model]


def engines(graph: Graph, model: str) -> list[int]:
    """Pids of its engines, by the logs that they write."""
    logs = {f"engine-{ticket['ticket']}.log" for ticket in tickets(graph, model)}
    return [pid for pid in graph.engines() if log_name(pid) in logs]


def log_name(pid: int) -> str:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/fd/1"))
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill_engines(graph: Graph, model: str) -> list[int]:
    """Pids of those that lived."""
    found = engines(graph, model)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found


@pytest.mark.spec("J5")
def test_model_that_answered_a_task_stays_warm_for_as_long_as_the_task_says(graph: Graph) -> None:
    with tasks(graph, stays={"ladder": [TINY], "keep_warm_s": STAYS_S}, usual={"ladder": [PLAIN]}):
        for _ in range(2):  # both are loaded, and then used within a moment of each other
            assert answered(graph, "stays") == (TINY, TINY)
            assert answered(graph, "usual") == (PLAIN, PLAIN)
        until(lambda: level(graph, PLAIN) == "cold", 20, "its keep-warm is over")
        assert level(graph, TINY) == "resident"
        until(lambda: level(graph, TINY) == "cold", 20, "the task's is over, too")


@pytest.mark.spec("J5")
def test_rung_whose_engine_dies_and_whose_load_fails_makes_way_for_the_next(graph: Graph) -> None:
    pinned = {"ladder": [TINY, PLAIN], "pin_primary": True}
    with tasks(graph, sum=pinned, other={"ladder": [PLAIN]}), ThreadPoolExecutor(1) as pool:
        assert answered(graph, "other") == (PLAIN, PLAIN)
        assert answered(graph, "sum") == (TINY, TINY)
        [before] = until(lambda: engines(graph, TINY), 10, "its engine writes a log")
        os.kill(before, signal.SIGSTOP)  # so that it has the request, and no token of the answer
        asking = pool.submit(answered, graph, "sum")
        until(lambda: [t for t in tickets(graph, TINY) if t["inflight"]], 10, "it has the request")
        killed = set[int]()

        def is_answered() -> bool:
            killed.update(kill_engines(graph, TINY))
            return asking.done()

        until(is_answered, 60, "it is answered, however often its engine and those after it die")
        assert asking.result() == (PLAIN, PLAIN)
        assert before in killed and len(killed) > 1, "the next one died while it loaded"
        until(lambda: not graph.state()["cooldowns"], 20, "its model may be loaded again")
        assert answered(graph, "sum") == (TINY, TINY)


@pytest.mark.spec("J5")
def test_nothing_follows_a_rung_whose_engine_dies_after_its_first_token(
    graph: Graph, client: OpenAI
) -> None:
    with tasks(graph, sum={"ladder": [TINY, PLAIN], "pin_primary": True}):
        models = set[str]()
        stream = client.chat.completions.create(
            model="task:sum",
            messages=HELLO,
            max_tokens=1_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with pytest.raises(APIError) as broken:
            for chunk in stream:
                if not models:
                    assert kill_engines(graph, TINY)
                models.add(chunk.model)
        assert broken.value.code == "engine_lost"
        assert models == {TINY}, "no part of another model's answer"


@pytest.mark.spec("J5", "A8")
def test_rung_that_waits_past_the_budget_is_left_and_its_ticket_is_withdrawn(graph: Graph) -> None:
    # A place is worth so much that the primary is asked, though a lease has its memory.
    patient = {"ladder": [WIDE, TINY], "step_s": 600, "budget_s": 2}
    with tasks(graph, patient=patient, other={"ladder": [TINY]}):
        until(lambda: level(graph, WIDE) == "cold", 40, "it is not there, or its keep-warm is over")
        with leased(graph, 0.65):
            assert answered(graph, "other") == (TINY, TINY)
            assert answered(graph, "patient") == (TINY, TINY)
            until(lambda: not tickets(graph, WIDE), 10, "nothing waits for it any more")
