"""Several models of one holder at once (A13): a vision model and its projector, each in a
process of its own.

    async with use_all(residency, ("vlm", "projector")) as (vlm, projector): ...

The models that are not resident are requested as a gang: granted in one step, or none of them. The
resident ones are not in use while a request waits for the others, or two such requests could wait
for each other for ever; they may be unloaded meanwhile, and are loaded again. No shipped capability
needs it: CONTRIBUTING.md says when one of another package does.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from arbiter.client.gang_request import Gang
from arbiter.core.types import ANYBODY, Client, Priority
from arbiter.errors import EngineLost
from deployments.replica.held_model import HeldModel, HolderState, new_ticket
from deployments.replica.residency import ATTEMPTS_COUNT, Residency
from deployments.replica.use import Use


@contextlib.asynccontextmanager
async def use_all(
    residency: Residency,
    models: tuple[str, ...],
    *,
    deadline_s: float | None = None,
    priority: Priority = Priority.NORMAL,
    client: Client = ANYBODY,
) -> AsyncIterator[tuple[Use, ...]]:
    """Enters a use of each model, in the order given. Raises the error of the first refused one."""
    until_s = None if deadline_s is None else time.monotonic() + deadline_s
    for _ in range(ATTEMPTS_COUNT):
        await _bring(residency, models, until_s, priority, client)
        if all(_serves(residency, model) for model in models):
            break
    else:
        raise EngineLost(models[0])
    async with contextlib.AsyncExitStack() as uses:
        begun = (residency.use(model, priority=priority, client=client) for model in models)
        yield tuple([await uses.enter_async_context(use) for use in begun])  # none of them waits


async def _bring(
    residency: Residency,
    models: tuple[str, ...],
    until_s: float | None,
    priority: Priority,
    client: Client,
) -> None:
    """Returns when each model has served once. Raises RequestError."""
    plans = [await residency.plan(model) for model in dict.fromkeys(models)]
    away = [p for p in plans if p.model not in residency.models]
    held_models = [HeldModel(plan, new_ticket(plan.model)) for plan in away]
    gang = Gang(tuple(held.ticket for held in held_models)) if len(held_models) > 1 else None
    for held in held_models:
        held.gang = gang
        held.note_request(priority, client, until_s)
        residency.begin_load(held)

    async def serve(model: str) -> None:
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        (await residency.begin_request(model, left_s, priority, client)).end_request()

    try:
        async with asyncio.TaskGroup() as entering:
            for plan in plans:
                if not _serves(residency, plan.model):
                    entering.create_task(serve(plan.model))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def _serves(residency: Residency, model: str) -> bool:
    held = residency.models.get(model)
    return held is not None and held.state is HolderState.RESIDENT
