"""Responses and `Prefer: respond-async` on the running graph, with the official client: stored,
continued, in the background while processes die, and of two tenants."""

import contextlib
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from deployments.front.dependencies import READERS_MOST
from deployments.jobs import sse
from models.shapes import Fact
from tests.graph.conftest import Graph, until
from tests.support import pictures as pic
from tests.support import speech
from tests.support.graph_commands import unload_all
from tests.support.graph_processes import replicas, victims

pytestmark = pytest.mark.spec("J4")
MODEL, TOKENS = "tiny-chat", 600
LONG: dict[str, Any] = {
    "model": MODEL,
    "max_output_tokens": TOKENS,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
DRAWN = {"model": "tiny-draw", "prompt": "a port", "size": "64x64"}
UNFINISHED = ("queued", "in_progress")


def ended(client: OpenAI, response_id: str, within_s: float = 90) -> Response:
    def look() -> Response | None:
        response = client.responses.retrieve(response_id)
        return None if response.status in UNFINISHED else response

    return until(look, within_s, f"{response_id} has ended")


def kill_replica(graph: Graph, name: str) -> None:
    pids = replicas(graph, name)
    assert pids, f"no replica of {name} runs"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.spec("J1")
def test_stored_response_is_continued_with_its_whole_conversation(client: OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input="Name a port.", max_output_tokens=4, temperature=0
    )
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=MODEL, input="Another.", previous_response_id=first.id, max_output_tokens=4
    )
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    items = client.responses.input_items.list(second.id, order="asc").data
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == ["Name a port.", first.output_text, "Another."]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).previous_response_id == first.id


def test_background_stream_goes_on_whatever_is_killed_and_is_resumed(
    graph: Graph, client: OpenAI
) -> None:
    patient = client.with_options(max_retries=8)  # the front is among the killed
    whole = client.responses.create(input="Who?", store=False, **LONG)
    stream = client.responses.create(input="Who?", background=True, stream=True, **LONG)
    begun = next(iter(stream))
    assert begun.type == "response.created"
    stream.response.close()  # its reader leaves
    for kill in (
        lambda: kill_replica(graph, "jobs"),
        lambda: [os.kill(pid, signal.SIGKILL) for pid in victims(graph, "engine")],
        lambda: kill_replica(graph, "front"),
    ):
        kill()
        patient.responses.retrieve(begun.response.id)  # it can be asked again
    done = ended(patient, begun.response.id)
    assert done.output_text == whole.output_text
    rest = patient.responses.retrieve(begun.response.id, stream=True, starting_after=10)
    events = list(rest)
    assert [event.sequence_number for event in events] == list(range(11, 11 + len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == whole.output_text


def test_polls_load_nothing_and_wake_nothing(graph: Graph, client: OpenAI) -> None:
    kept = client.responses.create(model=MODEL, input="Who?", max_output_tokens=2)
    until(lambda: unload_all(graph), 60, "no model is loaded")
    before = graph.state()["tickets"]
    for _ in range(3):
        client.responses.retrieve(kept.id)
        client.responses.input_items.list(kept.id)
        graph.get(f"/v1/jobs/{kept.id}")
        graph.get("/v1/jobs")
    assert graph.state()["tickets"] == before
    assert graph.state()["queue"] == []


@pytest.mark.spec("J8")
def test_readers_of_a_response_under_way_are_bounded(graph: Graph, client: OpenAI) -> None:
    """The engines stand still, so that it is under way meanwhile."""
    client.responses.create(model=MODEL, input="Who?", max_output_tokens=1)
    engines = victims(graph, "engine")
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    try:
        begun = client.responses.create(input="Who?", background=True, stream=True, **LONG)
        response_id = next(iter(begun)).response.id  # type: ignore[union-attr]
        with contextlib.ExitStack() as readers:
            readers.callback(begun.close)
            for _ in range(READERS_MOST - 1):
                readers.enter_context(client.responses.retrieve(response_id, stream=True))
            for read in (client.responses.retrieve, client.responses.input_items.list):
                with pytest.raises(openai.RateLimitError) as refused:
                    read(response_id)
                assert int(refused.value.response.headers["retry-after"]) >= 1
    finally:
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
    patient = client.with_options(max_retries=8)  # the front has to hear that they left
    assert patient.responses.retrieve(response_id).id == response_id
    patient.responses.cancel(response_id)


@pytest.mark.spec("L1")
def test_no_tenant_reaches_the_responses_and_jobs_of_another(
    graph: Graph, client: OpenAI, keys_file: Path
) -> None:
    scopes = frozenset({Scope.INFER})
    mine, other = (
        client.with_options(api_key=keys.add(keys_file, name, name, scopes))
        for name in ("acme", "rival")
    )
    kept = mine.responses.create(model=MODEL, input="Who?", max_output_tokens=2)
    for ask in (
        other.responses.retrieve,
        other.responses.cancel,
        other.responses.delete,
        other.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            ask(kept.id)
    with pytest.raises(openai.BadRequestError) as refused:
        other.responses.create(model=MODEL, input="x", previous_response_id=kept.id)
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        other.get(f"/jobs/{kept.id}", cast_to=object)
    assert mine.responses.retrieve(kept.id).output_text == kept.output_text


SILENT = speech.wav(np.zeros(16_000, np.float32), 16_000)


WHO = [{"role": "user", "content": "Who?"}]
EDITED = pic.form(
    {"model": "tiny-draw", "prompt": "a port"}, {"image": pic.drawn(Fact("red", "circle", "blue"))}
)
RANKED = {"model": "minilm-reranker", "query": "Who?", "documents": ["a lease", "a port"]}
# By route: what is asked of it, as a body or as a form and its type, and the kind of its answer.
LATER: dict[str, tuple[dict[str, Any] | tuple[bytes, str], str]] = {
    "/v1/images/generations": ({**DRAWN, "stream": True, "partial_images": 2}, "event-stream"),
    "/v1/images/edits": ((EDITED, pic.FORM["content-type"]), "json"),
    "/v1/audio/speech": ({"model": "joe", "input": "Hello", "voice": "joe"}, "audio"),
    "/v1/audio/transcriptions": (speech.form(SILENT, model="tiny.en"), "json"),
    "/v1/vad": (speech.form(SILENT, model="silero-vad"), "json"),
    "/v1/completions": ({"model": MODEL, "prompt": "Who", "max_tokens": 2}, "json"),
    "/v1/messages": ({"model": MODEL, "messages": WHO, "max_tokens": 2}, "json"),
    "/v1/responses": ({"model": MODEL, "input": "Who?", "max_output_tokens": 2}, "json"),
    "/v1/embeddings": ({"model": "all-minilm-l6-v2", "input": "x"}, "json"),
    "/v1/rerank": (RANKED, "json"),
    "/api/chat": ({"model": MODEL, "messages": WHO, "options": {"num_predict": 2}}, "json"),
    "/api/generate": ({"model": MODEL, "prompt": "Who?", "options": {"num_predict": 2}}, "json"),
    "/api/embed": ({"model": "all-minilm-l6-v2", "input": "x"}, "json"),
}
# Of which an answer has one: text, choices, vectors or pictures, content, output, ranks, speech.
ANSWERED = {"text", "choices", "data", "content", "output", "results", "segments"}


@pytest.fixture(scope="module")
def begun(graph: Graph) -> dict[str, tuple[int, Any]]:
    """The answers to requests that ask all routes at once for an answer later."""

    def begin(body: dict[str, Any] | tuple[bytes, str], path: str) -> tuple[int, Any]:
        later = {"prefer": "respond-async"}
        if isinstance(body, dict):
            return graph.post(path, body, headers=later)
        raw, content_type = body
        return graph.post(path, None, raw, later | {"content-type": content_type})

    return {path: begin(body, path) for path, (body, _) in LATER.items()}


@pytest.mark.parametrize("path", LATER)
def test_any_generating_route_answers_later(
    graph: Graph, begun: dict[str, tuple[int, Any]], path: str
) -> None:
    (status, job), (_, kind) = begun[path], LATER[path]
    assert (status, job["object"]) == (202, "job")
    where = f"/v1/jobs/{job['id']}"
    until(lambda: graph.get(where)["ended_at"], 90, "the job has ended")
    assert graph.get(where)["status"] == "completed"
    with urllib.request.urlopen(f"{graph.url}{where}/result", timeout=60) as answer:
        assert kind in answer.headers["content-type"]
        said = answer.read()
    if kind == "audio":
        assert said.startswith(b"ID3")  # mp3, as where no format is asked for
    elif kind == "json":
        assert ANSWERED & json.loads(said).keys()
    else:
        events = [sse.data_of(event)["type"] for event in said.decode().split("\n\n")[:-1]]
        assert events == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
