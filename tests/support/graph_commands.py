"""Commands and requests of its owner to a running graph."""

import json
import os
import subprocess
import urllib.request
from typing import Any

from deployments.front.access import keys
from tests.graph.conftest import BIN, Graph

CHAT, EMBEDDING = "tiny-chat", "all-minilm-l6-v2"


def environment(graph: Graph) -> dict[str, str]:
    """With the key that was made at the first start."""
    path = keys.keys_path(None, graph.table["arbiter"]["state_file"])
    token = keys.first_key_path(path).read_text().strip()
    return os.environ | {"ARBITER_KEY": token, "ARBITER_URL": graph.url}


def send(graph: Graph, method: str, path: str, body: object = None) -> Any:
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {environment(graph)['ARBITER_KEY']}",
    }
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(graph.url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def run_command(graph: Graph, *words: str) -> str:
    """What `arbiter` prints."""
    command = [str(BIN / "arbiter"), *words]
    done = subprocess.run(
        command, env=environment(graph), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"arbiter {' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout


def read_command(graph: Graph, *words: str) -> Any:
    """What `arbiter --json` prints."""
    return json.loads(run_command(graph, *words, "--json"))


def by_hand(graph: Graph, act: str, model: str = CHAT) -> Any:
    """`arbiter load MODEL`, `unload`, `grow` or `shrink`, without a process for it."""
    return send(graph, "POST", f"/arbiter/models/{act}/{model}")


def drain(graph: Graph, lease: str) -> None:
    send(graph, "POST", f"/arbiter/leases/{lease}/drain")


def level(graph: Graph, model: str = CHAT) -> str:
    return str(send(graph, "GET", "/arbiter/residency")["models"][model]["level"])


def unload_all(graph: Graph) -> bool:
    """Asks every idle model to go; whether none is loaded any more."""
    loaded = {t["model"] for t in graph.state()["tickets"]}
    for model in loaded - {""}:  # a lease has no model
        by_hand(graph, "unload", model)
    return not loaded


def queue(graph: Graph) -> list[tuple[str, str]]:
    """Model and priority of each queued ticket."""
    return [
        (row["model"], row["priority"]) for row in send(graph, "GET", "/arbiter/state")["queue"]
    ]
