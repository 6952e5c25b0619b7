"""Remotes: which remote models a caller may use for a request, at what price, and the use.

    remotes = Remotes(); remotes.configure(table.remotes)
    offer = remotes.offer(asked, "cloud-chat", caller)     # opens no connection
    if offer.is_allowed: ...                               # else offer.reason, without a prompt
    call = remotes.call(asked, "cloud-chat", caller)       # raises offer.refusal
    async with aclosing(remotes.run(call)) as parts: ...   # as of a capability

`run` raises a RequestError before its first part or after it; before it another model may take
over. Each run is reserved in the tenant's budget and written to the event log by the arbiter before
anything leaves; without the arbiter nothing does.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arbiter.errors import ArbiterUnavailable, RequestError, UnknownModel
from arbiter.protocol.egress_budget import MILLION
from arbiter.protocol.messages import Egress, EgressEnd
from arbiter.units import Bytes, seconds
from deployments import messages
from deployments.config.remotes_section import RemoteConfig, RemoteModel, RemotesConfig
from deployments.front.access.keys import Caller, Scope
from deployments.front.inference.request import ParsedRequest
from deployments.remotes.body import KNOWN, RebuiltBody, rebuild
from deployments.remotes.breaker import Breaker, Failure
from deployments.remotes.offers import Offer, RemoteCall, RemoteFailed, RemoteRefused
from deployments.remotes.privacy import Secrets
from deployments.remotes.spending import ArbiterBook, Book, Spending
from deployments.replica.background import BackgroundTasks

if TYPE_CHECKING:
    import aiohttp

    from deployments.remotes.exchange import Exchange

logger = logging.getLogger("ray.serve")
Parts = AsyncGenerator[messages.Part, None]

# Weight of the newest answer in the estimated seconds of the next, as TCP weighs round-trip times.
NEWEST_WEIGHT = 1 / 8
# When to come back to a remote with as many requests under way as its bounds allow: one of them may
# have ended.
FULL_RETRY_S = 1.0
# Ends of requests that are kept to be told while no arbiter answers, some hundred bytes each. Ends
# of requests that left are always kept, and are no more than may be under way. Beyond this number
# the end of a request that did not leave is dropped, and its price stays reserved.
MOST_UNTOLD = 1_000
CLOSE_S = 10.0  # an arbiter that restarts is back by then


@dataclass(slots=True)
class _State:
    """What is known of one remote; it outlives a change of the table."""

    breaker: Breaker
    in_flight: int = 0
    seconds_of: dict[str, float] = field(default_factory=dict)  # by model: those of an answer


class Remotes:
    """One per front."""

    def __init__(
        self,
        book: Book | None = None,
        resolver: "Callable[[], aiohttp.abc.AbstractResolver] | None" = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`book`: absent: the arbiter. `resolver`: makes one for a request; absent: the
        system's."""
        self._spending = Spending(book or ArbiterBook())
        self._resolver, self._now_s = resolver, now_s
        self._states: dict[str, _State] = {}
        self.background = BackgroundTasks()
        self.configure(RemotesConfig())

    def configure(self, config: RemotesConfig) -> None:
        """Takes a table, which holds from the next offer, call and run on."""
        if config.rows:
            # aiohttp comes with it, whose import takes 0.3 s: a front without remotes does without,
            # and before its first ones the front has imported it (ingress.py).
            from deployments.remotes import exchange  # noqa: F401
        self._config, self._homes = config, config.homes
        self._secrets = Secrets(config.secrets) if config.rows else None

    def has(self, model: str) -> bool:
        return model in self._homes

    def names(self, caller: Caller) -> list[str]:
        """The names of the models that this caller may use."""
        is_open = not self._config.nothing_leaves and Scope.CLOUD in caller.scopes
        return sorted(self._homes) if is_open else []

    def model(self, name: str) -> tuple[str, RemoteModel]:
        """Its remote and its row. Raises UnknownModel."""
        remote = self._homes.get(name)
        if remote is None:
            raise UnknownModel(name, "", tuple(sorted(self._homes)))
        return remote, self._config.rows[remote].models[name]

    @property
    def nothing_leaves(self) -> bool:
        return self._config.nothing_leaves

    def rows(self) -> list[dict[str, Any]]:
        """How each remote is, in plain values."""
        rows = []
        for name, row in sorted(self._config.rows.items()):
            state = self._state(name)
            cause = str(state.breaker.cause) if state.breaker.left_s else None
            rows.append(
                {
                    "remote": name,
                    "models": sorted(row.models),
                    "in_flight": state.in_flight,
                    "cools_down_s": state.breaker.left_s,
                    "cause": cause,
                }
            )
        return rows

    # -- may it leave? -------------------------------------------------------------------------

    def offer(self, request: ParsedRequest, name: str, caller: Caller) -> Offer:
        """Says whether a request may leave for a model of a remote, at which price, and when it
        would be answered; else why not. Raises UnknownModel."""
        remote, model = self.model(name)
        try:
            new = self._checked_body(request, name, caller)
            call = self._new_call(request, name, caller, new)
            self._check_now(call)
            if error := self._spending.refusal(self._egress(call)):
                raise error
        except RequestError as error:
            return Offer(name, remote, error)
        tokens, money = _dearest(call, model)
        return Offer(name, remote, None, tokens, money / MILLION, self._seconds(call, model))

    def call(self, request: ParsedRequest, name: str, caller: Caller) -> RemoteCall:
        """The call that may leave. Raises UnknownModel, and the refusal of its offer but for the
        budget's, which `run` has from the arbiter itself."""
        call = self._new_call(request, name, caller, self._checked_body(request, name, caller))
        self._check_now(call)
        return call

    def _checked_body(self, request: ParsedRequest, name: str, caller: Caller) -> RebuiltBody:
        """What would leave. Raises RequestError."""
        remote, model = self.model(name)
        self._check_switch()
        if Scope.CLOUD not in caller.scopes:
            message = f"{name} is on another machine; the key needs the scope `cloud`"
            raise RemoteRefused(403, "scope_missing", message)
        if request.is_local_only:
            raise RemoteRefused(403, "local_only", f"{name} is remote, and `x_local_only` is set")
        if request.path not in model.paths or request.path not in KNOWN or request.fields is None:
            raise messages.NotServedHere(name, request.path, model.paths)
        new = rebuild(request.path, {**request.profile.defaults, **request.fields}, model)
        if too_many := sorted(new.inputs - set(model.inputs)):
            message = f"{too_many[0]} does not leave for {name}; its `inputs` have {model.inputs}"
            raise RemoteRefused(400, "modality_stays", message)
        most_bytes = self._config.rows[remote].bounds.request_bytes
        if len(new.raw) > most_bytes:
            message = f"the request has {len(new.raw)} bytes; {remote} is sent {most_bytes} at most"
            raise RemoteRefused(413, "too_large_for_remote", message)
        assert self._secrets is not None, "there is a row"
        if secret := self._secrets.found(new.texts):
            raise RemoteRefused(403, "secret_stays", f"the request has {secret}, so it stays here")
        return new

    def _new_call(
        self, request: ParsedRequest, name: str, caller: Caller, new: RebuiltBody
    ) -> RemoteCall:
        return RemoteCall(
            request.path,
            new.raw,
            {},
            request.request_id,
            name,
            request.checked.x_deadline_s or request.profile.deadline_s,
            tenant=caller.tenant,
            served=name,
            remote=self._homes[name],
            prompt_tokens=new.prompt_tokens,
            answer_tokens=new.answer_tokens,
            is_stream=new.fields.get("stream", False),
            tells_usage=new.tells_usage,
        )

    def _check_switch(self) -> None:
        if self._config.nothing_leaves:
            message = "nothing leaves this machine (`remotes.nothing_leaves`)"
            raise RemoteRefused(403, "nothing_leaves", message)

    def _check_table(self, call: RemoteCall) -> None:
        """Raises RemoteRefused, UnknownModel where the table as it is now keeps the call here."""
        self._check_switch()
        if self._homes.get(call.model) != call.remote:
            raise UnknownModel(call.model, "", tuple(sorted(self._homes)))

    def _check_now(self, call: RemoteCall) -> None:
        """What may have changed since the call was made. Raises RequestError."""
        self._check_table(call)
        row, state = self._config.rows[call.remote], self._state(call.remote)
        if left_s := state.breaker.left_s:
            message = f"{call.remote} failed ({state.breaker.cause}); next try in {left_s:.0f} s"
            raise RemoteRefused(503, "remote_cooling_down", message, left_s)
        if state.in_flight >= row.bounds.in_flight:
            message = f"{call.remote} has {state.in_flight} requests under way, as many as it may"
            raise RemoteRefused(429, "remote_full", message, FULL_RETRY_S)

    # -- the use -------------------------------------------------------------------------------

    async def run(self, call: RemoteCall) -> Parts:
        """Raises RequestError. Closing it closes the connection."""
        self._check_now(call)
        if call.deadline_s is not None and call.deadline_s <= 0:  # to aiohttp it were no bound
            message = f"the request's deadline was over before it left for {call.remote}"
            raise RemoteRefused(504, "deadline_unmet", message)
        state = self._state(call.remote)
        state.in_flight += 1
        tries = state.breaker.begin()
        try:
            egress = self._egress(call)
            await self._reserve(call, egress)
            async with aclosing(self._settled(call, egress, state)) as parts:
                async for part in parts:
                    yield part
        finally:
            state.in_flight -= 1
            if tries:
                state.breaker.abandoned()

    async def _reserve(self, call: RemoteCall, egress: Egress) -> None:
        """Reserves the price of a request that is about to leave. Where it is unknown whether the
        arbiter has reserved it, and where the table has changed meanwhile, the request is settled
        as unsent. Raises RequestError."""
        try:
            await self._spending.reserve(egress)
            self._check_table(call)
        except (ArbiterUnavailable, RemoteRefused, UnknownModel, asyncio.CancelledError):
            if len(self.background.running) < MOST_UNTOLD:
                nothing = EgressEnd(egress, "unsent", Bytes(0), 0, 0, 0, seconds(0))
                self.background.begin(self._spending.settle(nothing))
            raise

    async def _settled(self, call: RemoteCall, egress: Egress, state: _State) -> Parts:
        """Runs the exchange, and tells its end to breaker and arbiter, however it ended."""
        from deployments.remotes.exchange import Exchange, Failed, Refused

        began_s, outcome = self._now_s(), "left"  # what it stays where the client leaves
        row = self._row_for(call)
        exchange = Exchange(row, call, self._resolver() if self._resolver else None)
        try:
            async with aclosing(exchange.parts()) as parts:
                async for part in parts:
                    if exchange.is_whole:  # noted before the last part, at which a reader may stop
                        outcome = "answered"
                        state.breaker.answered()
                        self._note_seconds(call.model, self._now_s() - began_s, state)
                    yield part
        except Failed as error:
            outcome = error.failure.value
            if error.failure is Failure.TIMEOUT and self._is_hasty(call, began_s):
                message = f"{call.remote} had not answered at the request's deadline"
                raise RemoteRefused(504, "deadline_unmet", message) from error
            state.breaker.failed(error.failure, error.retry_after_s)
            left_s = state.breaker.left_s
            raise RemoteFailed(call.remote, outcome, error.why, left_s or 1.0) from error
        except Refused as error:
            outcome = "refused"
            state.breaker.answered()
            message = f"{call.remote} refused the request with the status {error.status}"
            raise RemoteRefused(400, "remote_refused", message) from error
        finally:
            took_s = self._now_s() - began_s
            end = _end(egress, exchange, row, outcome, took_s)
            self.background.begin(self._spending.settle(end))

    async def close(self) -> None:
        """Returns when every end is told, after `CLOSE_S` at most: others stay reserved."""
        if telling := set(self.background.running):
            await asyncio.wait(telling, timeout=CLOSE_S)

    def _is_hasty(self, call: RemoteCall, began_s: float) -> bool:
        """Whether the client's deadline, not a bound of the table, has ended the exchange. Then it
        is no failure of the remote, which would count for all tenants."""
        return call.deadline_s is not None and self._now_s() - began_s >= call.deadline_s

    def _row_for(self, call: RemoteCall) -> RemoteConfig:
        """Returns the row of the call's remote, with the deadline of the call as a bound."""
        row = self._config.rows[call.remote]
        if call.deadline_s is None or call.deadline_s >= row.bounds.total_s:
            return row
        bounds = row.bounds.model_copy(update={"total_s": call.deadline_s})
        return row.model_copy(update={"bounds": bounds})

    def _egress(self, call: RemoteCall) -> Egress:
        row = self._config.rows[call.remote]
        budget = row.budget_of(call.tenant)
        tokens, micros = _dearest(call, row.models[call.model])
        return Egress(
            f"egress-{secrets.token_hex(8)}",
            call.remote,
            call.model,
            call.tenant,
            Bytes(len(call.body)),
            tokens,
            micros,
            budget.tokens,
            budget.micros,
        )

    def _state(self, remote: str) -> _State:
        if remote not in self._states:
            self._states[remote] = _State(Breaker(self._now_s))
        return self._states[remote]

    def _seconds(self, call: RemoteCall, model: RemoteModel) -> float:
        """Estimates the seconds of an answer of the usual length, or of the longest where none was
        seen."""
        times = self._state(call.remote).seconds_of.get(call.model)
        return times or model.first_token_s + call.answer_tokens / model.tokens_per_s

    def _note_seconds(self, model: str, took_s: float, state: _State) -> None:
        before_s = state.seconds_of.get(model, took_s)
        state.seconds_of[model] = before_s + NEWEST_WEIGHT * (took_s - before_s)


def _dearest(call: RemoteCall, model: RemoteModel) -> tuple[int, int]:
    """Returns the most that a call may cost: tokens, and millionths of the currency."""
    tokens = call.prompt_tokens + call.answer_tokens
    return tokens, model.micros(call.prompt_tokens, call.answer_tokens)


def _end(
    egress: Egress, exchange: "Exchange", row: RemoteConfig, outcome: str, took_s: float
) -> EgressEnd:
    prompt, answer = exchange.prompt_tokens, exchange.answer_tokens
    micros = row.models[egress.model].micros(prompt, answer)
    size, took = Bytes(exchange.answer_bytes), seconds(took_s)
    return EgressEnd(egress, outcome, size, prompt, answer, micros, took)
