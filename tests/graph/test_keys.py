"""API keys on the running system, with the official client."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI, PermissionDeniedError

from deployments.front import keys
from deployments.front.keys import Scope
from tests.graph.conftest import Graph

CHAT = "tiny-chat"


@pytest.fixture
def keys_file(graph: Graph) -> Iterator[Path]:
    """The running front's; as it was before when the test is over."""
    path = keys.keys_path(None, graph.table["arbiter"]["state_file"])
    before = path.read_bytes()
    yield path
    restored = path.with_suffix(".restored")
    with os.fdopen(os.open(restored, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stream:
        stream.write(before)
    restored.rename(path)


def status_of(graph: Graph, path: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(graph.url + path, headers=headers), timeout=30
        ) as answer:
            json.load(answer)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.spec("L1")
def test_a_key_counts_from_the_next_request_on_until_it_is_removed(
    graph: Graph, keys_file: Path
) -> None:
    anybody = OpenAI(base_url=f"{graph.url}/v1", api_key="none", max_retries=0)
    assert anybody.models.list().data
    token = keys.add(keys_file, "ann", "acme", frozenset({Scope.INFER}))
    ann = anybody.with_options(api_key=token)
    with pytest.raises(AuthenticationError) as caught:
        anybody.chat.completions.create(model=CHAT, messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "invalid_api_key"
    answer = ann.chat.completions.create(
        model=CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=2
    )
    assert answer.choices
    assert status_of(graph, "/arbiter/state") == 401
    assert status_of(graph, "/arbiter/state", authorization=f"Bearer {token}") == 403
    assert status_of(graph, "/health") == 200
    owner = keys.first_key_path(keys_file).read_text().strip()
    assert status_of(graph, "/arbiter/state", authorization=f"Bearer {owner}") == 200
    keys.remove(keys_file, token.split("-")[1])
    with pytest.raises(AuthenticationError):
        ann.models.list()


@pytest.mark.spec("L1")
def test_requests_from_other_origins_are_refused(graph: Graph) -> None:
    for path in ("/v1/models", "/health", "/ready", "/arbiter/state"):
        assert status_of(graph, path, host="evil.example") == 403
        assert status_of(graph, path, origin="https://evil.example") == 403
        assert status_of(graph, path, origin=graph.url) == 200
    evil = OpenAI(
        base_url=f"{graph.url}/v1",
        api_key="none",
        default_headers={"origin": "https://evil.example"},
        max_retries=0,
    )
    with pytest.raises(PermissionDeniedError):
        evil.models.list()
