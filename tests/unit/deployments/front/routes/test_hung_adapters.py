"""Requests for adapters, some of whose folders lie on a file server that hangs."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient, Response

from deployments.adapters import catalogue
from deployments.adapters.safe_files import is_folder
from deployments.config.schema import parse_table
from deployments.front.inference import model_names
from deployments.front.inference import tasks as tasks_of_front
from deployments.front.status import arbiter_gateway
from tests.support.answering_front import AnsweringFront, whole
from tests.support.arbiter_states import Books

WITHIN_S = 60.0
FAR, NEAR = "far", "near"  # models: the adapters of the first hang
CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "a"}]


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncClient]:
    """The client of a front whose folder `far` answers once the client is left."""
    is_back = threading.Event()

    def looks(path: Path) -> bool:
        if str(path).startswith(str(tmp_path / FAR)):
            assert is_back.wait(WITHIN_S)
        return is_folder(path)

    async def answers(method: str, *args: object, within_s: float = 0) -> dict[str, Any]:
        return Books().state()

    law = tmp_path / NEAR / "law"
    law.mkdir(parents=True)
    (law / "adapter_config.json").write_text('{"r": 8}')
    (law / "adapter_model.safetensors").write_bytes(b"")
    monkeypatch.setattr(catalogue, "is_folder", looks)
    monkeypatch.setattr(model_names, "FOLDERS_S", 0.5)
    monkeypatch.setattr(tasks_of_front, "LOOK_S", 0.2)
    monkeypatch.setattr(arbiter_gateway, "call_arbiter", answers)
    models = {
        name: {"source": "x", "adapters": {"folder": str(tmp_path / name)}} for name in (FAR, NEAR)
    }
    chat = {"role": "text", "engine": "vllm", "models": models}
    front = AnsweringFront(tmp_path)
    front.says(CHAT, whole({"choices": []}))
    tasks = {
        "mixed": {"ladder": [f"{FAR}:law", f"{FAR}:tax", NEAR]},
        "away": {"ladder": [f"{FAR}:law"]},
    }
    front.state.service.configure(parse_table({"capabilities": {"chat": chat}, "tasks": tasks}))
    made = AsyncClient(transport=ASGITransport(front.app), base_url="http://localhost")
    async with made:
        try:
            yield made
        finally:
            is_back.set()


async def asked(client: AsyncClient, model: str) -> Response:
    async with asyncio.timeout(WITHIN_S / 2):
        return await client.post(CHAT, json={"model": model, "messages": HELLO})


@pytest.mark.spec("F2", "J8")
async def test_adapter_whose_file_server_hangs_holds_up_no_other_request(
    client: AsyncClient,
) -> None:
    waiting = asyncio.ensure_future(asked(client, f"{FAR}:law"))
    others = [await asked(client, name) for name in (FAR, NEAR, f"{NEAR}:law")]
    assert [answer.status_code for answer in others] == [200, 200, 200]
    answer = await waiting
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "adapters_away")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await asked(client, "law")).status_code == 503  # it may be one of `far`


@pytest.mark.spec("F2", "J1")
async def test_lists_and_near_misses_do_without_adapters_whose_file_server_hangs(
    client: AsyncClient,
) -> None:
    async with asyncio.timeout(WITHIN_S / 2):
        cards = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards if "task:" not in card["id"]] == [FAR, NEAR]
    refused = await asked(client, f"{NEAR}:low")
    assert refused.status_code == 404 and "did you mean" in refused.json()["error"]["message"]


@pytest.mark.spec("F2", "J1")
async def test_name_of_no_model_with_adapters_looks_into_no_folder(client: AsyncClient) -> None:
    refused = await asked(client, "llama:8b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.spec("F2", "J1")
@pytest.mark.parametrize("name", ["org/llama-8b", "@acme", ".law", f"{NEAR}:{FAR}", ":law"])
async def test_name_that_no_adapter_may_have_is_unknown_while_a_file_server_hangs(
    client: AsyncClient, name: str
) -> None:
    assert (await asked(client, "law")).status_code == 503, "the folders are being looked into"
    refused = await asked(client, name)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.spec("F2", "J7")
async def test_ladder_goes_on_without_the_adapters_whose_file_server_hangs(
    client: AsyncClient,
) -> None:
    answer = await asked(client, "task:mixed")
    assert answer.status_code == 200
    refused = await asked(client, "task:away")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "task_has_no_model")
    assert int(refused.headers["retry-after"]) >= 1
