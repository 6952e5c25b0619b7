"""Freeing over HTTP: a lease that is asked for once, planned or given up."""

import pytest
from httpx import AsyncClient

from tests.support.front_application import Arbiter, error


@pytest.mark.spec("A15")
async def test_freeing_asks_once_for_a_lease_that_the_arbiter_keeps(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    arbiter.answers["free"] = {"plan": {"victims": []}, "lease": {"state": "held"}}
    body = {"gb": 2, "term_s": 600, "name": "comfyui"}
    answer = (await client.post("/arbiter/free", json=body, headers=owner)).json()
    assert answer.items() >= arbiter.answers["free"].items()
    [(method, call, is_kept)] = arbiter.calls
    assert (method, call.lease, is_kept) == ("free", answer["id"], True)
    assert (call.size_bytes, call.label) == (2 << 30, "comfyui")
    assert call.terms.frees and not call.terms.preemptible and call.terms.notice == 0


@pytest.mark.spec("A15", "K3")
async def test_a_dry_run_of_freeing_asks_for_a_plan_alone(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    arbiter.answers["plan"] = {"answer": "now"}
    answer = await client.post("/arbiter/free", json={"gb": 2, "dry_run": True}, headers=owner)
    assert answer.json() == {"plan": {"answer": "now"}, "lease": None}
    [(method, asked)] = arbiter.calls
    assert method == "plan" and asked.lease.frees


@pytest.mark.spec("A15")
async def test_what_is_not_freed_in_time_is_given_up(
    client: AsyncClient, arbiter: Arbiter, owner: dict[str, str]
) -> None:
    arbiter.answers["free"] = {"plan": None, "lease": {"state": "queued"}}
    body = {"gb": 2, "within_s": 0.001}
    answer = await client.post("/arbiter/free", json=body, headers=owner)
    assert (answer.status_code, error(answer)["code"]) == (503, "deadline_unmet")
    assert [call[0] for call in arbiter.calls][-1] == "end_lease"
