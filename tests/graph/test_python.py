"""The Python client against the running system: over HTTP and by handle, from a driver and from a
deployment."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.graph.conftest import ROOT, Graph
from tests.support import both_ways, python_page
from tests.support.graph_commands import environment

RUN_S = 400  # all models, one after the other: each loads in a second or two


def run(graph: Graph, *words: str, folder: Path = ROOT) -> str:
    """What a driver of the graph's cluster prints."""
    env = environment(graph) | {"RAY_ADDRESS": graph.address, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words],
        env=env | {"RAY_AUTH_MODE": "token"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4_000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def said(graph: Graph) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(graph, "-m", "tests.support.both_ways").splitlines()[-1])
    return found


def text_of(answer: Any) -> str:
    """Of the answer of a chat or a completion."""
    return str(answer["choices"][0]["text"])


CONTENTS: dict[str, Callable[[Any], bool]] = {
    "chat": lambda a: bool(text_of(a)) and a["usage"]["completion_count"] > 1,
    "complete": lambda a: bool(text_of(a)) and a["usage"]["completion_count"] > 1,
    "embed": lambda a: [len(vector) for vector in a["vectors"]] == [384, 384],
    "rerank": lambda a: a["results"][0]["text"] == both_ways.DOCUMENTS[1],
    "request": lambda a: isinstance(a["data"][0]["score"], float),
    "describe": lambda a: len(text_of(a).split()) >= 4,
    "images": lambda a: len(a) == 1 and a[0]["data"][0] > 100,
    "stream_images": lambda a: [picture["is_final"] for picture in a] == [False, True],
    "speak": lambda a: a["content_type"] == "audio/wav" and a["data"][0] > 50_000,
    "vad": lambda a: len(a["segments"]) >= 1,
    "transcribe": lambda a: "fox" in a["text"] and len(a["words"]) == 9,
    "stream_transcribe": lambda a: "fox" in "".join(delta["text"] for delta in a),
    "models": lambda a: both_ways.CHAT in a,
}


@pytest.mark.spec("J7")
@pytest.mark.parametrize("name", both_ways.ANSWERED)
def test_call_is_answered_alike_over_http_and_by_handle(said: dict[str, Any], name: str) -> None:
    over_http, by_handle = said[name]
    assert over_http == by_handle
    if name in CONTENTS:
        assert CONTENTS[name](over_http), over_http
    else:  # a stream of text: its pieces are the whole
        whole = said[name.removeprefix("stream_")][0]
        assert over_http == [text_of(whole), True]


@pytest.mark.spec("J7")
@pytest.mark.parametrize("name", both_ways.REFUSED)
def test_refusal_is_the_same_typed_error_over_http_and_by_handle(
    said: dict[str, Any], name: str
) -> None:
    over_http, by_handle = said[name]
    kinds, status, code, param, *_ = over_http
    wanted = {
        "no such model": ("UnknownModel", 404, "model_not_found", "model"),
        "another capability's model": ("NotServedHere", 404, "model_not_supported", "model"),
        "a wrong field": ("BadRequest", 400, None, "temperature"),
        "no sound": ("BadRequest", 400, None, "file"),
        "too late": ("DeadlineUnmet", 503, "deadline_unmet", None),
        "more than there is": ("UnknownModel", 404, "model_not_found", "model"),
    }[name]
    assert (kinds[0], status, code if wanted[2] else None, param) == wanted
    if name == "too late":  # its ticket and its seconds are its own
        assert over_http[:4] == by_handle[:4]
    else:
        assert over_http == by_handle


@pytest.mark.spec("J7", "L1")
def test_key_counts_by_handle(said: dict[str, Any]) -> None:
    kinds, status, code, *_ = said["a wrong key"]
    assert (kinds[0], status, code) == ("Denied", 401, "invalid_api_key")


@pytest.mark.spec("J7", "J8")
@pytest.mark.parametrize("way", ["http", "handle"])
def test_stream_that_its_reader_leaves_ends_the_work(said: dict[str, Any], way: str) -> None:
    assert said[f"left by {way}"] == [1, 0]


@pytest.mark.spec("J7", "A7")
@pytest.mark.parametrize("way", ["http", "handle"])
def test_acquired_model_is_in_use_until_release(said: dict[str, Any], way: str) -> None:
    assert said[f"acquired by {way}"] == [True, True, "TicketClosed"]


@pytest.mark.spec("J7", "J4")
@pytest.mark.parametrize("way", ["http", "handle"])
def test_submitted_call_is_kept_and_its_answer_is_that_of_the_call(
    said: dict[str, Any], way: str
) -> None:
    answers, state, refused, left = said[f"submitted by {way}"]
    assert answers == [True, True, [64, 64]] and state == "completed"
    assert refused == "UnknownModel"
    assert left == ["cancelled", "conflict"]


@pytest.mark.spec("J7", "J4")
@pytest.mark.parametrize("way", ["http", "handle"])
def test_lines_of_a_batch_have_the_answers_of_their_calls(said: dict[str, Any], way: str) -> None:
    assert said[f"batched by {way}"] == [True, "completed", "UnknownModel"]


@pytest.mark.spec("J7", "A15")
@pytest.mark.parametrize("way", ["http", "handle"])
def test_client_leases_and_subscribes(said: dict[str, Any], way: str) -> None:
    assert said[f"leased by {way}"] == ["held", 1]
    assert said[f"heard by {way}"][-1] == "in order"


@pytest.mark.spec("J7")
def test_every_snippet_of_the_python_page_runs(graph: Graph, tmp_path: Path) -> None:
    """The last is a deployment of three stages, called by its handle."""
    file = tmp_path / "page.py"
    file.write_text(python_page.program())
    printed = run(graph, str(file), folder=tmp_path).splitlines()
    count = len(python_page.snippets())
    assert [line for line in printed if line.startswith("snippet ")] == [
        f"snippet {number}" for number in range(count)
    ]
    assert "node agent" in printed[-1]  # the spoken answer, heard again
    assert os.path.getsize(tmp_path / "circle.png") > 100
