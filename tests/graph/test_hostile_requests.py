"""The running system as a stranger sees it: its own description, odd names, odd headers.

Nothing a client can send makes a server error, a silence, or another client's harm.
"""

import base64
import gzip
import http.client
import json
import urllib.parse
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from openai import OpenAI

from tests.graph.conftest import Graph, command_of
from tests.support import archives
from tests.support.examples import examples

CHAT, EMBED, RERANK, DRAW, ASR = (
    "tiny-chat",
    "all-minilm-l6-v2",
    "minilm-reranker",
    "tiny-draw",
    "tiny.en",
)
OTHERS = {
    "embeddings": EMBED,
    "embed": EMBED,
    "rerank": RERANK,
    "score": RERANK,
    "generations": DRAW,
    "edits": DRAW,
    "transcriptions": ASR,
    "translations": ASR,
    "speech": "joe",
    "vad": "silero-vad",
}  # by the last part of the path; all others: CHAT
# Whose answers do not end, or are not ours: the streams of events and views, and FastAPI's pages.
ENDLESS = {"/arbiter/events", "/arbiter/view/stream"}
ANSWERED_S = 60.0
NOT_SERVED = 501  # what Ollama's users do to its models
BOUNDED = settings(
    max_examples=examples(16), deadline=None, database=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.spec("L3")
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_bodies_made_from_the_openapi_description_cause_no_server_error(
    graph: Graph, client: OpenAI, mode: str
) -> None:
    """Bodies made from /openapi.json, lawful and unlawful ones, on every route it names."""
    import schemathesis
    from schemathesis import GenerationMode

    client.chat.completions.create(
        model=CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=1
    )
    schema = schemathesis.openapi.from_url(f"{graph.url}/openapi.json")
    seen: set[str] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in ENDLESS:
            continue
        strategy = operation.as_strategy(generation_mode=GenerationMode[mode])

        @BOUNDED
        @given(strategy)
        def ask(case: Any) -> None:
            affordable(case)
            answer = case.call(timeout=ANSWERED_S)
            is_server_error = answer.status_code >= 500 and answer.status_code != NOT_SERVED
            assert not is_server_error, (case.as_curl_command(), answer.text)

        with suppress(Unsatisfiable):  # nothing can be wrong with what takes nothing
            ask()
        seen.add(operation.path)
    assert "/v1/chat/completions" in seen and "/v1/responses" in seen
    answer = client.completions.create(model=CHAT, prompt="still there?", max_tokens=2)
    assert answer.choices


def affordable(case: Any) -> None:
    """A model that is there, few tokens, and no deadline that cannot be met: 503 is right then."""
    if not isinstance(case.body, dict):
        return
    wants = OTHERS.get(case.path.rpartition("/")[2], CHAT)
    if isinstance(case.body.get("model"), str):
        case.body["model"] = wants
    case.body.pop("x_deadline_s", None)
    if case.path.startswith("/api/") and isinstance(case.body.get("options", {}), dict | None):
        case.body["options"] = (case.body.get("options") or {}) | {"num_predict": 2}
    if isinstance(case.body.get("term_s", 1), int | float):
        case.body["term_s"] = min(case.body.get("term_s", 1), 0.05)  # of /v1/acquire
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "x_steps"):
        if isinstance(case.body.get(name, 1), int):
            case.body[name] = min(case.body.get(name, 1), 2)


def raw(graph: Graph, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> int:
    """Status of a request whose headers no HTTP library has put right."""
    host = urllib.parse.urlsplit(graph.url).netloc
    connection = http.client.HTTPConnection(host, timeout=ANSWERED_S)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"host": host, "content-length": str(len(body))} | headers).items():
            connection.putheader(name, value.encode("latin-1"))
        connection.endheaders(body)
        return connection.getresponse().status
    finally:
        connection.close()


HEADER = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=60
)
NAMES = st.sampled_from(
    ["authorization", "host", "origin", "x-priority", "x-deadline-s", "x-request-id", "accept",
     "content-type", "x-forwarded-for", "x-conversation-id", "last-event-id", "traceparent",
     "serve_multiplexed_model_id", "x-session-id", "x-request-timeout-seconds",
     "x-request-disconnect-disabled"]
)  # fmt: skip


@pytest.mark.spec("L3")
def test_odd_names_and_headers_are_answered_and_never_with_a_server_error(graph: Graph) -> None:
    @settings(BOUNDED, max_examples=examples(200))
    @given(st.text(max_size=80), st.dictionaries(NAMES, HEADER, max_size=3))
    def ask(name: str, headers: dict[str, str]) -> None:
        path = "/v1/models/" + urllib.parse.quote(name, safe="/.:@")
        assert raw(graph, "GET", path, headers) < 500
        assert raw(graph, "POST", "/v1/embeddings", headers, b'{"model": "x", "input": ""}') < 500

    ask()
    assert raw(graph, "GET", "/health", {}) == 200


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize(
    "name",
    ["../tiny-chat", "tiny-chat:../../etc", "/etc/passwd", "tiny-chat/", "%2e%2e", "@acme/x"],
)
def test_model_names_that_contain_paths_are_404(graph: Graph, name: str) -> None:
    status, body = graph.post("/v1/completions", {"model": name, "prompt": "x"})
    assert status == 404
    assert body["error"]["code"] == "model_not_found"


@pytest.mark.spec("L3")
def test_a_body_beyond_the_bound_is_413_before_it_is_read(graph: Graph) -> None:
    headers = {"content-length": str(64 << 20), "content-type": "application/json"}
    assert raw(graph, "POST", "/v1/embeddings", headers, b"{") == 413


@pytest.mark.spec("J8", "L3")
def test_prompts_times_choices_beyond_the_bound_are_400_and_name_the_field(graph: Graph) -> None:
    body = {"model": CHAT, "prompt": ["x"] * 64, "n": 3, "max_tokens": 1}
    status, said = graph.post("/v1/completions", body)
    assert (status, said["error"]["param"]) == (400, "prompt")
    assert "`n` 3 are 192 sequences; at most 128" in said["error"]["message"]


UPLOADS = {
    "/v1/audio/transcriptions": ("file", ASR),
    "/v1/audio/translations": ("file", ASR),
    "/v1/vad": ("file", "silero-vad"),
    "/v1/audio/vad": ("file", "silero-vad"),
    "/v1/images/edits": ("image", DRAW),
    "/v1/images/variations": ("image", DRAW),
}


def readers(graph: Graph) -> list[int]:
    """Pids of all that may read a body: the front, the replicas, the engines."""
    replicas = [p for p in graph.workers() if command_of(p).startswith("ray::ServeReplica")]
    return [*graph.engines(), *replicas]


@pytest.mark.spec("L2", "L3")
@pytest.mark.parametrize("path", UPLOADS)
def test_archive_that_is_uploaded_is_refused_by_field_and_unpacked_nowhere(
    graph: Graph, client: OpenAI, path: str
) -> None:
    field, model = UPLOADS[path]
    # A model of English only translates nothing, which it says before it looks at the file.
    wanted = 400, "model" if path.endswith("translations") else field

    def sent(raw: bytes) -> tuple[int, str]:
        form = {"model": model} | ({"prompt": "red"} if path.endswith("edits") else {})
        url = graph.url + path
        answer = httpx.post(url, data=form, files={field: ("a.bin", raw)}, timeout=ANSWERED_S)
        return answer.status_code, answer.json()["error"]["param"]

    assert sent(b"no archive") == wanted  # and its model is loaded
    answers: dict[str, tuple[int, str]] = {}

    def send_all() -> None:
        answers.update((kind, sent(archives.archive(kind))) for kind in archives.KINDS)

    peaks = archives.grown_of(lambda: readers(graph), send_all)
    assert answers == dict.fromkeys(archives.KINDS, wanted)
    assert any(pid in peaks for pid in graph.engines())
    assert max(peaks.values()) < archives.MOST_GROWN_BYTES
    assert client.completions.create(model=CHAT, prompt="still there?", max_tokens=2).choices


@pytest.mark.spec("L2", "L3")
def test_archive_in_place_of_a_picture_or_a_body_is_refused_and_unpacked_nowhere(
    graph: Graph, client: OpenAI
) -> None:
    def picture(kind: str) -> dict[str, Any]:
        data = base64.b64encode(archives.archive(kind)).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return {"model": "tiny-describe", "messages": [{"role": "user", "content": [part]}]}

    packed = gzip.compress(json.dumps({"model": EMBED, "input": "x" * (8 << 20)}).encode())
    as_gzip = {"content-encoding": "gzip"}

    def send_all() -> None:
        for kind in archives.KINDS:
            status, said = graph.post("/v1/chat/completions", picture(kind))
            place = "messages[0].content[0].image_url"
            assert (status, said["error"]["param"]) == (400, place), kind
            status, said = graph.post("/v1/embeddings", None, raw=archives.archive(kind))
            assert status == 400 and "the body is not JSON" in said["error"]["message"], kind
        status, said = graph.post("/v1/embeddings", None, raw=packed, headers=as_gzip)
        assert (status, said["error"]["param"]) == (415, "content-encoding")

    peaks = archives.grown_of(lambda: readers(graph), send_all)
    assert max(peaks.values()) < archives.MOST_GROWN_BYTES
    assert client.completions.create(model=CHAT, prompt="still there?", max_tokens=2).choices
