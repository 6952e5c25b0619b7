"""Calls of the arbiter from outside, while it restarts, refuses or is not there."""

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from arbiter.client import admin
from arbiter.errors import ArbiterUnavailable, UnknownTicket
from arbiter.units import TicketId
from tests.support.fake_arbiter import FakeArbiter, never

pytestmark = pytest.mark.spec("A18")


class Answering:
    """The next of these answers to each call of `explain`, and the last for ever."""

    def __init__(self, *answers: Exception | str) -> None:
        self.answers, self.calls_count = list(answers), 0

    async def explain(self, _: object) -> str:
        self.calls_count += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def use(arbiter: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "AGAIN_S", 0.0)
    monkeypatch.setattr(admin, "find_actor", lambda _: FakeArbiter(explain=arbiter.explain))


async def test_call_is_sent_again_while_the_arbiter_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restarts = ActorUnavailableError("it restarts", None)
    arbiter = Answering(restarts, restarts, "because")
    use(arbiter, monkeypatch)
    assert await admin.call_arbiter("explain", "t") == "because"
    assert arbiter.calls_count == 3


async def test_refusal_of_the_arbiter_and_its_bugs_are_raised_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal, bug = UnknownTicket(TicketId("t")), KeyError("a bug")
    use(Answering(RayTaskError("explain", "there", refusal)), monkeypatch)
    with pytest.raises(UnknownTicket):
        await admin.call_arbiter("explain", "t")
    use(Answering(RayTaskError("explain", "there", bug)), monkeypatch)
    with pytest.raises(RayTaskError, match="there"):
        await admin.call_arbiter("explain", "t")


async def test_arbiter_that_is_gone_or_does_not_answer_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(Answering(RayActorError()), monkeypatch)
    with pytest.raises(ArbiterUnavailable):
        await admin.call_arbiter("explain", "t")
    monkeypatch.setattr(admin, "find_actor", lambda _: FakeArbiter(explain=never))
    with pytest.raises(ArbiterUnavailable):
        await admin.call_arbiter("explain", "t", within_s=0.01)
    monkeypatch.setattr(admin, "find_actor", lambda _: None)
    with pytest.raises(ArbiterUnavailable):
        await admin.call_arbiter("explain", "t")
