"""Calls of the arbiter from outside, while it restarts, refuses or is not there."""

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from arbiter.client import admin
from arbiter.errors import ArbiterUnavailable, UnknownTicket
from arbiter.protocol import messages, ray_internals
from arbiter.server import state_path, store
from arbiter.units import NodeId, TicketId
from deployments.config import boot
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


async def test_bug_beside_a_call_of_the_arbiter_is_no_absence_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(Answering(KeyError("a bug")), monkeypatch)
    with pytest.raises(KeyError, match="a bug"):
        await admin.call_arbiter("explain", "t")


class Actors:
    """Of a cluster of one node, by name: an arbiter that hangs, and a node agent. As in Ray, one
    that is killed answers once more, then cannot be reached, and then is dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.living = {messages.NAME, messages.agent_name(NodeId("n"))}
        self.dying: dict[str, list[Exception | None]] = {}
        self.noted: Path | None = None  # as the state file of the arbiter
        self.done: list[tuple[str, str]] = []  # calls and kills, in order, by name
        monkeypatch.setattr(admin, "find_actor", self.find)
        monkeypatch.setattr(ray_internals, "living_nodes", lambda: {NodeId("n"): "ray's"})
        monkeypatch.setattr(ray_internals, "session_name", lambda: "one")
        monkeypatch.setattr(ray_internals, "noted_state_file", lambda: self.noted)
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "kill", self.kill)

    def find(self, name: str) -> "Actor | None":
        return Actor(name) if name in self.living else None

    def kill(self, actor: "Actor", no_restart: bool) -> None:
        assert no_restart
        self.dying[actor.name] = [None, ActorUnavailableError("it ends", None)]
        self.done.append((actor.name, "killed"))

    def get(self, call: tuple[str, str], timeout: float) -> Any:
        name, method = call
        if method == "__ray_ready__":
            return self.answer_dying(name)
        if name == messages.NAME and name in self.living:
            raise GetTimeoutError("hung")
        self.done.append(call)
        return {"identity": "new", "epoch": 9} if method == "hello" else None

    def answer_dying(self, name: str) -> None:
        if not (answers := self.dying[name]):
            self.living.remove(name)
            raise RayActorError
        if (answer := answers.pop(0)) is not None:
            raise answer


class Actor:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, method: str) -> Any:
        name = self.name

        class Method:
            @staticmethod
            def remote(*args: object) -> tuple[str, str]:
                return name, method

        return Method


AGENT = messages.agent_name(NodeId("n"))


@pytest.mark.spec("A20")
def test_arbiter_that_hangs_is_killed_at_shutdown_and_its_agents_end_what_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = Actors(monkeypatch)
    report = admin.stop_arbiter(1.0)
    assert report == {"arbiter": "killed with its node agents: no answer for 61 s"}
    assert actors.done == [(messages.NAME, "killed"), (AGENT, "close"), (AGENT, "killed")]
    assert not actors.living, "a start right behind is not given an arbiter that ends"


@pytest.mark.spec("A20")
def test_arbiter_that_hangs_is_upgraded_with_the_table_of_its_state_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    actors, started = Actors(monkeypatch), []

    def start(made: messages.StartConfig, **more: Any) -> Actor:
        started.append(made)
        return Actor("new")

    monkeypatch.setattr(admin, "_start", start)
    monkeypatch.setattr(state_path, "default_path", lambda: tmp_path / "arbiter.sqlite")
    kept: dict[str, Any] = {"capabilities": {}}
    monkeypatch.setattr(store, "kept_table", lambda path, session: None)
    with pytest.raises(GetTimeoutError, match=r"arbiter\.sqlite has no table .* `arbiter down`"):
        admin.upgrade_arbiter(boot.read)
    assert not actors.done, "nothing was changed"
    actors.noted = tmp_path / "configured.sqlite"
    monkeypatch.setattr(
        store, "kept_table", lambda path, session: kept if path == actors.noted else None
    )
    report = admin.upgrade_arbiter(boot.read)
    assert (report["after"], report["epoch"]) == ("new", 9)
    assert report["before"] == "did not answer for 60 s"
    assert actors.done == [(messages.NAME, "killed"), (AGENT, "killed"), ("new", "hello")]
    assert [each.configuration.table for each in started] == [kept]
    assert not actors.living
