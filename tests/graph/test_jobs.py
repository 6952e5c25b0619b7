"""Work that waits, on the running graph: its place behind other requests, the order of its lines,
its expiry, and its end down to the engine."""

import os
import signal
import sqlite3
import stat
import time
import urllib.error
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.graph.conftest import Graph, until
from tests.support.archives import growth
from tests.support.graph_batches import CHAT, begin, ended, results
from tests.support.graph_commands import queue
from tests.support.graph_processes import replicas
from tests.support.graph_processor import Processor, serves
from tests.support.graph_tasks import HELLO, PLAIN, TINY, WIDE, in_use

pytestmark = pytest.mark.spec("J4")
SMALL, LEFT = "small-chat", "left-chat"  # neither fits beside WIDE
DRAW = "tiny-draw"
FILE_BYTES = 64 << 20
IN_FLIGHT = 8  # `jobs.in_flight`, as shipped
LATER = {"prefer": "respond-async"}
BODY: dict[str, Any] = {"model": SMALL, "messages": HELLO, "max_tokens": 2}
LONG: dict[str, Any] = {"model": LEFT, "max_tokens": 1_900, "ignore_eos": True}
STOPS_WITHIN_S = 15.0  # of what goes on for several times as long when it is not stopped


def submitted(graph: Graph, body: dict[str, Any]) -> str:
    """The job's id."""
    status, job = graph.post(CHAT, body, headers=LATER)
    assert status == 202
    return str(job["id"])


def job(graph: Graph, job_id: str) -> dict[str, Any]:
    job: dict[str, Any] = graph.get(f"/v1/jobs/{job_id}")
    return job


def cancel(graph: Graph, job_id: str) -> str:
    status, job = graph.post(f"/v1/jobs/{job_id}/cancel", {})
    assert status == 200
    return str(job["status"])


def state_file(graph: Graph) -> Path:
    return Path(graph.table["arbiter"]["state_file"])


def put(graph: Graph, job_id: str, column: str, instant_s: float) -> None:
    """Puts an instant of a job elsewhere, because its window is a day."""
    with closing(sqlite3.connect(state_file(graph), timeout=60)) as db, db:
        changed = db.execute(f"UPDATE jobs SET {column} = ? WHERE id = ?", (instant_s, job_id))
        assert changed.rowcount == 1


def is_forgotten(graph: Graph, job_id: str) -> bool:
    try:
        job(graph, job_id)
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 404
    return False


def begin_job(graph: Graph, client: OpenAI) -> Callable[[], str]:
    made = submitted(graph, LONG | {"messages": HELLO, "n": 16})
    return lambda: cancel(graph, made)


def begin_response(graph: Graph, client: OpenAI) -> Callable[[], str]:
    body: dict[str, Any] = {"model": LEFT, "max_output_tokens": 1_900, "background": True}
    forever: Any = {"ignore_eos": True}
    many = [client.responses.create(input="Who?", extra_body=forever, **body) for _ in range(8)]

    def end() -> str:
        for one in many:
            client.responses.cancel(one.id)
        [state] = {str(client.responses.retrieve(one.id).status) for one in many}
        return state

    return end


def begin_pictures(graph: Graph, client: OpenAI) -> Callable[[], str]:
    body = {"model": DRAW, "prompt": "a port", "n": 10, "x_steps": 100}
    many = [
        graph.post("/v1/images/generations", body, headers=LATER)[1]["id"] for _ in range(IN_FLIGHT)
    ]

    def end() -> str:
        [state] = {cancel(graph, one) for one in many}
        return state

    return end


def begin_batch(graph: Graph, client: OpenAI) -> Callable[[], str]:
    made = begin(client, CHAT, [LONG | {"messages": HELLO, "n": 2}] * IN_FLIGHT)

    def end() -> str:
        client.batches.cancel(made.id)
        return str(ended(client, made, STOPS_WITHIN_S).status)

    return end


@pytest.mark.spec("J8")
@pytest.mark.parametrize(
    ("kind", "model"),
    [(begin_job, LEFT), (begin_response, LEFT), (begin_batch, LEFT), (begin_pictures, DRAW)],
)
def test_cancelled_work_stops_its_engine(
    graph: Graph,
    client: OpenAI,
    kind: Callable[[Graph, OpenAI], Callable[[], str]],
    model: str,
) -> None:
    until(lambda: not serves(graph, model), 60, "no request is in its engine")
    end = kind(graph, client)
    until(lambda: serves(graph, model), 60, "its engine serves")
    processor = Processor(graph, model)
    until(processor.has_computed, 60, "the engine computes")
    assert end() == "cancelled"
    until(processor.rests, STOPS_WITHIN_S, "the engine has stopped")


def test_job_waits_with_priority_batch_behind_a_later_request_and_tells_its_place(
    graph: Graph, client: OpenAI
) -> None:
    with in_use(graph, WIDE):
        waiting = [submitted(graph, BODY) for _ in range(IN_FLIGHT + 2)]
        until(lambda: queue(graph) == [(SMALL, "batch")], 60, "its model is queued")
        with client.chat.completions.with_streaming_response.create(
            model=LEFT, messages=HELLO, max_tokens=2, stream=True
        ):
            until(
                lambda: queue(graph) == [(LEFT, "normal"), (SMALL, "batch")],
                60,
                "the later request is before it",
            )
        shown = until(lambda: shown_waiting(graph, waiting[0]), 60, "it tells how far its model is")
        assert (shown["status"], shown["progress"]["waiting"]["phase"]) == ("in_progress", "queued")
        places = [job(graph, one)["queue_position"] for one in waiting]
        assert places == [None] * IN_FLIGHT + [0, 1]
        assert [cancel(graph, one) for one in waiting[:-1]] == ["cancelled"] * (len(waiting) - 1)
        until(lambda: job(graph, waiting[-1])["queue_position"] is None, 60, "it has its turn")
        assert cancel(graph, waiting[-1]) == "cancelled"
        until(lambda: not queue(graph), 60, "nothing waits for the model")


def shown_waiting(graph: Graph, job_id: str) -> dict[str, Any] | None:
    shown = job(graph, job_id)
    return shown if shown["progress"]["waiting"] else None


def test_batch_and_job_that_wait_past_their_window_are_expired_and_wait_no_more(
    graph: Graph, client: OpenAI
) -> None:
    with in_use(graph, WIDE):
        late = submitted(graph, BODY)
        batch = begin(client, CHAT, [BODY] * 3, window="2s")
        until(lambda: queue(graph) == [(SMALL, "batch")], 60, "its model is queued")
        for _ in range(3):
            assert job(graph, late)["status"] != "completed"
            assert client.batches.retrieve(batch.id).id == batch.id
        assert queue(graph) == [(SMALL, "batch")], "a poll queues nothing"
        assert [t["state"] for t in graph.state()["tickets"] if t["model"] == SMALL] == ["queued"]
        put(graph, late, "deadline_s", time.time())
        done = ended(client, batch, 30)
        assert done.status == "expired" and done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.total) == (0, 3)
        rows = results(client, done.error_file_id)
        assert [row["error"]["code"] for row in rows] == ["batch_expired"] * 3
        until(lambda: job(graph, late)["status"] == "expired", 60, "the job is expired")
        until(lambda: not queue(graph), 60, "nothing waits for the model")


def test_result_is_forgotten_after_its_day(graph: Graph) -> None:
    made = submitted(graph, BODY | {"model": TINY})
    done = until(lambda: job(graph, made)["ended_at"] and job(graph, made), 60, "it is done")
    assert done["expires_at"] - done["ended_at"] == 86_400
    assert graph.get(f"/v1/jobs/{made}/result")["usage"]["completion_tokens"] == 2
    put(graph, made, "ended_s", time.time() - 86_400)
    for pid in replicas(graph, "jobs"):  # the next one looks at once, and else once an hour
        os.kill(pid, signal.SIGKILL)
    until(lambda: is_forgotten(graph, made), 60, "it is forgotten")
    bodies = state_file(graph).parent / "jobs"
    until(lambda: not list(bodies.glob(f"{made}*")), 60, "so is what it said")


def test_lines_of_one_file_are_collated_by_model_and_kept_for_their_owner_alone(
    graph: Graph, client: OpenAI
) -> None:
    bodies = [BODY | {"model": (PLAIN, TINY)[n % 2], "max_tokens": 1} for n in range(32)]
    done = ended(client, begin(client, CHAT, bodies))
    assert done.status == "completed"
    models = [row["response"]["body"]["model"] for row in results(client, done.output_file_id)]
    # The last lines of the first model run beside the first of the second, IN_FLIGHT in all.
    assert models[:8] + models[-8:] == [PLAIN] * 8 + [TINY] * 8
    kept = [state_file(graph), *(state_file(graph).parent / "jobs").iterdir()]
    assert len(kept) > 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_file_is_taken_in_and_given_back_in_bounded_pieces(graph: Graph, client: OpenAI) -> None:
    text = os.urandom(FILE_BYTES // 2).hex().encode()
    begin(client, CHAT, [BODY])  # the process of the jobs runs
    [front], [jobs] = replicas(graph, "front"), replicas(graph, "jobs")
    with growth(front) as front_bytes, growth(jobs) as jobs_bytes:
        file = client.files.create(file=("big.txt", text), purpose="user_data")
        assert client.files.content(file.id).read() == text
        assert max(front_bytes(), jobs_bytes()) < FILE_BYTES // 2
    client.files.delete(file.id)
