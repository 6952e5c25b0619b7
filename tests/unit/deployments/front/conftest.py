"""What tests of the front share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from deployments.front.routes import free, leases, plan, queue, residency, tenants
from deployments.front.status import arbiter_gateway, metrics_page
from deployments.front.status.serve_status import Applications
from tests.support.front_application import Arbiter
from tests.support.speaker import Speaker, table


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """With the key of the first start."""
    path = tmp_path / "keys.json"
    keys.ensure_first(path)
    return path


@pytest.fixture
def arbiter(monkeypatch: pytest.MonkeyPatch) -> Arbiter:
    fake = Arbiter()
    for module in (arbiter_gateway, free, leases, metrics_page, plan, queue, residency, tenants):
        monkeypatch.setattr(module, "call_arbiter", fake)
    return fake


@pytest.fixture
def front(keys_file: Path) -> FrontState:
    service = InferenceService(Speaker().send_of)
    service.configure(table())
    auth = Authenticator(Keyring(keys_file))
    return FrontState(7, auth, service, Applications(dict))


@pytest.fixture(scope="session")
def built() -> FastAPI:
    """Made once, because its hundred routes take a while."""
    return application.build(FrontState(7))


@pytest.fixture
async def client(built: FastAPI, front: FrontState) -> AsyncIterator[AsyncClient]:
    built.state.front = front
    application.offer(built)
    transport = ASGITransport(built)
    async with AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made


@pytest.fixture
def owner(keys_file: Path) -> dict[str, str]:
    """Headers of the owner's key."""
    return {"authorization": f"Bearer {keys.first_key_path(keys_file).read_text().strip()}"}
