"""Files and batches of the official client on the running graph, while its processes die."""

import json
import os
import signal
import urllib.request
from typing import Any

import pytest
from openai import OpenAI

from tests.graph.conftest import Graph, until
from tests.support.graph_batches import CHAT, begin, ended, results
from tests.support.graph_processes import replicas, victims
from tests.support.graph_tasks import HELLO, tasks

MODELS = ["tiny-chat", "plain-chat"]
LINES, TOKENS = 40, 32


def kill(graph: Graph, process: str) -> None:
    if process == "engine":
        pids = victims(graph, "engine")
    else:
        pids = replicas(graph, process)
    assert pids, f"no {process} runs"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.spec("J4", "C13")
def test_each_line_has_one_result_whatever_is_killed_meanwhile(
    graph: Graph, client: OpenAI
) -> None:
    bodies = [
        {
            "model": MODELS[n % 2],
            "messages": [{"role": "user", "content": f"Line {n}"}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
        for n in range(LINES)
    ]
    batch = begin(client, CHAT, bodies)
    for process, at_least in (("jobs", 5), ("engine", 15)):

        def far_enough(least: int = at_least) -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed >= least

        until(far_enough, 90, f"{at_least} lines are done")
        kill(graph, process)
    done = ended(client, batch)
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (LINES, 0)
    rows = results(client, done.output_file_id)
    assert sorted(row["custom_id"] for row in rows) == sorted(f"r{n}" for n in range(LINES))
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in rows} == {TOKENS}
    assert done.usage is not None and done.usage.output_tokens == TOKENS * LINES


@pytest.mark.spec("J4", "K1", "K2")
def test_batch_is_seen_in_events_metrics_and_state(graph: Graph, client: OpenAI) -> None:
    body = {"model": "all-minilm-l6-v2", "input": "a secret word"}
    batch = ended(client, begin(client, "/v1/embeddings", [body] * 3))

    def told() -> list[dict[str, Any]]:
        own = [event for event in graph.events() if event.get("job") == batch.id]
        return own if own and own[-1]["kind"] == "job_ended" else []

    events = until(told, 60, "the end of the batch is an event")
    assert [event["kind"] for event in events] == ["job_accepted", "job_begun", "job_ended"]
    assert (events[-1]["state"], events[-1]["done"], events[-1]["total"]) == ("completed", 3, 3)
    assert "secret" not in json.dumps(events)
    [row] = [row for row in graph.state()["jobs"] if row["id"] == batch.id]
    assert row["state"] == "completed"
    with urllib.request.urlopen(f"{graph.url}/metrics", timeout=60) as answer:
        samples = answer.read().decode().splitlines()
    name = 'arbiter_jobs_ended_total{kind="batch",state="completed"}'
    [ends] = [line.split()[-1] for line in samples if line.startswith(name)]
    assert float(ends) >= 1
    assert batch.id not in "".join(samples)


@pytest.mark.spec("J4")
def test_every_endpoint_runs_as_a_batch(client: OpenAI) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"model": "all-minilm-l6-v2", "input": "x"},
        "/v1/responses": {"model": "tiny-chat", "input": "Who?", "max_output_tokens": 4},
        "/v1/completions": {"model": "tiny-chat", "prompt": "Who", "max_tokens": 4},
        "/v1/images/generations": {"model": "tiny-draw", "prompt": "a red circle on blue"},
    }
    begun = [begin(client, url, [body] * 2) for url, body in bodies.items()]
    for batch in begun:
        done = ended(client, batch)
        rows = results(client, done.output_file_id)
        assert [row["response"]["status_code"] for row in rows] == [200] * 2
        assert batch.endpoint != "/v1/images/generations" or all(
            row["response"]["body"]["data"][0]["b64_json"] for row in rows
        )


@pytest.mark.spec("J4", "J5")
def test_line_and_job_of_a_task_are_answered_by_a_rung_of_this_machine(
    graph: Graph, client: OpenAI
) -> None:
    body = {"model": "task:later", "messages": HELLO, "max_tokens": 4}
    with tasks(graph, later={"ladder": ["far-chat", *MODELS]}):
        batch = begin(client, CHAT, [body] * 4)
        headers = {"prefer": "respond-async"}
        status, job = graph.post(CHAT, body, headers=headers)
        assert (status, job["model"]) == (202, "task:later")
        done = ended(client, batch)
        assert done.status == "completed"
        rows = results(client, done.output_file_id)
        models = {row["response"]["body"]["model"] for row in rows}
        path = f"/v1/jobs/{job['id']}"
        until(lambda: graph.get(path)["status"] == "completed", 60, "the job is done")
        assert models | {graph.get(f"{path}/result")["model"]} <= set(MODELS)


@pytest.mark.spec("J4", "L3")
def test_wrong_line_fails_its_batch_alone_and_is_named(client: OpenAI) -> None:
    good = begin(client, "/v1/embeddings", [{"model": "all-minilm-l6-v2", "input": "x"}])
    wrong = begin(
        client,
        "/v1/embeddings",
        [{"model": "all-minilm-l6-v2", "input": "x"}, {"model": "no-such", "input": "x"}],
    )
    failed = ended(client, wrong)
    assert failed.status == "failed" and failed.errors is not None and failed.errors.data
    [error] = failed.errors.data
    assert (error.line, error.code, error.param) == (2, "model_not_found", "body.model")
    assert ended(client, good).status == "completed"


@pytest.mark.spec("J4", "J8")
def test_batch_is_cancelled_with_its_results_and_its_engine_goes_on(client: OpenAI) -> None:
    body = {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": "Go on"}],
        "max_tokens": 400,
        "ignore_eos": True,
    }
    batch = begin(client, CHAT, [body] * 200)
    until(lambda: client.batches.retrieve(batch.id).status == "in_progress", 60, "it runs")
    client.batches.cancel(batch.id)
    done = ended(client, batch)
    assert done.status == "cancelled"
    counts = done.request_counts
    assert counts is not None and counts.completed < 200 and counts.failed == 0
    if counts.completed:
        assert len(results(client, done.output_file_id)) == counts.completed
