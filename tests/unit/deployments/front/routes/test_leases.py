"""The lease route reads a bounded body."""

from typing import Any
from unittest.mock import Mock

import pytest
from fastapi import Request

from deployments.front.request import BadRequest
from deployments.front.routes import leases, residency


async def test_a_body_without_end_is_read_no_further_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_bytes = 0

    async def receive() -> dict[str, Any]:
        nonlocal read_bytes
        read_bytes += 4096
        assert read_bytes < 1 << 20, "it is read without end"
        return {"type": "http.request", "body": b" " * 4096, "more_body": True}

    endless = Request({"type": "http", "method": "PUT", "path": "/", "headers": []}, receive)
    monkeypatch.setattr(leases, "the_gate", Mock)
    answer = await leases.hear(endless, "mine")
    assert answer.status_code == 413
    endless = Request({"type": "http", "method": "PUT", "path": "/", "headers": []}, receive)
    with pytest.raises(BadRequest):
        await residency.read_body(endless, residency.PressureBody)
    assert read_bytes <= 2 * (leases.MOST_BYTES + 4096)
