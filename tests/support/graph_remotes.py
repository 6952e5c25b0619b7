"""Remotes of a running graph: clients that may ask them, and what its owner reads of it."""

import json
import urllib.request
from typing import Any

from openai import OpenAI

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from tests.graph.conftest import Graph

SECRET_WORD = "periwinkle"
HELLO: Any = [{"role": "user", "content": f"say {SECRET_WORD}"}]
CLOUD = frozenset({Scope.INFER, Scope.CLOUD})


def client_of(graph: Graph, key: str) -> OpenAI:
    return OpenAI(base_url=f"{graph.url}/v1", api_key=key, timeout=120, max_retries=0)


def owner_reads(graph: Graph, path: str) -> bytes:
    file = keys.keys_path(None, graph.table["arbiter"]["state_file"])
    owner = keys.first_key_path(file).read_text().strip()
    request = urllib.request.Request(graph.url + path, headers={"x-api-key": owner})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
        return body


def all_events(graph: Graph) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(owner_reads(graph, "/arbiter/events/recent"))[
        "events"
    ]
    return events


def egress(graph: Graph) -> list[dict[str, Any]]:
    """The events of what left, the newest last."""
    return [event for event in all_events(graph) if event["kind"].startswith("remote_")]
