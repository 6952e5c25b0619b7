"""What ends the arbiter's process, and what is only an answer."""

from typing import Any, NoReturn, cast

import pytest

from arbiter import events as ev
from arbiter.core import Arbiter
from arbiter.errors import CapabilityConflict, LedgerBroken
from arbiter.eventlog import EventLog
from arbiter.shell import Shell
from arbiter.units import Epoch, NodeId, TicketId


class Ended(BaseException):
    """Stands in for the end of the process."""


def end(error: BaseException) -> NoReturn:
    raise Ended from error


class Failing:
    """A core that raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def handle(self, event: ev.Event, now: int) -> list[Any]:
        raise self.error


class NoAgents:
    def reap(self, node: NodeId, ticket: TicketId) -> None: ...
    def probe(self, node: NodeId) -> None: ...


def shell(error: BaseException) -> Shell:
    core = cast(Arbiter, Failing(error))
    return Shell(core, Epoch(1), NoAgents(), EventLog(Epoch(1)), crash=end)


@pytest.mark.spec("A18")
@pytest.mark.parametrize("bug", [KeyError("a"), ValueError("b"), LedgerBroken("c"), TypeError()])
def test_whatever_is_no_refusal_ends_the_process(bug: Exception) -> None:
    with pytest.raises(Ended):
        shell(bug).feed(ev.Woke())


@pytest.mark.spec("A18")
def test_a_refusal_is_the_callers() -> None:
    with pytest.raises(CapabilityConflict):
        shell(CapabilityConflict("c", "role")).feed(ev.Woke())
