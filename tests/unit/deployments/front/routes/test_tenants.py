"""What a tenant left is erased over HTTP."""

from unittest.mock import AsyncMock

import pytest
from httpx import AsyncClient

from deployments.jobs.client import JobsClient
from tests.support.front_application import Arbiter, error


@pytest.mark.spec("E6")
async def test_what_a_tenant_left_is_erased_by_its_name(
    client: AsyncClient,
    arbiter: Arbiter,
    owner: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = AsyncMock(return_value=2)
    monkeypatch.setattr(JobsClient, "call", jobs)
    arbiter.answers["remove_tenant"] = None
    answer = await client.delete("/arbiter/tenants/acme/kept", headers=owner)
    assert answer.json() == {"tenant": "acme", "ending": 2}
    assert arbiter.calls == [("remove_tenant", "acme")]
    jobs.assert_awaited_once_with("remove_tenant", "acme")
    answer = await client.delete("/arbiter/tenants/a%20b/kept", headers=owner)
    assert (answer.status_code, error(answer)["param"]) == (400, "tenant")
    assert len(arbiter.calls) == 1
