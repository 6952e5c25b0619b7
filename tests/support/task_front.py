"""Stands behind a front in tests of tasks: an arbiter that says what a test gives it, and engines
that answer with the name of their model."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from arbiter.core.reports.plan import PlanQuestion
from arbiter.errors import ArbiterUnavailable, EngineLost, UnknownModel
from arbiter.units import TicketId
from deployments import messages
from deployments.front.inference.service import Send
from deployments.front.status.arbiter_gateway import ArbiterState, typed
from deployments.front.status.forecasts import Forecasts
from deployments.messages import FullResponse, InferenceCall, ResponseHead
from tests.support.speaker import Response

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}]}
COLD = {"wait_s": 0.0, "load_s": 8.0}


@dataclass
class ScriptedArbiter:
    """Counts what it is asked, on a clock that the test moves."""

    resident: tuple[str, ...] = ("warm",)
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    now_s: float = 100.0
    states_count: int = 0
    planned: list[str] = field(default_factory=list)
    planned_for: list[str] = field(default_factory=list)  # the tenants of these
    over_quota: tuple[str, ...] = ()  # tenants for which nothing is loaded
    away: bool = False
    gate: asyncio.Event | None = None

    async def state(self) -> ArbiterState:
        self.states_count += 1
        if self.gate:
            await self.gate.wait()
        if self.away:
            raise ArbiterUnavailable(1.0)
        row = {"capability": "chat", "in_state_s": 1.0, "charged_bytes": {}, "ram_bytes": 0}
        tickets = [
            row | {"ticket": m, "model": m, "state": "resident", "lease": None}
            for m in self.resident
        ]
        took = {"capability": "chat", "model": "warm", "load_s": 4.0, "wake_s": None}
        times = [took | {"run_s": 0.5, "run_long_s": 2.0}]
        empty: Any = {"queue": [], "cooldowns": [], "hours": [], "floors": []}
        return typed(empty | {"tickets": tickets, "load_times": times})

    async def plan(self, question: PlanQuestion) -> Mapping[str, Any]:
        self.planned.append(question.model)
        self.planned_for.append(question.client.tenant)
        if question.model not in self.plans:
            raise UnknownModel(question.model, "chat", ())
        usual = {"is_resident": False, "starts_replica": False, "answer": "now", "sentences": []}
        if (tenant := question.client.tenant) in self.over_quota:
            never = {"wait_s": None, "load_s": 0.0, "sentences": [f"{tenant} is over its quota."]}
            return usual | never | {"answer": "never"}
        return usual | self.plans[question.model]

    def forecasts(self) -> Forecasts:
        return Forecasts(self.state, self.plan, lambda: self.now_s)


class Engines:
    """Answers with the model's name; those in `lost` have died."""

    def __init__(self) -> None:
        self.calls: list[InferenceCall] = []
        self.lost: set[str] = set()

    def send_of(self, capability: str) -> Send:
        return self.send

    def send(self, call: InferenceCall) -> Response:
        self.calls.append(call)
        if call.model in self.lost:
            lost = EngineLost(call.model, TicketId("t"))
            return Response(FullResponse(*messages.refusal(lost)))
        model = json.loads(call.body)["model"]
        choice = {"message": {"role": "assistant", "content": "I do."}, "finish_reason": "stop"}
        said = {"model": model, "choices": [choice], "usage": {}}
        return Response(FullResponse(ResponseHead(200, {}), json.dumps(said).encode()))
