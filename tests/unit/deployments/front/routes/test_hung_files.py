"""Routes that read files of models, of which some lie on a file server that hangs."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from httpx import ASGITransport, AsyncClient

from deployments.config import load_plan, voice_files
from deployments.config.schema import parse_table
from deployments.front import application
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from deployments.front.status import arbiter_gateway, model_cards
from deployments.front.status.serve_status import Applications
from deployments.jobs.bodies import Bodies
from deployments.jobs.client import JobsClient
from deployments.jobs.database import Database
from deployments.jobs.store import JobStore, NewJob
from tests.support.arbiter_states import Books
from tests.support.speaker import Speaker

WITHIN_S = 60.0
HUNG, NEAR = "hung", "near"


def table(near: Path) -> dict[str, Any]:
    sources = {HUNG: "/away", NEAR: str(near)}
    need = {"weights": "1 MiB"}
    chat = {name: {"source": source, "need": need} for name, source in sources.items()}
    spoken = {f"{name}-voice": {"source": source} for name, source in sources.items()}
    return {
        "capabilities": {
            "chat": {"role": "text", "engine": "vllm", "models": chat},
            "speech": {"role": "tts", "engine": "m:f", "models": spoken},
        }
    }


@pytest.fixture
async def client(
    tmp_path: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncClient]:
    """The client of a front whose model and voice of the source /away answer once it is left."""
    is_back = threading.Event()

    def resolve(source: str) -> str:
        if source == "/away":
            assert is_back.wait(WITHIN_S)
        return source

    async def answers(method: str, *args: object, within_s: float = 0) -> dict[str, Any]:
        books = Books()
        books.holds(HUNG, 100)
        return books.state()

    for module in (load_plan, model_cards, voice_files):
        monkeypatch.setattr(module, "resolve", resolve)
    monkeypatch.setattr(arbiter_gateway, "call_arbiter", answers)
    monkeypatch.setattr(model_cards, "FILES_S", 0.5)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    service = InferenceService(Speaker().send_of)
    service.configure(parse_table(table(tmp_path)))
    front = FrontState(7, Authenticator(Keyring(keys_file)), service, Applications(dict))
    transport = ASGITransport(application.build(front))
    async with AsyncClient(transport=transport, base_url="http://localhost") as made:
        try:
            yield made
        finally:
            is_back.set()


async def asked(client: AsyncClient, method: str, path: str, body: Any = None) -> Any:
    async with asyncio.timeout(WITHIN_S / 2):
        answer = await client.request(method, path, json=body)
    return answer.json()


@pytest.mark.spec("J1")
async def test_ollamas_lists_do_without_what_a_file_server_that_hangs_has(
    client: AsyncClient,
) -> None:
    rows = {row["name"]: row for row in (await asked(client, "GET", "/api/tags"))["models"]}
    assert (rows[HUNG]["size"], rows[HUNG]["context_length"]) == (0, None)
    assert (rows[NEAR]["size"], rows[NEAR]["context_length"]) == (1 << 20, 512)
    card = await asked(client, "POST", "/api/show", {"model": HUNG})
    assert card["model_info"] == {
        "general.architecture": "vllm",
        "general.size_bytes": 0,
        "vllm.context_length": 0,
    }
    card = await asked(client, "POST", "/api/show", {"model": NEAR})
    assert card["model_info"]["general.size_bytes"] == 1 << 20
    [row] = (await asked(client, "GET", "/api/ps"))["models"]
    assert (row["name"], row["context_length"]) == (HUNG, 0)


@pytest.mark.spec("J1")
async def test_voices_of_other_models_are_listed_while_a_file_server_hangs(
    client: AsyncClient,
) -> None:
    assert (await asked(client, "GET", "/v1/audio/voices"))["voices"] == [f"{NEAR}-voice"]


@pytest.mark.spec("K3")
async def test_dry_run_of_a_model_whose_file_server_hangs_says_so(client: AsyncClient) -> None:
    error = (await asked(client, "POST", "/arbiter/plan", {"model": HUNG}))["error"]
    assert error["message"].startswith(f"the files of {HUNG} were not read within 0.5 s")


@pytest.mark.spec("J4")
async def test_jobs_that_wait_for_a_model_whose_file_server_hangs_are_listed_without_its_files(
    client: AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cards, "FILES_S", WITHIN_S)
    store = JobStore(Database(tmp_path / "arbiter.sqlite"), Bodies(tmp_path / "jobs"))
    for number in range(3):
        new = NewJob(f"job_{number}", "default", "async", "/v1/chat/completions", HUNG)
        store.create(new, b"{}")
    kept = AsyncMock(return_value=store.page("default"))
    monkeypatch.setattr(JobsClient, "call", kept)
    rows = (await asked(client, "GET", "/v1/jobs"))["data"]
    assert [row["estimate_s"] for row in rows] == [0.0] * 3
