"""Forecasts: how long each model would take here, as the front saw it last.

    seen = await forecasts.read(table, ("small-chat", "tiny-chat"))

The arbiter's state and its dry run of what must be loaded are read in the background while tasks
are asked for, so that a request which finds its model resident waits for no call to the arbiter.
What is used is at most `STALE_S` old. The first request after a rest waits for one reading, for
`WAIT_S` at most; without one nothing is predicted, and the ladder's own order counts. Tenants with
limits have forecasts of their own: what one's quota forbids may be loaded for another.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from arbiter.client.admin import call_arbiter
from arbiter.core.reports.plan import PlanQuestion
from arbiter.core.types import Priority
from arbiter.errors import ArbiterUnavailable, UnknownCapability, UnknownModel
from arbiter.units import DEFAULT_TENANT
from deployments.config import load_plan
from deployments.config.capability_section import CapabilityConfig
from deployments.config.file_threads import in_thread
from deployments.config.schema import ConfigError, Table
from deployments.front.status import arbiter_gateway, model_cards, plan_questions
from deployments.front.status.arbiter_gateway import NEVER_SEEN, ArbiterState, ModelTimes, Presence
from deployments.tasks import predict
from deployments.tasks.predict import NOTHING, Prediction

logger = logging.getLogger("ray.serve")

# One reading is the arbiter's state and a dry run for each rung that must be loaded. It takes the
# arbiter some milliseconds (22 ms for each rung with 500 models resident, benchmarks/dry_run.py), a
# hundredth of its time while tasks are in use.
FRESH_S = 0.5  # a request that finds an older reading begins the next one, and does not wait for it
STALE_S = 2.0  # a request that finds an older reading waits for the next: a model may have left
WAIT_S = 1.0  # the most that it waits; a restart of the arbiter takes 1-2 s, and is not waited for
# The part of WAIT_S for the files of models, which are read once; a file server that hangs is not
# waited for again.
FILES_S = 0.5
FORGOTTEN_S = 60.0  # after its last use a model is no longer planned

ReadState = Callable[[], Awaitable[ArbiterState]]
Plan = Callable[[PlanQuestion], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Forecast:
    """When one model could begin with a request, and how long it would take."""

    predicted: Prediction
    context: int | None = None  # tokens that it reads; None: not known
    never: str | None = None  # why no request can have it loaded
    run_long_s: float | None = None  # the longest of its newest requests


UNSEEN = Forecast(NOTHING)


async def read_state() -> ArbiterState:
    """Raises ArbiterUnavailable."""
    return await arbiter_gateway.state(WAIT_S)


async def ask_plan(question: PlanQuestion) -> Mapping[str, Any]:
    """Raises RequestError."""
    answer: Mapping[str, Any] = await call_arbiter("plan", question, within_s=WAIT_S)
    return answer


@dataclass(frozen=True, slots=True)
class _ForecastKey:
    """A model of which a task has asked, and the tenant for which."""

    model: str
    tenant: str


class Forecasts:
    """Keeps forecasts of the models that tasks have asked for lately. One per front, on its event
    loop."""

    def __init__(
        self,
        state: ReadState = read_state,
        plan: Plan = ask_plan,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._plan, self._clock = state, plan, clock
        self._table: Table | None = None
        self._unlimited = ""  # the tenant that stands for all without limits; empty: none has asked
        self._last_use_s: dict[_ForecastKey, float] = {}
        self._forecasts: dict[_ForecastKey, Forecast] = {}
        self._files: dict[str, asyncio.Future[_Files]] = {}  # of the table's models, read once
        self._read_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def read(
        self, table: Table, models: Iterable[str], tenant: str = DEFAULT_TENANT
    ) -> Mapping[str, Forecast]:
        """Forecasts of these models of the table for requests of a tenant, at most STALE_S old;
        UNSEEN for a model of which nothing came within WAIT_S."""
        if table is not self._table:
            self._table, self._forecasts, self._files, self._reading = table, {}, {}, None
            self._unlimited, self._last_use_s = "", {}
        now_s = self._clock()
        alike = self._alike(tenant, table)
        keys = tuple(_ForecastKey(model, alike) for model in models)
        self._last_use_s |= dict.fromkeys(keys, now_s)
        age_s = now_s - self._read_s
        is_known = all(key in self._forecasts for key in keys)
        if age_s > FRESH_S or not is_known:
            reading = self._begin(table)
            if age_s > STALE_S or not is_known:
                await asyncio.wait({reading}, timeout=WAIT_S)
        return {key.model: self._forecasts.get(key, UNSEEN) for key in keys}

    def _alike(self, tenant: str, table: Table) -> str:
        """The tenant for which the arbiter is asked: of those without limits one stands for all, so
        that their number does not multiply what the arbiter is asked."""
        if tenant in table.arbiter.tenants:
            return tenant
        self._unlimited = self._unlimited or tenant
        return self._unlimited

    def _begin(self, table: Table) -> "asyncio.Task[None]":
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read(table))
        return self._reading

    async def _read(self, table: Table) -> None:
        now_s = self._clock()
        self._last_use_s = {k: s for k, s in self._last_use_s.items() if now_s - s < FORGOTTEN_S}
        keys = [key for key in self._last_use_s if key.model in table.homes]
        homes = {key.model: table.homes[key.model] for key in keys}
        reads = self._files  # a new table has a dict of its own
        forecasts = dict.fromkeys(keys, UNSEEN)
        try:
            state = await self._state()
            present, times = state.presences(homes), state.times()
            begun = [_begin_files(reads, table, m) for m in homes if m not in reads]
            if begun:
                await asyncio.wait(begun, timeout=FILES_S)
            for key in keys:
                home, reading = homes[key.model], reads.get(key.model)
                files = reading.result() if reading and reading.done() else UNREAD
                took = times.get((home, key.model), NEVER_SEEN)
                presence = present[key.model]
                forecasts[key] = await self._of(home, key.tenant, files, presence, took)
        except ArbiterUnavailable:
            pass  # the ladder's own order counts for what is not predicted
        if table is self._table:
            self._forecasts, self._read_s = forecasts, self._clock()

    async def _of(
        self, home: str, tenant: str, files: "_Files", presence: Presence, times: ModelTimes
    ) -> Forecast:
        """Raises ArbiterUnavailable."""
        by_presence = predict.of_presence(presence.state, presence.estimate_s, times.run_s)
        usual = Forecast(by_presence, files.context, None, times.run_long_s)
        is_coming = presence.state in ("resident", "loading", "queued")
        if (is_coming and presence.estimate_s is not None) or files.plan is None:
            return usual
        question = plan_questions.of_model(home, files.plan, Priority.NORMAL, tenant)
        try:
            plan = await self._plan(question)
        except (UnknownCapability, UnknownModel):  # the arbiter does not have this table yet
            return replace(usual, predicted=NOTHING)
        predicted = predict.of_plan(presence.state, plan, times.load_s, times.run_s)
        return replace(usual, predicted=predicted, never=predict.never(plan))


@dataclass(frozen=True, slots=True)
class _Files:
    """What the files of a model say."""

    context: int | None
    plan: load_plan.ModelPlan | None  # None: they are on another node, or not read yet


UNREAD = _Files(None, None)


def _begin_files(
    reads: "dict[str, asyncio.Future[_Files]]", table: Table, model: str
) -> "asyncio.Future[_Files]":
    capability = table.capabilities[table.homes[model]]
    source = capability.models[model].source
    reads[model] = begun = in_thread(source, _files, model, capability)

    def forget_failed(ended: "asyncio.Future[_Files]") -> None:
        """Drops a read that failed, so that the next reading begins another."""
        if error := ended.exception():
            logger.error("no forecast of a load of %s: its files: %r", model, error)
            del reads[model]

    begun.add_done_callback(forget_failed)
    return begun


def _files(model: str, capability: CapabilityConfig) -> _Files:
    context = model_cards.context(capability.models[model])
    try:
        return _Files(context, load_plan.plan(model, capability))
    except (ConfigError, OSError):
        return _Files(context, None)
