"""Where models are, as HTTP shows it."""

from typing import Any

import pytest
from httpx import AsyncClient

from deployments.config.schema import parse_table
from deployments.front.routes.residency import picture
from deployments.front.status.arbiter_gateway import typed
from tests.support.front_application import STATE, Arbiter, error

TABLE = {"capabilities": {"chat": {"role": "text", "engine": "vllm", "models": {
    name: {"source": "x"} for name in "ab"
}}}}  # fmt: skip


def ticket(model: str, state: str, charged: dict[str, int], ram: int) -> dict[str, Any]:
    return {
        "ticket": f"{model}-1", "capability": "chat", "model": model, "state": state,
        "charged_bytes": charged, "ram_bytes": ram, "lease": None,
        "in_state_s": 1.0,
    }  # fmt: skip


@pytest.mark.spec("B1", "D8")
def test_the_ram_of_a_process_beside_a_gpu_is_no_host_copy() -> None:
    state = {"cooldowns": [], "floors": [], "hours": [], "tickets": [
        ticket("a", "resident", {"n/gpu:0": 60, "n/host": 2}, 2),
        ticket("b", "asleep", {"n/host": 52}, 2),
    ]}  # fmt: skip
    shown = picture(parse_table(TABLE), typed(state))
    assert (shown["a"]["level"], shown["a"]["host_copy_bytes"]) == ("device", 0)
    assert (shown["b"]["level"], shown["b"]["host_copy_bytes"]) == ("host", 50)


@pytest.mark.spec("D8")
@pytest.mark.parametrize("act", ["load", "unload", "grow", "shrink"])
async def test_unknown_model_is_404_whatever_is_to_be_done_with_it(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str], act: str
) -> None:
    for name in ("vioce+merged", "vioce"):
        answer = await client.post(f"/arbiter/models/{act}/{name}", headers=owner)
        assert (answer.status_code, error(answer)["code"]) == (404, "model_not_found")
    assert "did you mean voice?" in error(answer)["message"]
    assert not arbiter.calls


@pytest.mark.spec("D8", "F7")
async def test_merged_copy_is_unloaded_by_its_name_and_without_its_base(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    rows = [
        ticket(name, "resident", {}, 0) | {"capability": "speak"}
        for name in ("voice", "voice+merged")
    ]
    arbiter.answers["state"] = STATE | {"tickets": rows}
    answer = await client.post("/arbiter/models/unload/voice%2Bmerged", headers=owner)
    assert answer.json() == {"model": "voice+merged", "tickets": ["voice+merged-1"]}
    assert arbiter.calls[-1] == ("unload", "voice+merged-1")
    arbiter.answers["state"] = STATE
    answer = await client.post("/arbiter/models/unload/voice", headers=owner)
    assert answer.json() == {"model": "voice", "tickets": []}


@pytest.mark.spec("C5")
async def test_pressure_of_a_place_that_there_is_not_is_refused_with_those_there_are(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    devices = [{"device": f"n/{name}", "node": "n"} for name in ("gpu:0", "host")]
    arbiter.answers["state"] = STATE | {"devices": devices}
    wrong = {"where": "n/gpu:7", "level": "low"}
    answer = await client.post("/arbiter/pressure", json=wrong, headers=owner)
    assert (answer.status_code, error(answer)["param"]) == (404, "where")
    assert error(answer)["message"].endswith("there are: n, n/gpu:0, n/host")
    assert [call[0] for call in arbiter.calls] == ["state"]
    for place in ("n", "n/gpu:0"):
        right = wrong | {"where": place}
        assert (await client.post("/arbiter/pressure", json=right, headers=owner)).is_success
        assert arbiter.calls[-1][1].where == place
