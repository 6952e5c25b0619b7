"""What ends the arbiter's process, and what is only an answer."""

import asyncio
from typing import Any, NoReturn, cast

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import Compacted, SetTimer, WarmPrefixes
from arbiter.core.settings import DEFAULTS
from arbiter.errors import CapabilityConflict, LedgerBroken, UnknownCapability
from arbiter.protocol import messages
from arbiter.server import shell as module
from arbiter.server.event_log import EventLog
from arbiter.server.shell import Mailbox, Shell
from arbiter.units import Bytes, Epoch, HolderId, Instant, NodeId, TicketId, seconds
from policies import bundle


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
    def kill(self, node: NodeId, ticket: TicketId) -> None: ...
    def probe(self, node: NodeId) -> None: ...


def shell(error: BaseException) -> Shell:
    return shell_of(cast(Arbiter, Failing(error)))


def shell_of(core: Arbiter) -> Shell:
    return Shell(core, Epoch(1), NoAgents(), EventLog(Epoch(1)), crash=end)


@pytest.mark.spec("A18")
@pytest.mark.parametrize("bug", [KeyError("a"), ValueError("b"), LedgerBroken("c"), TypeError()])
def test_error_that_is_no_refusal_ends_the_process(bug: Exception) -> None:
    with pytest.raises(Ended):
        shell(bug).feed(ev.TimerFired())


@pytest.mark.spec("A18")
def test_refusal_is_raised_to_its_caller() -> None:
    with pytest.raises(CapabilityConflict):
        shell(CapabilityConflict("c", "role")).feed(ev.TimerFired())


@pytest.mark.spec("A3")
async def test_kept_answer_of_a_refused_ticket_holds_no_frame_of_its_askers() -> None:
    core = Arbiter(DEFAULTS, bundle(DEFAULTS), Epoch(1), frozenset(), Instant(0))
    running = shell_of(core)
    asked = ev.Requested(TicketId("t"), HolderId("h"), "none", "a", types.Need(Bytes(1)))
    for _ in range(2):  # the second is told what was kept
        with pytest.raises(UnknownCapability) as raised:
            await running.acquire(asked)
        kept = core._state.answers[asked.ticket]
        assert kept == raised.value and raised.value.__traceback__ is not None
        assert (kept.__traceback__, kept.__context__, kept.__cause__) == (None, None, None)


@pytest.mark.spec("A3")
async def test_commands_are_repeated_until_they_are_acknowledged() -> None:
    box = Mailbox(10)
    for model in "abc":
        box.put(messages.ReloadCommand(model))
    assert [each.sequence for each in await box.after(0, 0)] == [1, 2, 3]
    assert [each.sequence for each in await box.after(1, 0)] == [2, 3]
    assert [each.sequence for each in await box.after(1, 0)] == [2, 3]
    assert await box.after(3, 0) == ()


@pytest.mark.spec("G1")
async def test_holder_is_told_to_warm_the_prefixes_of_its_ticket() -> None:
    class Speaks:
        settings = DEFAULTS

        def handle(self, event: ev.Event, now: int) -> list[Any]:
            return [WarmPrefixes(TicketId("t"), HolderId("h"))]

        def replica_targets(self, now: int) -> dict[str, int]:
            return {}

    made = shell_of(cast(Arbiter, Speaks()))
    made.open_mail(HolderId("h"))
    made.feed(ev.SpeechStarted(HolderId("ear")))
    [command] = await made.listen(HolderId("h"), 0)
    assert command.command == messages.PrewarmCommand(TicketId("t"))


@pytest.mark.spec("A18")
async def test_holder_that_reads_no_commands_must_rejoin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMMANDS_BESIDE_QUEUE_COUNT", 3 - DEFAULTS.queue_total_count)
    core = Arbiter(DEFAULTS, bundle(DEFAULTS), Epoch(1), frozenset(), Instant(0))
    made, reads, silent = shell_of(core), HolderId("reads"), HolderId("silent")
    for holder in (reads, silent):
        made.open_mail(holder)
    ack = 0
    for number in range(4):
        made.command_all(messages.ReloadCommand(str(number)))
        [command] = await made.listen(reads, ack)
        ack = command.sequence
    assert not made.must_rejoin(reads) and made.must_rejoin(silent)
    made.command_all(messages.ReloadCommand("one more"))
    assert made.has_mail(silent)  # it lives, and may ask on
    made.open_mail(silent)  # it has joined again
    assert not made.must_rejoin(silent)
    made.command_all(messages.ReloadCommand("new"))
    assert [each.sequence for each in await made.listen(silent, 0)] == [1]


@pytest.mark.spec("A3")
async def test_shell_has_one_timer_set_to_the_earliest_due_time() -> None:
    asked = iter([900, 300, 600])

    class Wakes:
        def handle(self, event: ev.Event, now: int) -> list[Any]:
            return [SetTimer(Instant(now + seconds(next(asked))))]

        def replica_targets(self, now: int) -> dict[str, int]:
            return {}

    core = cast(Arbiter, Wakes())
    made = Shell(core, Epoch(1), NoAgents(), EventLog(Epoch(1)), clock=lambda: Instant(0))
    loop = asyncio.get_running_loop()
    due_s = []
    for _ in range(3):
        made.feed(ev.TimerFired())
        assert made._timer is not None
        due_s.append(round(made._timer.when() - loop.time(), -1))
    assert due_s == [900, 300, 300]
    made._timer.cancel()


class Compacts:
    """A core whose only compaction ends with the second event."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def handle(self, event: ev.Event, now: int) -> list[Any]:
        self.events.append(event)
        return [self.answer(is_finished=True)] if len(self.events) > 1 else []

    def compaction(self, request: str) -> Compacted | None:
        return self.answer(is_finished=False) if len(self.events) == 1 else None

    def answer(self, *, is_finished: bool) -> Compacted:
        return Compacted("r", int(is_finished), Bytes(0), (), is_finished)

    def replica_targets(self, now: int) -> dict[str, int]:
        return {}


@pytest.mark.spec("D7")
async def test_compaction_is_answered_at_its_end_and_in_between_with_how_far_it_is() -> None:
    core = Compacts()
    made = shell_of(cast(Arbiter, core))
    asked = ev.CompactAsked("r")
    so_far = await made.compact(asked, wait_s=0)
    assert (so_far.is_finished, so_far.freed_count) == (False, 0)
    waiting = asyncio.ensure_future(made.compact(asked, wait_s=30))
    assert (await waiting).is_finished, "asked again, it is answered once it has ended"
    assert len(core.events) == 2


@pytest.mark.spec("D7")
async def test_compaction_that_ends_as_the_wait_is_over_is_answered_with_its_end() -> None:
    made = shell_of(cast(Arbiter, Compacts()))
    asyncio.get_running_loop().call_soon(made.feed, ev.TimerFired())
    assert (await made.compact(ev.CompactAsked("r"), wait_s=0)).is_finished
