"""Settings and deadlines on the running system, over HTTP and by command."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from deployments.front.access import keys
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import CHAT, by_hand, level, read_command


def put(graph: Graph, body: object, key: str) -> tuple[int, Any]:
    address = f"{graph.url}/arbiter/settings"
    headers = {"authorization": f"Bearer {key}"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.mark.spec("C12")
def test_settings_change_by_command_and_over_http_for_one_generation(graph: Graph) -> None:
    path = keys.keys_path(None, graph.table["arbiter"]["state_file"])
    owner = keys.first_key_path(path).read_text().strip()
    before = read_command(graph, "settings")
    after = read_command(graph, "settings", "bypass_count=9")
    assert (before["bypass_count"], after["bypass_count"]) == (8, 9)
    assert after["generation"] == before["generation"] + 1
    wanted = {"generation": before["generation"], "settings": {"bypass_count": 5}}
    assert put(graph, wanted, "none")[0] == 401
    status, error = put(graph, wanted, owner)
    assert (status, error["code"]) == (409, "settings_conflict")
    assert str(after["generation"]) in error["message"]
    wrong = {"generation": after["generation"], "settings": {"bypass_count": -1}}
    status, error = put(graph, wrong, owner)
    assert status == 400 and "bypass_count" in error["message"]
    assert read_command(graph, "settings") == after
    assert read_command(graph, "settings", "bypass_count=")["bypass_count"] == 8
    assert "clients" in read_command(graph, "clients")


@pytest.mark.spec("A21")
def test_a_deadline_its_load_cannot_meet_is_refused_at_once_with_the_estimate(
    graph: Graph, client: OpenAI
) -> None:
    by_hand(graph, "load")
    until(lambda: level(graph) == "device", 60, "it is resident")
    until(lambda: by_hand(graph, "unload") and level(graph) == "cold", 60, "it is gone")
    loads = [e for e in graph.events() if e["kind"] == "model_load" and e["model"] == CHAT]
    quickest_s = min(load["took_s"] for load in loads)  # the estimate is of several
    hello: Any = [{"role": "user", "content": "Quick!"}]
    with pytest.raises(APIStatusError) as caught:
        client.chat.completions.create(
            model=CHAT, messages=hello, extra_body={"x_deadline_s": quickest_s / 2}
        )
    error = caught.value
    assert (error.status_code, error.code) == (503, "deadline_unmet")
    assert (
        "more than its deadline" in error.message
        and int(error.response.headers["retry-after"]) >= 1
    )
    assert level(graph) == "cold"  # nothing was loaded for it
