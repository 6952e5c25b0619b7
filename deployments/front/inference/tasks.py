"""Tasks in the front: from a request that names `task:NAME` to its ladder, best rung first.

Names, tenants and adapters count for each rung as for a request that names the rung itself.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arbiter.errors import RequestError, UnknownModel
from deployments import messages
from deployments.config.adapter_names import base_of
from deployments.config.front_section import Profile
from deployments.config.task_section import PREFIX, TaskConfig
from deployments.front.access.keys import Caller
from deployments.front.inference.request import ParsedRequest
from deployments.front.inference.schemas import OF_THE_TABLE, SCHEMAS, Body, Generates
from deployments.front.inference.service import InferenceService
from deployments.front.status.forecasts import UNSEEN, Forecast, Forecasts
from deployments.remotes.offers import Offer
from deployments.requests import prefixes
from deployments.tasks.climb import TaskCall
from deployments.tasks.fit import Needs, needs_of, served_paths, unfit
from deployments.tasks.ladder import Ladder, Rung, RungState, leaves_for, order
from deployments.tasks.predict import REMOTE, Prediction

# How long a ladder waits for the adapter folder of a rung, because all its rungs wait meanwhile.
LOOK_S = 1.0
SHORT = {"role": "user", "content": "?"}  # the message of the request that `explain` supposes


class NoRung(RequestError):
    """No model of a task can have the request: 400, or 503 where one may have it later."""

    code, param = "task_has_no_model", "model"

    def __init__(
        self, task: str, reasons: tuple[str, ...], retry_after_s: float | None = None
    ) -> None:
        super().__init__(task, reasons, retry_after_s)
        self.task, self.reasons, self.retry_after_s = task, reasons, retry_after_s
        self.status_code = 400 if retry_after_s is None else 503

    def __str__(self) -> str:
        return f"no model of {PREFIX}{self.task} can have this request: {'; '.join(self.reasons)}"


def task_of(model: str) -> str | None:
    """The task that a model's name means; None: it means none."""
    return model.removeprefix(PREFIX) if model.startswith(PREFIX) else None


class Tasks:
    """Finds the ladder of a task for a request, and makes the task's call. One per front."""

    def __init__(self, service: InferenceService, forecasts: Forecasts) -> None:
        self._service, self._forecasts = service, forecasts

    def find(self, name: str) -> TaskConfig:
        """Returns the task of that name. Raises UnknownModel with the tasks there are."""
        tasks = self._service.table.tasks
        if name not in tasks:
            raise UnknownModel(PREFIX + name, "", tuple(PREFIX + task for task in sorted(tasks)))
        return tasks[name]

    async def call(self, task: str, request: ParsedRequest, caller: Caller) -> TaskCall:
        """Makes the call of a task, with its ladder in order. Raises UnknownModel, and NoRung where
        no model of it can have the request."""
        config = self.find(task)
        ladder = await self.ladder(config, request, caller)
        if not ladder.rungs:
            reasons = tuple(f"{rung.name}: {rung.why}" for rung in ladder.left_out)
            waits = [w for r in ladder.left_out if (w := r.state.retry_after_s) is not None]
            raise NoRung(task, reasons, min(waits, default=None))

        budget_s = request.checked.x_budget_s or config.budget_s

        async def onward(waiting: str, spent_s: float) -> Rung | None:
            assert budget_s is not None
            left_s = budget_s - spent_s
            now = await self._as_it_is(config, ladder, max(0.0, left_s), caller.tenant)
            return leaves_for(config, waiting, now, left_s)

        async def call_of(name: str) -> messages.InferenceCall:
            call = await self._service.call(request, caller.tenant, caller.scopes, model=name)
            return replace(call, stay_warm_s=max(call.stay_warm_s, config.keep_warm_s))

        watch = None if budget_s is None else onward
        return TaskCall(task, request.request_id, ladder, call_of, request.is_stream, watch)

    async def ladder(self, config: TaskConfig, request: ParsedRequest, caller: Caller) -> Ladder:
        """The rungs for one request, by what was seen last of each model."""
        if request.path == prefixes.PATH:  # a pre-warm is for the model that is preferred
            config = config.model_copy(update={"pin_primary": True})
        remotes = self._service.remotes
        local = {name: base_of(name) for name in config.ladder if not remotes.has(name)}
        forecasts = await self._forecasts.read(
            self._service.table, sorted(set(local.values())), caller.tenant
        )
        generates = isinstance(request.checked, Generates)
        needs = needs_of(request.path, request.fields, generates=generates)

        async def state_of(position: int, name: str) -> RungState:
            if name not in local:
                return _remote(position, remotes.offer(request, name, caller))
            forecast = forecasts.get(local[name], UNSEEN)
            state = RungState(position, name, False, forecast.predicted, forecast.never)
            if forecast.never:
                return state
            return await self._fitted(state, needs, caller.tenant, forecast.context)

        rungs = await asyncio.gather(
            *(state_of(position, name) for position, name in enumerate(config.ladder))
        )
        budget_s = request.checked.x_budget_s or config.budget_s
        return order(config, rungs, budget_s)

    async def _as_it_is(
        self, config: TaskConfig, before: Ladder, budget_s: float, tenant: str
    ) -> Ladder:
        """Orders the rungs of a ladder that was made before by the present forecasts of the models
        here. Whether a request may leave for a remote is not decided again here: that is checked
        when it leaves."""
        every = sorted(
            (rung.state for rung in (*before.rungs, *before.left_out)), key=lambda c: c.position
        )
        local = sorted({base_of(c.name) for c in every if not c.is_remote})
        forecasts = await self._forecasts.read(self._service.table, local, tenant)
        return order(config, [_seen_now(one, forecasts) for one in every], budget_s)

    async def explain(self, task: str, caller: Caller) -> dict[str, Any]:
        """The ladder as it is now for a short request to the primary's first path. Raises
        UnknownModel."""
        config = self.find(task)
        path = self._usual_path(config.ladder[0])
        kind = SCHEMAS.get(path, OF_THE_TABLE).kind
        checked, fields = Body(model=PREFIX + task), {"messages": [SHORT]}
        request = ParsedRequest(path, "explain", {}, b"", fields, checked, Profile(), kind)
        return plain(task, config, await self.ladder(config, request, caller))

    def _usual_path(self, primary: str) -> str:
        table = self._service.table
        home = table.homes.get(base_of(primary))
        paths = served_paths(table.capabilities[home]) if home else frozenset[str]()
        return prefixes.CHAT if not paths or prefixes.CHAT in paths else min(paths)

    async def _fitted(
        self, state: RungState, needs: Needs, tenant: str, context: int | None
    ) -> RungState:
        """Returns the state of a rung, with the reason in it if the rung cannot have such a
        request."""
        table = self._service.table
        try:
            target = await self._service.names.find(state.name, tenant, within_s=LOOK_S)
        except RequestError as error:  # an adapter that is not there or away, or another tenant's
            return replace(state, refused=str(error), retry_after_s=error.retry_after_s)
        capability = table.capabilities[target.capability]
        return replace(state, refused=unfit(needs, target.model, capability, context))


def _seen_now(state: RungState, forecasts: Mapping[str, Forecast]) -> RungState:
    if state.is_remote:
        return state
    forecast = forecasts.get(base_of(state.name), UNSEEN)
    refused = state.refused or forecast.never
    return replace(state, predicted=forecast.predicted, refused=refused)


def _remote(position: int, offer: Offer) -> RungState:
    took_s = offer.seconds if offer.is_allowed else None
    prediction = Prediction(REMOTE, 0.0, 0.0, took_s)
    again_s = None if offer.refusal is None else offer.refusal.retry_after_s
    return RungState(position, offer.model, True, prediction, offer.reason or None, again_s)


def plain(task: str, config: TaskConfig, ladder: Ladder) -> dict[str, Any]:
    """A ladder as JSON, with a sentence for each rung."""
    rows = [*_rows(ladder.rungs, first=1), *_rows(ladder.left_out, first=None)]
    settings = config.model_dump(mode="json", exclude={"ladder"})
    return {"task": task, **settings, "rungs": rows, "sentences": [_sentence(row) for row in rows]}


def _rows(rungs: tuple[Rung, ...], first: int | None) -> list[dict[str, Any]]:
    return [
        {
            "model": rung.name,
            "position": rung.state.position + 1,
            "turn": None if first is None else first + number,
            "is_remote": rung.state.is_remote,
            **_seconds(rung.state.predicted),
            "score_s": round(rung.score_s, 3),
            "why": rung.why,
        }
        for number, rung in enumerate(rungs)
    ]


def _seconds(prediction: Prediction) -> dict[str, Any]:
    return {
        "state": prediction.state,
        "wait_s": prediction.wait_s,
        "load_s": prediction.load_s,
        "run_s": prediction.run_s,
        "total_s": prediction.total_s,
    }


def _sentence(row: Mapping[str, Any]) -> str:
    turn = f"{row['turn']}. {row['model']}" if row["turn"] else f"Left out: {row['model']}"
    return f"{turn} (rung {row['position']}): {row['why']}."
