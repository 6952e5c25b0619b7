"""Down a ladder: what passes to the next rung, what does not, and nothing after the first part."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.errors import CapabilityFailed, EngineLost, QueueFull, RequestError, UnknownModel
from arbiter.units import TicketId
from deployments import messages
from deployments.messages import FullResponse, InferenceCall, Part, Parts, Progress, ResponseHead
from deployments.remotes.offers import SERVED_BY
from deployments.tasks.climb import PASSES, TaskCall, climb
from deployments.tasks.ladder import Candidate, Ladder, Rung
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
            Rung(Candidate(n, str(n), False, NOTHING), 0.0, "?") for n in range(len(self.scripts))
        )

        def call_of(name: str) -> InferenceCall:
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
