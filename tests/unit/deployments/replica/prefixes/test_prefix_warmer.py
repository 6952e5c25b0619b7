"""When a replica warms prefixes, against a scripted engine and a clock that is set by hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import Reason, Tier
from arbiter.core.types import Client, Priority
from arbiter.errors import NeverFits
from arbiter.protocol import messages
from arbiter.units import Bytes, TicketId
from deployments.messages import FullResponse, InferenceCall
from deployments.replica.calls.sessions import OPENING_MOST, Sessions
from deployments.replica.prefixes import prefix_warmer
from deployments.requests import prefixes
from deployments.requests.prefixes import DECLARED, PrefixEnd
from tests.support.scripted_holder import (
    ScriptedClient,
    ScriptedEngine,
    holder,
    revoke,
    until,
    use,
)

S = 1_000_000_000
SYSTEM = {"role": "system", "content": "be brief"}
MODEL: dict[str, Any] = {
    "source": "x",
    "need": {"weights": 5, "host": 5},
    "stable_prefixes": [{"system": "be brief"}],
}


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._moved = asyncio.Event()

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, by_s: float) -> None:
        self._now_ns += round(by_s * S)
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait(self, event: asyncio.Event, until_ns: int) -> None:
        while not event.is_set() and self._now_ns < until_ns:
            both = [asyncio.ensure_future(e.wait()) for e in (event, self._moved)]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in both:
                    one.cancel()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    made = HandClock()
    monkeypatch.setattr(prefix_warmer, "CLOCK", made)
    return made


Held = tuple[Any, ScriptedClient, ScriptedEngine]


@asynccontextmanager
async def warming(engine: str = "vllm", **model: Any) -> AsyncIterator[Held]:
    """A holder whose model has a stable prefix."""
    one = {"role": "text", "engine": engine, "models": {"a": {**MODEL, **model}}}
    async with holder() as (residency, arbiter, child):
        residency._on_command(messages.ConfigChanged({"capabilities": {"c": one}}))
        yield residency, arbiter, child


def told(arbiter: ScriptedClient) -> list[ev.Prewarmed]:
    return [event for event in arbiter.told if isinstance(event, ev.Prewarmed)]


async def settle(condition: Callable[[], object]) -> None:
    await until(condition)


def call(path: str = prefixes.PATH, cut: PrefixEnd | None = None, **chat: Any) -> InferenceCall:
    chat = {"model": "a", "messages": [SYSTEM], **chat}
    body = json.dumps(chat).encode()
    return InferenceCall(path, body, {}, "req-1", "a", client_id="cli", stable=cut)


async def no_more() -> None:
    """Lets everything run that can."""
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.mark.spec("G1")
async def test_load_warms_the_declared_prefix_once_under_its_fixed_id(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, engine):
        await use(residency)
        await settle(lambda: told(arbiter))
        await use(residency)
        [event] = told(arbiter)
        assert (event.prefix, event.cause, event.outcome) == (DECLARED, "load", "warmed")
        assert (event.ticket, event.prompt_tokens_count) == (arbiter.asked[0], 300)
        assert [body["messages"] for body in engine.prewarms] == [[SYSTEM]]


@pytest.mark.spec("G1", "G5")
async def test_sweep_warms_again_after_four_minutes_without_a_use_and_not_after_a_use(
    clock: HandClock,
) -> None:
    async with warming() as (residency, arbiter, engine):
        await use(residency)
        await settle(lambda: len(told(arbiter)) == 1)
        clock.advance(240)
        await settle(lambda: len(told(arbiter)) == 2)
        assert told(arbiter)[1].cause == "sweep"
        clock.advance(200)
        cut = PrefixEnd(1, key=residency.models["a"].plan.prefixes[0].key)
        async with residency.use("a") as open_use:
            open_use.note_stable_prefix(cut, b"", "default")
        clock.advance(40)
        await no_more()
        assert len(engine.prewarms) == 2
        clock.advance(240)
        await settle(lambda: len(told(arbiter)) == 3)


@pytest.mark.spec("G5")
async def test_interval_of_the_sweep_is_configured(clock: HandClock) -> None:
    async with warming(rewarm_s=600) as (residency, arbiter, engine):
        await use(residency)
        await settle(lambda: len(told(arbiter)) == 1)
        clock.advance(599)
        await no_more()
        assert len(engine.prewarms) == 1
        clock.advance(1)
        await settle(lambda: len(told(arbiter)) == 2)


@pytest.mark.spec("G5", "D1")
async def test_sweep_neither_loads_a_model_nor_wakes_an_asleep_one(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, engine):
        await use(residency)
        await settle(lambda: told(arbiter))
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await settle(lambda: "Slept" in arbiter.kinds())
        clock.advance(1_000)
        await no_more()
        assert len(engine.prewarms) == 1 and "/control/wake" not in engine.acts
        revoke(residency, Reason.SWAP)
        await use(residency)  # a wake is a load of its own: the cache was emptied
        await settle(lambda: len(told(arbiter)) == 2)
        assert told(arbiter)[1].cause == "load"


@pytest.mark.spec("G5", "H0")
async def test_prewarmed_model_counts_as_idle_since_its_last_request(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, engine):
        await use(residency)
        held = residency.models["a"]
        ended_ns, served = held.requests.last_end_ns, held.requests.served_count
        engine.warms.clear()
        await settle(lambda: engine.prewarms)
        assert held.heartbeat_entry().inflight == 0 and held.heartbeat_entry().idle >= 0
        engine.warms.set()
        await settle(lambda: told(arbiter))
        assert (held.requests.last_end_ns, held.requests.served_count) == (ended_ns, served)


@pytest.mark.spec("G6")
async def test_prewarm_is_in_no_account(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, _):
        await use(residency)
        await settle(lambda: told(arbiter))
        assert [usage.requests_count for usage in arbiter.request_log.usage()] == [1]


@pytest.mark.spec("G6")
async def test_prewarm_waits_for_requests_and_ends_when_one_comes(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, engine):
        engine.warms.clear()
        async with residency.use("a"):
            await no_more()
            assert engine.prewarms == []
        await settle(lambda: len(engine.prewarms) == 1)
        async with residency.use("a"):
            await residency.models["a"].warmer.settled()
            assert told(arbiter) == []
        engine.warms.set()
        await settle(lambda: told(arbiter))
        assert len(engine.prewarms) == 2  # once more, when the engine was idle again


@pytest.mark.spec("G6")
async def test_revoke_does_not_wait_for_a_prewarm(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, engine):
        engine.warms.clear()
        await use(residency)
        await settle(lambda: engine.prewarms)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await settle(lambda: "Slept" in arbiter.kinds())
        assert told(arbiter) == []


@pytest.mark.spec("G6")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((500, {"error": {"message": "no memory"}}), "the engine answered 500: no memory"),
        ((500, {}), "the engine answered 500: no form that it may have"),
        ((200, [1]), "the engine answered 200: no form that it may have"),
    ],
)
async def test_failure_is_an_event_and_is_not_repeated(
    clock: HandClock, answer: tuple[int, Any], says: str
) -> None:
    async with warming() as (residency, arbiter, engine):
        engine.warmed = answer
        await use(residency)
        await settle(lambda: told(arbiter))
        assert told(arbiter)[0].outcome == says
        for _ in range(5):
            clock.advance(240)
            await no_more()
        residency._on_command(messages.PrewarmCommand(residency.models["a"].ticket))
        await no_more()
        assert len(engine.prewarms) == 1
        assert await use(residency) == arbiter.asked[0]  # and requests are served as ever


@pytest.mark.spec("G6")
@pytest.mark.parametrize(
    "answer",
    [(200, {"skipped": "prefix caching is off", "has_no_cache": True}), (404, {})],
)
async def test_engine_without_a_prefix_cache_is_asked_once_and_is_no_event(
    clock: HandClock, answer: tuple[int, Any]
) -> None:
    async with warming() as (residency, arbiter, engine):
        engine.warmed = answer
        await use(residency)
        await settle(lambda: not residency.models["a"].warmer._has_cache)
        clock.advance(1_000)
        await no_more()
        assert len(engine.prewarms) == 1 and told(arbiter) == []


@pytest.mark.spec("G6")
async def test_engine_that_knows_no_prewarm_is_never_asked(clock: HandClock) -> None:
    async with warming(engine="silero") as (residency, arbiter, engine):
        await use(residency)
        sessions = Sessions(residency, _nothing)
        assert sessions.open(call()).head.status == 202
        await settle(lambda: len(arbiter.request_log.untold()[0]) == 2)
        await no_more()
        assert engine.prewarms == [] and told(arbiter) == []


@pytest.mark.spec("G1")
async def test_speech_warms_what_is_known_of_its_own_ticket(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, _):
        await use(residency)
        await settle(lambda: len(told(arbiter)) == 1)
        command = messages.PrewarmCommand(residency.models["a"].ticket)
        residency._on_command(command)
        await settle(lambda: len(told(arbiter)) == 2)
        assert told(arbiter)[1].cause == "speech"
        residency._on_command(messages.PrewarmCommand(TicketId("another")))


@pytest.mark.spec("G1")
async def test_session_loads_the_model_as_batch_work_and_warms_its_own_prefix(
    clock: HandClock,
) -> None:
    async with warming() as (residency, arbiter, engine):
        clock.advance(1)
        sessions = Sessions(residency, _nothing)
        more = [SYSTEM, {"role": "user", "content": "a manual"}]
        said = sessions.open(call(cut=PrefixEnd(2, key="k"), messages=more))
        assert json.loads(said.body) == {
            "object": "prewarm",
            "id": "req-1",
            "model": "a",
            "state": "cold",
        }
        await settle(lambda: len(told(arbiter)) == 2)
        assert [r.priority for r in arbiter.requests] == [Priority.BATCH]
        causes = [(e.prefix, e.cause) for e in told(arbiter)]
        assert causes == [("k", "session"), (DECLARED, "load")]
        assert engine.prewarms[0]["messages"] == more
        [usage] = arbiter.request_log.usage()
        assert (usage.client, usage.requests_count) == (Client("default", "cli"), 1)


@pytest.mark.spec("G1", "G5")
async def test_prefix_of_a_request_is_warmed_by_the_sweep_and_not_by_itself(
    clock: HandClock,
) -> None:
    async with warming(stable_prefixes=[]) as (residency, arbiter, engine):
        of_request = call(cut=PrefixEnd(1, key="k"))
        async with residency.use("a") as open_use:
            open_use.note_stable_prefix(of_request.stable, of_request.body, "acme")
        await no_more()
        assert engine.prewarms == []
        clock.advance(240)
        await settle(lambda: told(arbiter))
        assert (told(arbiter)[0].prefix, told(arbiter)[0].cause) == ("k", "sweep")


@pytest.mark.spec("G5", "E6")
async def test_removed_tenants_prefix_is_warmed_no_more(clock: HandClock) -> None:
    async with warming(stable_prefixes=[]) as (residency, arbiter, _):
        for key, tenant in (("k", "acme"), ("l", "other")):
            of_request = call(cut=PrefixEnd(1, key=key))
            async with residency.use("a") as open_use:
                open_use.note_stable_prefix(of_request.stable, of_request.body, tenant)
        residency._on_command(messages.ForgetTenantCommand("acme"))
        clock.advance(240)
        await settle(lambda: told(arbiter))
        await no_more()
        assert [event.prefix for event in told(arbiter)] == ["l"]


@pytest.mark.spec("E6", "G1")
async def test_request_that_came_before_its_tenant_was_removed_leaves_no_prefix(
    clock: HandClock,
) -> None:
    async with warming(stable_prefixes=[]) as (residency, arbiter, _):
        for key in ("old", "new"):
            of_request = call(cut=PrefixEnd(1, key=key))
            async with residency.use("a") as open_use:
                if key == "old":
                    residency._on_command(messages.ForgetTenantCommand("acme"))
                open_use.note_stable_prefix(of_request.stable, of_request.body, "acme")
        clock.advance(240)
        await settle(lambda: told(arbiter))
        await no_more()
        assert [event.prefix for event in told(arbiter)] == ["new"], "it has come again"


@pytest.mark.spec("G1", "L3")
async def test_prefix_larger_than_any_context_is_not_kept(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with warming(stable_prefixes=[]) as (residency, arbiter, engine):
        monkeypatch.setattr(prefix_warmer, "PREFIX_MOST_BYTES", 1_000)
        for key, words in (("large", 1_000), ("small", 1)):
            told_of = {"role": "system", "content": "x" * words}
            of_request = call(cut=PrefixEnd(1, key=key), messages=[told_of])
            Sessions(residency, _nothing).open(of_request)
            async with residency.use("a") as open_use:
                open_use.note_stable_prefix(of_request.stable, of_request.body, "default")
        await settle(lambda: told(arbiter))
        await no_more()
        assert [event.prefix for event in told(arbiter)] == ["small"]
        assert len(engine.prewarms) == 1


@pytest.mark.spec("G1", "L3")
async def test_prefix_that_is_too_large_is_read_once(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def noted(chat: Any, cut: PrefixEnd, tenant: str) -> prefixes.Prefix:
        read.append(cut.key)
        return prefixes.prefix_of(chat, cut, tenant)

    seam = SimpleNamespace(**vars(prefixes) | {"prefix_of": noted})
    monkeypatch.setattr(prefix_warmer, "prefixes", seam)
    monkeypatch.setattr(prefix_warmer, "PREFIX_MOST_BYTES", 1_000)
    async with warming(stable_prefixes=[]) as (residency, _, engine):
        large = call(
            cut=PrefixEnd(1, key="large"), messages=[{"role": "system", "content": "x" * 1_000}]
        )

        async def use_it() -> None:
            async with residency.use("a") as open_use:
                open_use.note_stable_prefix(large.stable, large.body, "acme")
                open_use.warm_for_session(large.stable, large.body, "acme")

        for _ in range(3):
            await use_it()
        assert read == ["large"]
        residency._on_command(messages.ForgetTenantCommand("acme"))
        await use_it()
        assert read == ["large", "large"], "nothing of a removed tenant's is kept"
        assert engine.prewarms == []


@pytest.mark.spec("G6")
async def test_session_whose_model_is_refused_is_an_event_and_no_more(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, engine):
        arbiter.grants_at_once = False
        sessions = Sessions(residency, _nothing)
        sessions.open(call())
        await settle(lambda: arbiter.requests)
        refused = NeverFits(TicketId("t"), Bytes(9), Bytes(5))
        arbiter.says("a", refused)
        await settle(lambda: told(arbiter))
        [event] = told(arbiter)
        assert (event.ticket, event.prefix, event.outcome) == (None, DECLARED, str(refused))
        await no_more()
        assert len(arbiter.requests) == 1 and engine.prewarms == []


@pytest.mark.spec("C7")
async def test_sessions_that_wait_for_a_model_are_bounded(clock: HandClock) -> None:
    async with warming() as (residency, arbiter, _):
        arbiter.grants_at_once = False
        sessions = Sessions(residency, _nothing)
        answers: list[FullResponse] = [sessions.open(call()) for _ in range(OPENING_MOST + 1)]
        assert [said.head.status for said in answers[-2:]] == [202, 429]
        await sessions.close()


@pytest.mark.spec("C7", "G6")
async def test_session_whose_adapter_does_not_come_in_time_is_an_event_and_holds_no_place(
    clock: HandClock,
) -> None:
    async with warming(stable_prefixes=[]) as (residency, arbiter, engine):
        await use(residency)
        sessions = Sessions(residency, _never)
        sessions.open(replace(call(), deadline_s=0.01))
        await settle(lambda: told(arbiter))
        assert "was not ready" in told(arbiter)[0].outcome and engine.prewarms == []
        await settle(lambda: not sessions._opening.running)


async def _nothing(*_: Any) -> None: ...


async def _never(*_: Any) -> None:
    await asyncio.Event().wait()
