"""A copy of a model's files that its engines share, as people see and drop it while it runs."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from deployments.client import Client
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import EMBEDDING, environment, read_command, send

SHARED, WITHIN_S = "sharing-minilm", 60


@pytest.fixture
def shared(graph: Graph) -> Iterator[str]:
    """A model that shares its copy. It stays until the test unloads it, and leaves the table with
    the test."""
    config = copy.deepcopy(graph.config)
    front = config["applications"][0]["deployments"][0]
    models = front["user_config"]["capabilities"]["embedding"]["models"]
    models[SHARED] = {**models[EMBEDDING], "host_copy": "shared", "keep_warm_s": -1}
    graph.deploy(config)
    try:
        until(lambda: SHARED in served(graph), WITHIN_S, "the model is in the table")
        yield SHARED
    finally:
        graph.deploy(graph.config)
        until(lambda: SHARED not in served(graph), WITHIN_S, "the model has left the table")
    until(lambda: not copies(graph), WITHIN_S, "its copy has left with it")


def served(graph: Graph) -> list[str]:
    return [row["id"] for row in graph.get("/v1/models")["data"]]


def copies(graph: Graph) -> list[dict[str, Any]]:
    copies: list[dict[str, Any]] = send(graph, "GET", "/arbiter/host_copies")["copies"]
    return copies


def loaded(graph: Graph, client: OpenAI, model: str) -> dict[str, Any]:
    """The copy of a model, which has answered a request and has it open."""
    assert client.embeddings.create(model=model, input="A lease ends.").data
    [used] = until(
        lambda: [c for c in copies(graph) if c["users"] and not c["is_leaving"]],
        WITHIN_S,
        "the copy is in use",
    )
    return used


def idle(graph: Graph, model: str) -> dict[str, Any]:
    """The copy, after the model was unloaded."""
    unload(graph, model)
    [left] = until(
        lambda: [c for c in copies(graph) if not c["users"]], WITHIN_S, "the copy has no user"
    )
    return left


def unload(graph: Graph, model: str) -> None:
    """A model whose last request has just ended may count as in use for a second."""

    def is_gone() -> bool:
        send(graph, "POST", f"/arbiter/models/unload/{model}")
        return all(t["model"] != model for t in graph.state()["tickets"])

    until(is_gone, WITHIN_S, "the model is unloaded")


@pytest.mark.spec("D8", "E1")
def test_shared_copy_is_seen_and_dropped_by_http_command_and_python(
    graph: Graph, client: OpenAI, shared: str
) -> None:
    used = loaded(graph, client, shared)
    assert used["models"] == [["embedding", shared]]
    assert read_command(graph, "copies") == copies(graph)
    is_listed_in_the_pool(graph, used)
    with Client(graph.url, key=environment(graph)["ARBITER_KEY"]) as python:
        [seen] = python.host_copies()
        assert (seen.key, seen.users) == (used["key"], tuple(used["users"]))
        said = send(graph, "DELETE", f"/arbiter/host_copies/{used['key']}")
        assert said == {"key": used["key"], "is_gone": False}, "an engine has it open"
        until(lambda: [c["is_leaving"] for c in copies(graph)] == [True], WITHIN_S, "it is to go")
        unload(graph, shared)
        until(lambda: not copies(graph), WITHIN_S, "it has left with its last engine")
        loaded(graph, client, shared)
        again = idle(graph, shared)
        assert read_command(graph, "drop-copy", again["key"])["is_gone"] is True
        until(lambda: not copies(graph), WITHIN_S, "the command has dropped it")
        loaded(graph, client, shared)
        assert python.drop_host_copy(idle(graph, shared)["key"]) is True
        until(lambda: not python.host_copies(), WITHIN_S, "Python has dropped it")


def is_listed_in_the_pool(graph: Graph, used: dict[str, Any]) -> None:
    """By the command, and in the view that the console draws."""
    shown = read_command(graph, "pool")
    [row] = [s for s in shown["slabs"] if s["slab"]["content"] == "weights"]
    assert row["slab"]["owner"] == f"embedding/{SHARED}" and row["users"] == used["users"]
    assert row["slab"]["rows_count"] > 0 and used["key"].startswith(row["slab"]["namespace"])
    assert row["slab"]["allocated_bytes"] == used["size_bytes"]
    [total] = [c["content"] for c in shown["contents"] if c["content"]["content"] == "weights"]
    assert total["allocated_bytes"] == used["size_bytes"] and total["misses_count"] > 0
    [drawn] = [s for s in send(graph, "GET", "/arbiter/view")["slabs"] if s["content"] == "weights"]
    assert (drawn["owner"], drawn["users"]) == (f"embedding/{SHARED}", used["users"])
