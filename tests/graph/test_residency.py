"""Models set where they are to be by hand, on the running system."""

import json
import os
import subprocess
from typing import Any

import pytest
from openai import OpenAI

from deployments.front import keys
from tests.graph.conftest import BIN, Graph, until

CHAT = "tiny-chat"


def said(graph: Graph, *words: str) -> Any:
    path = keys.keys_path(None, graph.table["arbiter"]["state_file"])
    token = keys.first_key_path(path).read_text().strip()
    env = os.environ | {"ARBITER_KEY": token, "ARBITER_URL": graph.url}
    done = subprocess.run(
        [BIN / "arbiter", *words, "--json"],
        env=env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def level(graph: Graph) -> str:
    return str(said(graph, "residency")[CHAT]["level"])


@pytest.mark.spec("D8")
def test_a_model_is_loaded_and_unloaded_by_hand(graph: Graph, client: OpenAI) -> None:
    """With nobody asking for it, and from zero replicas if that is what there is."""
    said(graph, "load", CHAT)
    until(lambda: level(graph) == "device", 60, "it is resident")
    until(lambda: said(graph, "unload", CHAT) and level(graph) == "cold", 30, "it is gone")
    hello = [{"role": "user", "content": "Who holds the memory?"}]
    assert client.chat.completions.create(model=CHAT, messages=hello, max_tokens=2).choices  # type: ignore[arg-type]
