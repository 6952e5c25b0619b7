"""Tiers of single adapters, as the engine of their model says (K4)."""

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from arbiter.errors import ArbiterUnavailable, RequestError
from deployments import messages
from deployments.config.adapter_names import base_of
from deployments.front.inference.service import InferenceService
from deployments.front.status.viewing import Viewing

# A busy engine says so within tens of milliseconds; a person who searches waits no longer.
WITHIN_S = 2.0
ORDER = ("hot", "warm")  # of a list, before all others


async def tiers_of(
    service: InferenceService, viewing: Viewing, names: Sequence[str], most: int, tenant: str
) -> dict[str, str]:
    """The tiers by full name, where they are known, of the first `most` names and of all that are
    hot in the models of the names. An engine is asked where it is loaded. Without it none is hot,
    and all are cold unless the node's pool has images of the model, of which only the engine knows
    the names."""
    try:
        state = await viewing.state()
    except ArbiterUnavailable:
        return {}
    by_base: dict[str, list[str]] = {base_of(name): [] for name in names}
    for name in names[:most]:
        by_base[base_of(name)].append(name)
    answers = await asyncio.gather(
        *(_of_model(service, state, model, rows, tenant) for model, rows in by_base.items())
    )
    return {name: tier for tiers in answers for name, tier in tiers.items()}


async def _of_model(
    service: InferenceService, state: Mapping[str, Any], model: str, names: list[str], tenant: str
) -> dict[str, str]:
    home = service.table.homes[model]
    states = [
        row["state"]
        for row in state["tickets"]
        if (row["capability"], row["model"]) == (home, model) and not row["lease"]
    ]
    if "resident" in states:
        return await _tiers_by_engine(service, model, names, tenant)
    has_images = any(
        row["slab"]["content"] == "adapter"
        and row["slab"]["owner"] == f"{home}/{model}"
        and row["slab"]["rows_count"]
        for row in state["slabs"]
    )
    return {} if has_images else dict.fromkeys(names, "cold")


async def _tiers_by_engine(
    service: InferenceService, model: str, names: list[str], tenant: str
) -> dict[str, str]:
    """Asks the engine for tiers by name; empty where it does not answer in time: it is ending, or
    busy."""
    body = json.dumps({"names": names}).encode()
    headers = {messages.TENANT_HEADER: tenant, "content-type": "application/json"}
    call = messages.InferenceCall(
        messages.ADAPTERS, body, headers, f"tiers-{uuid.uuid4().hex[:8]}", model, tenant=tenant
    )
    try:
        async with asyncio.timeout(WITHIN_S), aclosing(service.run(call)) as parts:
            first = await anext(parts)
    except (RequestError, TimeoutError):
        return {}
    if not isinstance(first, messages.FullResponse) or first.head.status != 200:
        return {}
    tiers: dict[str, str] = json.loads(first.body)["tiers"]
    return tiers


def in_order(names: Sequence[str], tiers: Mapping[str, str]) -> list[str]:
    """The hot ones first, then the warm ones; otherwise as they were."""
    rank = {tier: number for number, tier in enumerate(ORDER)}
    return sorted(names, key=lambda name: rank.get(tiers.get(name, ""), len(ORDER)))
