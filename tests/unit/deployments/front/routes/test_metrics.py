"""The page of metrics, and who may read it."""

from pathlib import Path

import pytest
from httpx import AsyncClient

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from tests.support.front_application import Arbiter


@pytest.mark.spec("K2", "L1")
async def test_metrics_need_the_scope_of_reading_the_state(
    client: AsyncClient, arbiter: Arbiter, keys_file: Path
) -> None:
    arbiter.answers["metrics"] = {"arbiter_epoch": [[[], 7]]}
    infers = keys.add(keys_file, "i", "acme", frozenset({Scope.INFER}))
    views = keys.add(keys_file, "v", "acme", frozenset({Scope.VIEW}))
    for key, status in ((infers, 403), (views, 200)):
        answer = await client.get("/metrics", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\narbiter_epoch 7.0\n" in answer.text
    assert arbiter.calls == [("metrics",)]
