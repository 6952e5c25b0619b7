"""Tasks on the running system, with the engines of the shipped configuration."""

import copy
import json
import os
import re
import signal
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from tests.graph.conftest import Graph, command_of, until
from tests.support.graph_commands import EMBEDDING, run_command
from tests.support.graph_tasks import (
    CONFIG,
    HELLO,
    PLAIN,
    TINY,
    WIDE,
    answered,
    in_use,
    leased,
    make_cold,
    put,
    tasks,
)

SMALL = "small-chat"
FAR, UNSEEN, THERE = "far-chat", "unseen-chat", "elsewhere/plain-chat"
PROCESSES = {"arbiter": "ray::ArbiterActor", "front": "ray::ServeReplica:front:front"}


def told_of_its_place(client: OpenAI, task: str) -> str:
    """What a streaming client is told once it is queued; it hangs up then."""
    with client.chat.completions.with_streaming_response.create(
        model=f"task:{task}", messages=HELLO, max_tokens=3, stream=True
    ) as answer:
        return next(line for line in answer.iter_lines() if "phase=queued" in line)


def rungs(graph: Graph, task: str) -> dict[str, dict[str, Any]]:
    """By model, in the order in which they would be asked now."""
    rungs = graph.get(f"/arbiter/explain/task:{task}")["rungs"]
    return {row["model"]: row for row in rungs if row["turn"]}


@pytest.mark.spec("J5")
def test_stand_in_answers_while_the_memory_is_held_and_a_pinned_primary_says_its_wait(
    graph: Graph, client: OpenAI
) -> None:
    ladder, large = [WIDE, TINY], [SMALL, TINY]
    pinned = {"ladder": ladder, "pin_primary": True}
    largest = {"ladder": large, "pin_primary": True}
    with tasks(graph, sum={"ladder": ladder}, best=pinned, large={"ladder": large}, most=largest):
        listed = {card.id: card.owned_by for card in client.models.list().data}
        assert listed["task:sum"] == listed["task:best"] == "task"
        assert answered(graph, "best") == (WIDE, WIDE)  # cold, and its load is seen
        make_cold(graph, WIDE)
        with leased(graph, 0.65):  # beside which tiny-chat fits, and wide-chat does not
            until(lambda: list(rungs(graph, "sum")) == [TINY, WIDE], 60, "the stand-in is first")
            assert answered(graph, "sum") == (TINY, TINY)
            best = rungs(graph, "best")
            assert list(best) == [WIDE, TINY] and "pinned" in best[WIDE]["why"]
            assert best[WIDE]["wait_s"] is None, "a lease ends when it ends"
        assert answered(graph, "best") == (WIDE, WIDE)
        with in_use(graph, WIDE):  # beside which small-chat does not fit
            assert answered(graph, "large") == (TINY, TINY)
            assert rungs(graph, "most")[SMALL]["wait_s"] > 0
            told = told_of_its_place(client, "most")
            assert re.search(r"estimate_s=\d", told), told
            text = run_command(graph, "explain", "task:most")
            assert f"1. {SMALL} (rung 1): the primary, pinned" in text and TINY in text


@pytest.mark.spec("J5")
def test_rung_that_cannot_have_the_request_is_left_out_though_it_is_the_pinned_primary(
    graph: Graph, client: OpenAI
) -> None:
    either = {"ladder": [EMBEDDING, TINY], "pin_primary": True}
    short = {"ladder": [WIDE, TINY], "pin_primary": True}  # of 1,024 tokens, and of 2,048
    with tasks(graph, either=either, short=short):
        assert answered(graph, "either") == (TINY, TINY)
        assert client.embeddings.create(model="task:either", input="x").model == EMBEDDING
        assert answered(graph, "short", max_tokens=1_100) == (TINY, TINY)
        assert answered(graph, "short") == (WIDE, WIDE)


@pytest.mark.spec("J5")
@pytest.mark.parametrize("kind", sorted(PROCESSES))
def test_configuration_outlives_a_kill_and_a_stale_change_is_refused(
    graph: Graph, kind: str
) -> None:
    with tasks(graph, sum={"ladder": [PLAIN], "budget_s": 9}):
        before = graph.get(CONFIG)
        stale = before["generation"] - 1
        status, error = put(graph, {"tasks": {}}, stale)
        assert (status, error["code"]) == (409, "settings_conflict")
        assert str(stale) in error["message"] and str(before["generation"]) in error["message"]
        old = running(graph, kind)
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        until(lambda: set(running(graph, kind)) - set(old), 60, f"another {kind} runs")
        until(lambda: is_answering(graph), 60, "the front answers")
        assert answered(graph, "sum") == (PLAIN, PLAIN)
        assert graph.get(CONFIG) == before


def running(graph: Graph, kind: str) -> list[int]:
    return [pid for pid in graph.workers() if PROCESSES[kind] in command_of(pid)]


def is_answering(graph: Graph) -> bool:
    try:
        return bool(graph.get(CONFIG)["tasks"])
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.fixture
def cloud_key(graph: Graph, keys_file: Path) -> Iterator[str]:
    """With the scope `cloud`; the remote, which is this system, has a key of its own tenant."""
    theirs = keys.add(keys_file, "remote", "remote", frozenset({Scope.INFER}))
    file = graph.folder / "remote.key"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
        stream.write(theirs)
    yield keys.add(keys_file, "ann", "ann", frozenset({Scope.INFER, Scope.CLOUD}))
    file.unlink()


@pytest.mark.spec("J5")
def test_ladder_asks_the_remote_where_the_model_here_exceeds_the_budget(
    graph: Graph, cloud_key: str, keys_file: Path
) -> None:
    local_key = keys.add(keys_file, "bob", "bob", frozenset({Scope.INFER}))
    # Which is told to be swift; once it is seen to take longer than the model here it goes behind.
    hasty = {"ladder": [TINY, UNSEEN], "budget_s": 0.001}
    stays = hasty | {"allow_cloud_fallback": False}
    explicit = {"ladder": [FAR, TINY], "allow_cloud_fallback": False}
    with tasks(graph, hasty=hasty, stays=stays, explicit=explicit):
        assert answered(graph, "hasty", key=local_key) == (TINY, TINY), "it has no scope `cloud`"
        until(
            lambda: answered(graph, "hasty", key=cloud_key)[1] == THERE,
            60,
            "a heartbeat has told its run, which takes longer than a millisecond",
        )
        assert answered(graph, "hasty", key=cloud_key, x_local_only=True) == (TINY, TINY)
        assert answered(graph, "hasty", key=cloud_key, x_budget_s=600)[1] == TINY
        assert answered(graph, "stays", key=cloud_key) == (TINY, TINY)
        assert answered(graph, "explicit", key=cloud_key)[1] == THERE


@pytest.mark.spec("J5")
def test_check_tells_a_budget_that_a_cold_request_exceeded_here(graph: Graph) -> None:
    """By the state file of the running system, whose loads were real."""
    assert (
        graph.post("/v1/chat/completions", {"model": PLAIN, "messages": HELLO, "max_tokens": 2})[0]
        == 200
    )
    config = copy.deepcopy(graph.config)
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["tasks"] = {
        "hasty": {"ladder": [PLAIN], "budget_s": 0.001},
        "patient": {"ladder": [PLAIN], "budget_s": 600},
    }
    file = graph.folder / "with_tasks.yaml"
    file.write_text(yaml.safe_dump(config))

    def warned() -> list[str]:
        said = json.loads(run_command(graph, "check", str(file), "--json"))
        warnings: list[str] = said["warnings"]
        return [text for text in warnings if text.startswith("tasks.") and "is less than" in text]

    warnings = until(warned, 60, "what was learned is in the state file")
    assert len(warnings) == 1
    assert warnings[0].startswith(f"tasks.hasty: {PLAIN}: the budget of 0.0 s is less than a cold")
