"""What a replica lets out when its engine dies: an error where nothing useful was sent, the last
event of a stream where something was.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace, TracebackType

import pytest

from arbiter.core.types import Priority
from arbiter.errors import EngineLost, RolePinned, TicketClosed
from arbiter.units import NodeId, TicketId
from deployments import messages
from deployments.engines.protocol import COULD_GROW
from deployments.replica import capability
from deployments.replica.calls import stream_batching
from deployments.replica.calls.stream_batching import StreamBatching
from deployments.replica.capability import Capability
from deployments.replica.held_model import HolderState
from deployments.replica.use import Use

JSON = messages.ResponseHead(200, {"content-type": "application/json"})
SSE = messages.ResponseHead(200, {"content-type": "text/event-stream; charset=utf-8"})
LOST = EngineLost("m", TicketId("t"))
PINNED = RolePinned("m", "chat", NodeId("n"), "other")
CALL = messages.InferenceCall("/v1/thing", b"{}", {}, "req-1", "m")


class DyingEngine:
    """Sends a head and one piece, then is gone. Stands for a Residency and its Use."""

    ticket, predicted_s = TicketId("t"), 0.0

    def __init__(self, head: messages.ResponseHead) -> None:
        self.head, self.begun_count, self.ended_count = head, 0, 0

    def use(self, model: str, **how: object) -> "DyingEngine":
        return self

    async def __aenter__(self) -> "DyingEngine":
        self.begun_count += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.ended_count += 1

    async def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[messages.ResponseHead | bytes, None]:
        yield self.head
        yield b"data: 1\n\n"
        raise LOST


class ExampleCapability(Capability):
    paths = frozenset({"/v1/thing"})

    def __init__(self, engine: "DyingEngine") -> None:
        self._stream_batching = StreamBatching()
        self._residency = engine  # type: ignore[assignment]

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing was started."""


async def test_error_within_a_stream_is_its_last_event() -> None:
    head, first, last = [part async for part in ExampleCapability(DyingEngine(SSE)).handle(CALL)]
    assert (head, first) == (SSE, b"data: 1\n\n")
    assert isinstance(last, bytes)
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_lost"


async def test_error_outside_a_stream_is_raised_for_the_front_to_retry() -> None:
    got: list[messages.Part] = []
    with pytest.raises(EngineLost):
        async for part in ExampleCapability(DyingEngine(JSON)).handle(CALL):
            got.append(part)
    assert got == []


class AttentiveEngine(DyingEngine):
    """Keeps what it was told in headers."""

    told: dict[str, str]

    async def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[messages.ResponseHead | bytes, None]:
        self.told = headers
        yield self.head


@pytest.mark.spec("F6")
async def test_engine_is_told_the_priority_and_what_is_left_of_the_deadline() -> None:
    engine = AttentiveEngine(JSON)
    lies = {messages.PRIORITY_HEADER: "1", messages.DEADLINE_HEADER: "9999"}
    urgent = replace(CALL, priority=Priority.HIGH, deadline_s=9.0, headers={"a": "b"} | lies)
    assert [part async for part in ExampleCapability(engine).handle(urgent)]
    left = float(engine.told.pop(messages.DEADLINE_HEADER))
    assert 0 < left <= 9.0
    assert engine.told == {"a": "b", messages.PRIORITY_HEADER: "5"}
    assert [part async for part in ExampleCapability(engine).handle(CALL)]
    assert engine.told == {messages.PRIORITY_HEADER: "10"}


@pytest.mark.spec("J2")
async def test_call_with_a_deadline_is_told_first_that_a_replica_has_it() -> None:
    due = replace(CALL, deadline_s=9.0)
    first, whole = [part async for part in ExampleCapability(AttentiveEngine(JSON)).handle(due)]
    assert first == messages.TAKEN and isinstance(whole, messages.FullResponse)
    [whole] = [part async for part in ExampleCapability(AttentiveEngine(JSON)).handle(CALL)]
    assert isinstance(whole, messages.FullResponse)


class SlowEngine(AttentiveEngine):
    """Is resident, and answers when the test lets it."""

    def __init__(self, head: messages.ResponseHead) -> None:
        super().__init__(head)
        self.models = {"m": SimpleNamespace(state=HolderState.RESIDENT)}
        self.may_answer = asyncio.Event()

    async def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[messages.ResponseHead | bytes, None]:
        await self.may_answer.wait()
        yield self.head


@pytest.mark.spec("J3")
@pytest.mark.parametrize("head", [SSE, JSON], ids=["stream", "whole"])
async def test_client_of_a_resident_model_that_answers_slowly_is_told_that_it_runs(
    head: messages.ResponseHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_batching, "SLOW_S", 0.001)
    engine = SlowEngine(head)
    said = ExampleCapability(engine).handle(replace(CALL, wants_progress=True))
    async with asyncio.timeout(60):
        assert await anext(said) == messages.RUNNING
        engine.may_answer.set()
        assert len([part async for part in said]) == 1
        silent = [part async for part in ExampleCapability(engine).handle(CALL)]
    assert not any(isinstance(part, messages.Progress) for part in silent)


@pytest.mark.spec("J3")
async def test_resident_model_that_answers_at_once_sends_no_progress() -> None:
    engine = SlowEngine(SSE)
    engine.may_answer.set()
    call = replace(CALL, wants_progress=True)
    assert [part async for part in ExampleCapability(engine).handle(call)] == [SSE]


class FetchingCapability(ExampleCapability):
    """Fetches what never comes."""

    async def prepare(self, call: messages.InferenceCall, use: Use) -> None:
        await asyncio.Event().wait()


@pytest.mark.spec("A21", "F6")
async def test_deadline_ends_the_wait_for_what_a_call_needs_besides_its_model() -> None:
    late, engine = replace(CALL, deadline_s=0.0), AttentiveEngine(JSON)
    async with asyncio.timeout(60):
        _, said = [part async for part in FetchingCapability(engine).handle(late)]
    assert engine.begun_count == engine.ended_count == 1, "its use is released"
    assert isinstance(said, messages.FullResponse)
    assert (said.head.status, json.loads(said.body)["error"]["code"]) == (503, "deadline_unmet")


@pytest.mark.spec("J3")
async def test_client_of_a_resident_model_is_told_while_what_else_its_call_needs_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capability, "SLOW_S", 0.001)
    engine = SlowEngine(SSE)
    said = FetchingCapability(engine).handle(replace(CALL, wants_progress=True))
    async with asyncio.timeout(60):
        assert await anext(said) == messages.LOADING
        await said.aclose()  # type: ignore[attr-defined]
    assert engine.begun_count == engine.ended_count == 1, "its use is released"


@pytest.mark.spec("N1")
async def test_engine_is_asked_for_a_side_stream_where_its_reader_is_on_this_node() -> None:
    engine = AttentiveEngine(SSE)
    example = ExampleCapability(engine)
    example._node = "here"
    words = []
    for node in ("here", "here", "there", ""):
        assert [part async for part in example.handle(replace(CALL, reader_node=node))]
        words.append(engine.told.get(messages.SIDE_STREAM))
    assert words[0] and words[1] and words[0] != words[1]
    assert words[2:] == [None, None]


async def test_a_path_of_another_capability_is_named() -> None:
    other = messages.InferenceCall("/v1/other", b"{}", {}, "req-1", "m")
    [said] = [part async for part in ExampleCapability(DyingEngine(JSON)).handle(other)]
    assert isinstance(said, messages.FullResponse)
    assert said.head.status == 404
    assert b"/v1/thing" in said.body


class ShortEngine(DyingEngine):
    """Says that it could do with more, until it has grown; each growth ends as the test has it."""

    def __init__(self, *growths: Exception | asyncio.Event | None) -> None:
        super().__init__(messages.ResponseHead(400, JSON.headers | {COULD_GROW: "context"}))
        self.growths, self.deadlines_s = list(growths), []  # type: ignore[var-annotated]
        self.models = {"m": SimpleNamespace(state=HolderState.RESIDENT)}

    def use(self, model: str, **how: object) -> "ShortEngine":
        self.deadlines_s.append(how["deadline_s"])
        return self

    async def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[messages.ResponseHead | bytes, None]:
        yield self.head
        yield b"{}"

    async def grow(self, model: str) -> None:
        end = self.growths.pop(0)
        if isinstance(end, Exception):
            raise end
        if end is not None:
            await end.wait()
        self.head = JSON


async def whole(engine: ShortEngine, call: messages.InferenceCall = CALL) -> messages.FullResponse:
    parts = ExampleCapability(engine).handle(call)
    [said] = [part async for part in parts if part != messages.TAKEN]
    assert isinstance(said, messages.FullResponse)
    return said


@pytest.mark.spec("A14", "J3")
async def test_client_of_a_model_that_grows_reads_that_it_loads() -> None:
    engine = ShortEngine(None)
    call = replace(CALL, wants_progress=True)
    said, answer = [part async for part in ExampleCapability(engine).handle(call)]
    assert said == messages.LOADING
    assert isinstance(answer, messages.FullResponse) and answer.head.status == 200


@pytest.mark.spec("A14")
async def test_a_growth_that_met_a_revoke_is_tried_again() -> None:
    engine = ShortEngine(TicketClosed(TicketId("t")), None)
    assert (await whole(engine)).head.status == 200 and not engine.growths


@pytest.mark.spec("A14")
async def test_a_growth_that_meets_one_revoke_after_the_other_is_given_up() -> None:
    engine = ShortEngine(*[TicketClosed(TicketId("t"))] * 9)
    said = await whole(engine)
    assert json.loads(said.body)["error"]["code"] == "ticket_closed"
    assert len(engine.growths) == 7


@pytest.mark.spec("A21")
async def test_a_deadline_holds_while_the_model_grows() -> None:
    engine = ShortEngine(asyncio.Event())
    async with asyncio.timeout(60):
        said = await whole(engine, replace(CALL, deadline_s=0.01))
    assert json.loads(said.body)["error"]["code"] == "deadline_unmet"
    assert said.head.status == 503


@pytest.mark.spec("A21")
async def test_retry_gets_the_rest_of_the_deadline() -> None:
    engine = ShortEngine(None)
    await whole(engine, replace(CALL, deadline_s=30))
    first_s, second_s = engine.deadlines_s
    assert 30 >= first_s > second_s > 20


async def test_could_grow_header_does_not_reach_the_client() -> None:
    engine = ShortEngine()

    async def stays_small(model: str) -> None:
        """It gave back at once, or somebody else took its place."""

    engine.grow = stays_small  # type: ignore[method-assign]
    said = await whole(engine)
    assert said.head.status == 400 and COULD_GROW not in said.head.headers


class PinnedElsewhere(DyingEngine):
    """Refuses the model, because a pinned one has the place."""

    async def __aenter__(self) -> "DyingEngine":
        raise PINNED


@pytest.mark.spec("A11")
async def test_refusal_for_a_pinned_model_is_raised_for_the_front_to_try_another_node() -> None:
    with pytest.raises(RolePinned):
        assert not [part async for part in ExampleCapability(PinnedElsewhere(JSON)).handle(CALL)]
