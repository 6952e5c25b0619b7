"""API keys on the running system, with the official client."""

import contextlib
import json
import stat
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, OpenAI, PermissionDeniedError

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from tests.graph.conftest import Graph, until
from tests.support.graph_processes import logs_naming

CHAT = "tiny-chat"


def status_of(graph: Graph, path: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(graph.url + path, headers=headers), timeout=60
        ) as answer:
            json.load(answer)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.spec("J1", "L1")
def test_a_key_counts_from_the_next_request_on_until_it_is_removed(
    graph: Graph, keys_file: Path
) -> None:
    import anthropic  # three seconds of a core, of each process that collects tests

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
    greeted: Any = {"model": CHAT, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    claude = anthropic.Anthropic(base_url=graph.url, api_key=token, max_retries=0)  # as x-api-key
    assert claude.messages.create(**greeted).usage.output_tokens
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key=f"{token[:-4]}AAAA").messages.create(**greeted)
    assert status_of(graph, "/arbiter/state") == 401
    assert status_of(graph, "/arbiter/state", authorization=f"Bearer {token}") == 403
    assert status_of(graph, "/health") == 200
    owner = keys.first_key_path(keys_file).read_text().strip()
    assert status_of(graph, "/arbiter/state", authorization=f"Bearer {owner}") == 200
    keys.remove(keys_file, token.split("-")[1])
    with pytest.raises(AuthenticationError):
        ann.models.list()
    with pytest.raises(anthropic.AuthenticationError):
        claude.messages.create(**greeted)


@pytest.mark.spec("J2", "L1", "C10")
def test_priority_above_normal_needs_its_scope_and_requests_count_for_the_keys_tenant(
    graph: Graph, keys_file: Path
) -> None:
    hello = [{"role": "user", "content": "x"}]
    high = {"extra_body": {"x_priority": "high"}, "max_tokens": 1}
    scopes = frozenset({Scope.INFER})
    with_scope, without = (
        OpenAI(
            base_url=f"{graph.url}/v1",
            api_key=keys.add(keys_file, "ann", "acme", given),
            max_retries=0,
        )
        for given in (scopes | {Scope.PRIORITY}, scopes)
    )
    with pytest.raises(PermissionDeniedError) as caught:
        without.chat.completions.create(model=CHAT, messages=hello, **high)  # type: ignore[call-overload]
    assert caught.value.code == "scope_missing"
    assert with_scope.chat.completions.create(model=CHAT, messages=hello, **high).choices  # type: ignore[call-overload]
    owner = keys.first_key_path(keys_file).read_text().strip()
    until(lambda: requests_of(graph, owner, "acme"), 60, "the tenant's account has the request")


def requests_of(graph: Graph, key: str, tenant: str) -> int:
    """How many requests the arbiter has counted for a tenant."""
    request = urllib.request.Request(
        f"{graph.url}/arbiter/state", headers={"authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        clients = json.load(answer)["clients"]
    return sum(row["requests_count"] for row in clients if row["tenant"] == tenant)


@pytest.mark.spec("A15", "L1")
def test_lease_needs_the_scope_of_its_own(graph: Graph, keys_file: Path) -> None:
    url = f"{graph.url}/arbiter/leases/mine"
    for scope, status in ((Scope.INFER, 403), (Scope.LEASE, 400)):  # the body says too little
        token = keys.add(keys_file, "ann", "acme", frozenset({scope}))
        headers = {"authorization": f"Bearer {token}"}
        request = urllib.request.Request(url, b"{}", headers, method="PUT")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        with caught.value as refusal:
            assert refusal.code == status


@pytest.mark.spec("L1")
def test_address_of_a_client_neither_opens_nor_closes_a_route(
    graph: Graph, keys_file: Path
) -> None:
    owner = keys.first_key_path(keys_file).read_text().strip()
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.first_key_path(keys_file).stat().st_mode) == 0o600
    assert owner not in keys_file.read_text()
    for address in ("127.0.0.1", "10.1.2.3", "evil.example"):
        said = {"x-forwarded-for": address, "x-real-ip": address, "forwarded": f"for={address}"}
        assert status_of(graph, "/arbiter/leases", **said) == 401
        said["authorization"] = f"Bearer {owner}"
        assert status_of(graph, "/arbiter/leases", **said) == 200


@pytest.mark.spec("L2")
def test_no_key_is_in_any_log(graph: Graph, keys_file: Path) -> None:
    owner = keys.first_key_path(keys_file).read_text().strip()
    token = keys.add(keys_file, "ann", "acme", frozenset({Scope.INFER}))
    wrong = token[:-4] + "AAAA"
    for key in (token, wrong, owner):
        used = OpenAI(base_url=f"{graph.url}/v1", api_key=key, max_retries=0)
        hello = [{"role": "user", "content": "x"}]
        how = {"extra_headers": {"x-request-id": "with-a-key"}, "max_tokens": 1}
        with pytest.raises(AuthenticationError) if key == wrong else contextlib.nullcontext():
            used.chat.completions.create(model=CHAT, messages=hello, **how)  # type: ignore[arg-type, call-overload]
    until(lambda: logs_naming(graph, "with-a-key"), 60, "the requests are in a log")
    assert not logs_naming(graph, token, wrong, owner)


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
