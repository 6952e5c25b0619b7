"""Tasks of a running graph: changed for as long as a test lasts, and asked."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from arbiter import leases
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import environment, level, send

CONFIG = "/api/v1/config"
TINY, PLAIN, WIDE = "tiny-chat", "plain-chat", "wide-chat"
HELLO: Any = [{"role": "user", "content": "Who holds the memory?"}]


def put(graph: Graph, body: object, generation: int | None = None) -> tuple[int, Any]:
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {environment(graph)['ARBITER_KEY']}",
    }
    if generation is not None:
        headers["if-match"] = f'"{generation}"'
    data = json.dumps(body).encode()
    request = urllib.request.Request(graph.url + CONFIG, data, headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@contextmanager
def tasks(graph: Graph, **wanted: Any) -> Iterator[None]:
    """For as long as it lasts; then those of the file again: none."""
    try:
        now = send(graph, "GET", CONFIG)["generation"]
        assert put(graph, {"generation": now, "tasks": wanted})[0] == 200
        yield
    finally:
        now = send(graph, "GET", CONFIG)["generation"]
        assert put(graph, {"generation": now, "tasks": {}})[0] == 200


def answered(graph: Graph, task: str, **said: Any) -> tuple[str, str]:
    """The model in the body, and the header. `key`: of the asker, if wanted."""
    key = said.pop("key", None)
    body = {"model": f"task:{task}", "messages": HELLO, "max_tokens": 3, **said}
    headers = {"content-type": "application/json"}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{graph.url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["model"], answer.headers["x-arbiter-served-by"]


def make_cold(graph: Graph, model: str) -> None:
    until(
        lambda: (
            send(graph, "POST", f"/arbiter/models/unload/{model}") and level(graph, model) == "cold"
        ),
        60,
        f"{model} is gone",
    )


@contextmanager
def leased(graph: Graph, gb: float) -> Iterator[None]:
    """A job beside Serve holds memory that no model may take back."""
    way = leases.HttpTransport(graph.url, environment(graph)["ARBITER_KEY"])
    held = leases.ask(gb, name="drawing", way=way)
    held.acquire(60)
    try:
        yield
    finally:
        held.release()


@contextmanager
def in_use(graph: Graph, model: str) -> Iterator[None]:
    """A client holds the model, as a long drawing would."""
    body = json.dumps({"model": model, "term_s": 60}).encode()
    key = environment(graph)["ARBITER_KEY"]
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{graph.url}/v1/acquire", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        while b'"held"' not in answer.readline():
            pass
        yield
