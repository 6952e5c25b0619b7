"""The front's deployment class, without a cluster: what Serve does with it in a replica."""

from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from arbiter.errors import ArbiterUnavailable, QueueFull
from deployments.config.schema import ConfigError, Table
from deployments.front.capability_apps import CapabilityApps
from deployments.front.ingress import Front
from deployments.front.status import arbiter_gateway

CHAT = {"role": "text", "engine": "m:f", "models": {"tiny": {"source": "x"}}}


class NoServe:
    """There is no controller here."""

    def applications(self) -> dict[str, Any]:
        return {}

    def run(self, applications: dict[str, Any]) -> None: ...
    def delete(self, name: str) -> None: ...


@pytest.fixture
async def front(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def configured(table: Table) -> Table:
        """There is no arbiter here."""
        return table

    async def away(*asked: object, **how: object) -> None:
        raise ArbiterUnavailable(0.0)

    monkeypatch.setattr(arbiter_gateway, "configure", configured)
    monkeypatch.setattr(arbiter_gateway, "call_arbiter", away)
    kind = Front.func_or_class  # type: ignore[attr-defined]

    class OfNoReplica(kind):  # type: ignore[misc, valid-type]
        def __del__(self) -> None: ...  # Serve awaits the other one

    made = object.__new__(OfNoReplica)
    await kind.__init__(made)
    made._set_asgi_app(made.__serve_build_asgi_app__())
    made._front.apps = CapabilityApps(NoServe())
    return made


def config(tmp_path: Path, **capabilities: Any) -> dict[str, Any]:
    front = {"in_flight": 1, "keys_file": str(tmp_path / "keys.json")}
    return {"front": front, "capabilities": capabilities}


@pytest.mark.spec("J8")
async def test_table_change_brings_models_and_paths_and_keeps_calls_in_flight(
    front: Any, tmp_path: Path
) -> None:
    transport = ASGITransport(front.app)
    async with AsyncClient(transport=transport, base_url="http://localhost") as client:
        await front.reconfigure(config(tmp_path, chat=CHAT))
        service = front.app.state.front.service
        with service.admitted():
            rank = {**CHAT, "models": {"ranker": {"source": "x"}}, "paths": ["/v1/ranks"]}
            await front.reconfigure(config(tmp_path, chat=CHAT, rank=rank))
            assert front.app.state.front.service is service
            with pytest.raises(QueueFull), service.admitted():
                pass
        models = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == ["ranker", "tiny"]
        answer = await client.post("/v1/ranks", json={"model": "none"})
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_table_that_is_wrong_changes_nothing(front: Any, tmp_path: Path) -> None:
    await front.reconfigure(config(tmp_path, chat=CHAT))
    before = front.app.state.front.table
    with pytest.raises(ConfigError, match=r"chat\.role"):
        await front.reconfigure(config(tmp_path, chat={**CHAT, "role": "none"}))
    assert front.app.state.front.table is before
