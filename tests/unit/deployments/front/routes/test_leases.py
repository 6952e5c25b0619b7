"""Leases over HTTP: of the tenant of the key."""

from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient

from arbiter.errors import UnknownLease
from deployments.front.access import keys
from deployments.front.access.keys import Scope
from tests.support.front_application import STATE, Arbiter, error

LEASE: dict[str, Any] = {
    "ticket": "mine", "capability": "", "model": "", "state": "resident", "in_state_s": 1.0,
    "charged_bytes": {}, "ram_bytes": 0, "lease": {"tenant": "acme"},
}  # fmt: skip


@pytest.mark.spec("L1")
async def test_lease_is_of_the_keys_tenant_whatever_the_body_says(
    client: AsyncClient, arbiter: Arbiter, keys_file: Path
) -> None:
    token = keys.add(keys_file, "ann", "acme", frozenset({Scope.LEASE}))
    ann = {"authorization": f"Bearer {token}"}
    await client.put("/arbiter/leases/a", json={"bytes": 1, "tenant": "victim"}, headers=ann)
    [(_, call)] = arbiter.calls
    assert call.terms.tenant == "acme"
    other = LEASE | {"ticket": "theirs", "lease": {"tenant": "other"}}
    arbiter.answers["state"] = STATE | {"tickets": [LEASE, other]}
    answer = await client.get("/arbiter/leases", headers=ann)
    assert [row["ticket"] for row in answer.json()["leases"]] == ["mine"]


async def test_drain_of_an_unknown_lease_is_404(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    answer = await client.post("/arbiter/leases/none/drain", headers=owner)
    assert (answer.status_code, error(answer)["code"]) == (404, "lease_not_found")
    arbiter.answers["state"] = STATE | {"tickets": [LEASE]}
    answer = await client.post("/arbiter/leases/mine/drain", headers=owner)
    assert answer.json() == {"lease": "mine"}
    assert arbiter.calls[-1] == ("unload", "mine")


@pytest.mark.spec("L3")
async def test_description_tells_names_of_leases_from_tickets_and_that_a_lease_may_be_unknown(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert "404" in paths["/arbiter/leases/{lease}"]["delete"]["responses"]
    assert "404" in paths["/arbiter/leases/{ticket}/drain"]["post"]["responses"]
    arbiter.answers["end_lease"] = UnknownLease("none")
    answer = await client.delete("/arbiter/leases/none", headers=owner)
    assert (answer.status_code, error(answer)["code"]) == (404, "lease_not_found")
