"""The dry run over HTTP: as a request would ask, and of the tenant of the key."""

from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from tests.support.front_application import Arbiter, error


@pytest.mark.spec("K3")
async def test_a_dry_run_asks_for_bytes_as_a_lease_of_the_keys_tenant_would(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    arbiter.answers["plan"] = {"answer": "now"}
    body = {"model": "comfyui", "gb": 2, "priority": "high"}
    answer = await client.post("/arbiter/plan", json=body, headers=owner)
    assert answer.json() == {"answer": "now"}
    [(method, asked)] = arbiter.calls
    assert (method, asked.model, asked.need.device_bytes) == ("plan", "comfyui", 2 << 30)
    assert asked.lease.tenant == "default" and asked.priority.name == "HIGH"


@pytest.mark.spec("K3")
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "body"),
        ({"model": "nothing"}, 404, "model"),
        ({"model": "voice"}, 400, "model"),  # its engine says of no file what it needs
        ({"model": "voice", "gb": -1}, 400, "gb"),
        ({"gb": 1, "priority": "soon"}, 400, "priority"),
    ],
)
async def test_a_dry_run_that_cannot_be_asked_names_the_field(
    client: AsyncClient, arbiter: Arbiter, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await client.post("/arbiter/plan", json=body)
    assert (answer.status_code, error(answer)["param"]) == (status, param)
    assert not arbiter.calls


@pytest.mark.spec("K3", "L1")
async def test_a_dry_run_needs_the_scope_of_reading_the_state(
    client: AsyncClient, arbiter: Arbiter, keys_file: Path
) -> None:
    arbiter.answers["plan"] = {"answer": "now"}
    infers = keys.add(keys_file, "i", "acme", frozenset({Scope.INFER}))
    views = keys.add(keys_file, "v", "acme", frozenset({Scope.VIEW}))
    for key, status in ((infers, 403), (views, 200)):
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.post("/arbiter/plan", json={"gb": 1}, headers=headers)
        assert answer.status_code == status
    [(_, asked)] = arbiter.calls
    assert asked.lease.tenant == "acme"
