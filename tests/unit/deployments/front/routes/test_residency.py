"""Where models are, as HTTP shows it."""

from typing import Any

import pytest

from deployments.config.schema import parse_table
from deployments.front.routes.residency import picture
from deployments.front.status.arbiter_gateway import typed

TABLE = {"capabilities": {"chat": {"role": "text", "engine": "vllm", "models": {
    name: {"source": "x"} for name in "ab"
}}}}  # fmt: skip


def ticket(model: str, state: str, charged: dict[str, int], ram: int) -> dict[str, Any]:
    return {
        "ticket": f"{model}-1", "capability": "chat", "model": model, "state": state,
        "charged_bytes": charged, "ram_bytes": ram, "lease": None,
        "in_state_s": 1.0,
    }  # fmt: skip


@pytest.mark.spec("B1", "D8")
def test_the_ram_of_a_process_beside_a_gpu_is_no_host_copy() -> None:
    state = {"cooldowns": [], "floors": [], "hours": [], "tickets": [
        ticket("a", "resident", {"n/gpu:0": 60, "n/host": 2}, 2),
        ticket("b", "asleep", {"n/host": 52}, 2),
    ]}  # fmt: skip
    shown = picture(parse_table(TABLE), typed(state))
    assert (shown["a"]["level"], shown["a"]["host_copy_bytes"]) == ("device", 0)
    assert (shown["b"]["level"], shown["b"]["host_copy_bytes"]) == ("host", 50)
