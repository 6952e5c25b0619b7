"""Down a ladder: what passes to the next rung, what does not, and nothing after the first part."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.errors import (
    CapabilityFailed,
    DeadlineUnmet,
    EngineLost,
    QueueFull,
    RequestError,
    UnknownModel,
)
from arbiter.units import TicketId
from deployments import messages
from deployments.messages import FullResponse, InferenceCall, Part, Parts, Progress, ResponseHead
from deployments.remotes.offers import SERVED_BY
from deployments.tasks import climb as climb_module
from deployments.tasks.climb import PASSES, TaskCall, climb
from deployments.tasks.ladder import Ladder, Rung, RungState
from deployments.tasks.predict import NOTHING

HEAD = ResponseHead(200, {"content-type": "text/event-stream"})
WHOLE = FullResponse(ResponseHead(200, {}), b"{}")
LOST = EngineLost("m", TicketId("t"))
Script = Sequence[Part | RequestError]


def refusal(error: RequestError) -> FullResponse:
    return FullResponse(*messages.refusal(error))


@dataclass
class Models:
    """Each answers as scripted."""

    scripts: Sequence[Script]
    asked: list[InferenceCall] = field(default_factory=list)
    closed_count: int = 0

    async def run(self, call: InferenceCall) -> Parts:
        self.asked.append(call)
        try:
            for part in self.scripts[int(call.model)]:
                if isinstance(part, RequestError):
                    raise part
                yield part
        finally:
            self.closed_count += 1

    def call(self, deadline_s: float | None = None) -> TaskCall:
        rungs = tuple(
            Rung(RungState(n, str(n), False, NOTHING), 0.0, "?") for n in range(len(self.scripts))
        )

        async def call_of(name: str) -> InferenceCall:
            return InferenceCall("/p", b"", {}, "r", name, deadline_s, wants_progress=True)

        return TaskCall("sum", "r", Ladder(rungs, ()), call_of, wants_progress=False)

    async def heard(self, deadline_s: float | None = None) -> list[Part | RequestError]:
        found: list[Part | RequestError] = []
        try:
            async for part in climb(self.call(deadline_s), self.run):
                found.append(part)
        except RequestError as error:
            found.append(error)
        return found


def signed(head: ResponseHead, rung: int) -> bool:
    return head.headers[SERVED_BY] == str(rung)


@pytest.mark.spec("J5")
@pytest.mark.parametrize(
    "failure",
    [LOST, QueueFull("m", 5, 5, 1.0), refusal(CapabilityFailed("m", "x")), refusal(LOST)],
    ids=repr,
)
async def test_rung_that_fails_before_its_first_part_makes_way_for_the_next(
    failure: Part | RequestError,
) -> None:
    models = Models([[Progress("queued", 1, 2.0), failure], [WHOLE], [WHOLE]])
    progress, answer = await models.heard()
    assert isinstance(progress, Progress)
    assert isinstance(answer, FullResponse) and signed(answer.head, 1)
    assert [call.model for call in models.asked] == ["0", "1"]
    assert models.closed_count == 2, "no call is left open"
    assert not models.asked[0].wants_progress, "as the task's call says"


@pytest.mark.spec("J3", "J5")
@pytest.mark.parametrize("failure", [LOST, refusal(LOST)], ids=repr)
async def test_client_reads_that_the_next_rung_starts_and_not_that_the_last_runs(
    failure: Part | RequestError,
) -> None:
    models = Models([[messages.RUNNING, failure], [WHOLE]])
    call = replace(models.call(), wants_progress=True)
    running, starting, answer = [part async for part in climb(call, models.run)]
    assert (running, starting) == (messages.RUNNING, messages.STARTING)
    assert isinstance(answer, FullResponse) and signed(answer.head, 1)


@pytest.mark.spec("J5")
@pytest.mark.parametrize("part", [HEAD, b"data: one"])
async def test_nothing_follows_a_failure_after_the_first_part(part: Part) -> None:
    models = Models([[HEAD, part, LOST], [WHOLE]])
    *_, last = await models.heard()
    assert last is LOST and len(models.asked) == 1


@pytest.mark.spec("J5")
async def test_refusal_of_the_request_itself_does_not_go_to_another_model() -> None:
    unknown = UnknownModel("m", "", ())
    assert await Models([[unknown], [WHOLE]]).heard() == [unknown]
    bad = FullResponse(ResponseHead(400, {}), b"{}")
    models = Models([[bad], [WHOLE]])
    [said] = await models.heard()
    assert isinstance(said, FullResponse) and said.head.status == 400
    assert len(models.asked) == 1


@pytest.mark.spec("J5")
async def test_last_rungs_failure_is_the_answer() -> None:
    full = QueueFull("m", 5, 5, 1.0)
    assert await Models([[LOST], [full]]).heard() == [full]
    [said] = await Models([[LOST], [refusal(full)]]).heard()
    assert isinstance(said, FullResponse) and said.head.status == 429


@pytest.mark.spec("J5")
async def test_answer_that_is_signed_keeps_its_name_and_deadlines_shrink() -> None:
    theirs = ResponseHead(200, {SERVED_BY: "cloud/big"})
    models = Models([[LOST], [FullResponse(theirs, b"{}")]])
    [said] = await models.heard(deadline_s=50.0)
    assert isinstance(said, FullResponse) and said.head == theirs
    first, second = (call.deadline_s for call in models.asked)
    assert first is not None and second is not None and second < first <= 50.0


@pytest.mark.spec("J5")
async def test_deadline_that_the_rungs_before_used_up_is_an_error_and_no_negative_one() -> None:
    models = Models([[LOST], [WHOLE]])
    [error] = await models.heard(deadline_s=1e-9)
    assert isinstance(error, DeadlineUnmet) and "task:sum" in str(error)
    assert [call.deadline_s for call in models.asked if call.deadline_s is not None] == []


class Waits:
    """Rung 0 waits until it is let go, the others answer; what it is asked meanwhile is noted."""

    def __init__(self, *onward: str | None) -> None:
        self.onward_to, self.spent_s = list(onward), list[float]()
        self.go, self.is_closed = asyncio.Event(), False
        self.asked: list[str] = []

    def call(self) -> TaskCall:
        rungs = [Rung(RungState(n, str(n), False, NOTHING), 0.0, "?") for n in range(3)]

        async def onward(waiting: str, spent_s: float) -> Rung | None:
            self.spent_s.append(spent_s)
            assert waiting == "0", "the others answer at once"
            if not self.onward_to:
                self.go.set()
            to = self.onward_to.pop(0) if self.onward_to else None
            return next((rung for rung in rungs if rung.name == to), None)

        async def call_of(name: str) -> InferenceCall:
            return InferenceCall("/p", b"", {}, "r", name)

        return TaskCall("sum", "r", Ladder(tuple(rungs), ()), call_of, False, onward)

    async def run(self, call: InferenceCall) -> Parts:
        self.asked.append(call.model)
        if call.model != "0":
            yield WHOLE if call.model == "2" else refusal(LOST)
            return
        try:
            yield Progress("queued", 1, 60.0)
            await self.go.wait()
            yield HEAD
            yield b"data: one"
        finally:
            self.is_closed = True

    async def heard(self) -> list[Part]:
        async with asyncio.timeout(60), aclosing(climb(self.call(), self.run)) as parts:
            return [part async for part in parts if not isinstance(part, Progress)]


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_module, "LOOK_S", 0.001)


@pytest.mark.spec("J5")
@pytest.mark.usefixtures("looks_often")
async def test_rung_that_waits_is_left_for_a_sooner_rung_and_its_call_is_closed() -> None:
    waits = Waits(None, None, "2")
    [answer] = await waits.heard()
    assert isinstance(answer, FullResponse) and signed(answer.head, 2)
    assert waits.asked == ["0", "2"] and waits.is_closed
    assert len(waits.spent_s) == 3 and waits.spent_s == sorted(waits.spent_s)


@pytest.mark.spec("J5")
@pytest.mark.usefixtures("looks_often")
async def test_rung_whose_answer_begins_is_not_left_and_not_looked_at_again() -> None:
    waits = Waits(None)
    head, first = await waits.heard()
    assert isinstance(head, ResponseHead) and signed(head, 0) and first == b"data: one"
    assert waits.asked == ["0"]


@pytest.mark.spec("J5")
@pytest.mark.usefixtures("looks_often")
async def test_rung_that_was_left_is_asked_again_where_all_others_fail() -> None:
    waits = Waits("1")

    async def run(call: InferenceCall) -> AsyncIterator[Part]:
        if waits.asked.count("0") == 1 and call.model == "0":
            waits.go.set()
        async with aclosing(waits.run(call)) as parts:
            async for part in parts:
                yield refusal(LOST) if call.model == "2" else part

    head, _ = [part async for part in climb(waits.call(), run) if not isinstance(part, Progress)]
    assert isinstance(head, ResponseHead) and signed(head, 0)
    assert waits.asked == ["0", "1", "2", "0"]


@pytest.mark.spec("J8")
@pytest.mark.usefixtures("looks_often")
async def test_client_that_leaves_a_rung_that_waits_closes_its_call() -> None:
    waits = Waits(*[None] * 1_000)
    parts = climb(waits.call(), waits.run)
    assert isinstance(await anext(parts), Progress)
    waiting = asyncio.ensure_future(anext(parts))
    while not waits.spent_s:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waits.is_closed and waits.asked == ["0"]


PARTS = st.sampled_from([HEAD, WHOLE, b"x", LOST, refusal(LOST), Progress("queued", 1, None)])


@pytest.mark.spec("J5")
@given(st.lists(st.lists(PARTS, max_size=3), min_size=1, max_size=4))
async def test_client_never_hears_parts_of_two_answers(scripts: list[list[Part]]) -> None:
    models = Models(scripts)
    heard = [part for part in await models.heard() if not isinstance(part, Progress)]
    last = int(models.asked[-1].model)
    said = [part for part in scripts[last] if not isinstance(part, Progress)]
    upto = next((n + 1 for n, p in enumerate(said) if isinstance(p, RequestError)), len(said))
    assert len(heard) == upto, "all of the last rung's, and nothing of another's"
    for rung in range(last):
        begun = next((p for p in scripts[rung] if not isinstance(p, Progress)), None)
        passing = isinstance(begun, FullResponse) and begun.head.status in PASSES
        assert passing or isinstance(begun, RequestError) or begun is None
