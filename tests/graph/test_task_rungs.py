"""Rungs that fail, wait and stay warm, on the running system."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from openai import APIError, OpenAI

from tests.graph.conftest import Graph, until
from tests.support.graph_commands import level
from tests.support.graph_tasks import (
    HELLO,
    PLAIN,
    TINY,
    WIDE,
    answered,
    leased,
    make_cold,
    tasks,
)

# Well above the keep-warm of the tests, so that the difference is seen.
STAYS_S = 12


def tickets(graph: Graph, model: str) -> list[dict[str, Any]]:
    return [t for t in graph.state()["tickets"] if t["model"] == model]


@contextmanager
def loaded_beside(graph: Graph, model: str) -> Iterator[Callable[[], set[int]]]:
    """The task `sum` has loaded its primary, `model`, beside `other`'s. Gives the pids of engines
    that were not there before."""
    make_cold(graph, model)
    assert answered(graph, "other") == (PLAIN, PLAIN)
    others = set(graph.engines())
    assert answered(graph, "sum") == (model, model)
    yield lambda: set(graph.engines()) - others


def kill(pids: set[int]) -> set[int]:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


@pytest.mark.spec("J5")
def test_model_that_answered_a_task_stays_warm_for_as_long_as_the_task_says(graph: Graph) -> None:
    with tasks(graph, stays={"ladder": [TINY], "keep_warm_s": STAYS_S}, usual={"ladder": [PLAIN]}):
        for _ in range(2):  # both are loaded, and then used within a moment of each other
            assert answered(graph, "stays") == (TINY, TINY)
            assert answered(graph, "usual") == (PLAIN, PLAIN)
        until(lambda: level(graph, PLAIN) == "cold", 60, "its keep-warm is over")
        assert level(graph, TINY) == "device"
        until(lambda: level(graph, TINY) == "cold", 60, "the task's is over, too")

    def ends() -> list[float]:
        """Of its last use and of its stay. It is cold before its bytes are seen back, and only then
        its end is an event."""
        own = [event for event in graph.events() if event.get("model") == TINY]
        kinds = ("capability_run", "model_unload")
        latest = [max((e["unix_s"] for e in own if e["kind"] == k), default=0.0) for k in kinds]
        return latest if 0 < latest[0] < latest[1] else []

    used, left = until(ends, 60, "its bytes are seen back")
    assert left - used > STAYS_S


@pytest.mark.spec("J5")
def test_rung_whose_engine_dies_and_whose_load_fails_makes_way_for_the_next(graph: Graph) -> None:
    pinned = {"ladder": [TINY, PLAIN], "pin_primary": True}
    with (
        tasks(graph, sum=pinned, other={"ladder": [PLAIN]}),
        ThreadPoolExecutor(1) as pool,
        loaded_beside(graph, TINY) as engines,
    ):
        before = engines()
        for pid in before:  # so that it has the request, and no token of the answer
            os.kill(pid, signal.SIGSTOP)
        asking = pool.submit(answered, graph, "sum")
        until(lambda: [t for t in tickets(graph, TINY) if t["inflight"]], 60, "it has the request")
        killed = set[int]()

        def is_answered() -> bool:
            killed.update(kill(engines()))
            return asking.done()

        until(is_answered, 60, "it is answered, however often its engine and those after it die")
        assert asking.result() == (PLAIN, PLAIN)
        assert killed > before, "the next one died while it loaded"
        until(lambda: not graph.state()["cooldowns"], 60, "its model may be loaded again")
        assert answered(graph, "sum") == (TINY, TINY)


@pytest.mark.spec("J5")
def test_nothing_follows_a_rung_whose_engine_dies_after_its_first_token(
    graph: Graph, client: OpenAI
) -> None:
    pinned = {"ladder": [TINY, PLAIN], "pin_primary": True}
    with (
        tasks(graph, sum=pinned, other={"ladder": [PLAIN]}),
        loaded_beside(graph, TINY) as engines,
    ):
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
                    assert kill(engines())
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
            until(lambda: not tickets(graph, WIDE), 60, "nothing waits for it any more")
