"""What one test leaves to the next of the processes of its holders."""

import os
import signal
from typing import Any

import pytest

from tests.support import holder as holders
from tests.support.holder import RESTING
from tests.support.live_arbiter import gone
from tests.support.message_counter import ask
from tests.support.waits import WITHIN_S

pytestmark = pytest.mark.usefixtures("cluster")


def pid(_holder: Any) -> int:
    return os.getpid()


def names(holder: Any) -> tuple[str, str, int]:
    residency = holder.residency
    return residency.capability, residency.holder, len(residency.models)


async def test_process_whose_holder_ended_is_the_next_holder_unless_it_died_or_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holders, "RESTS_WITHIN_S", WITHIN_S)  # a slow process is none that hangs
    first = RESTING.take("chat")
    process, one = await ask(first, pid), await ask(first, names)
    await RESTING.give_back([first])
    second = RESTING.take("other")
    assert await ask(second, pid) == process
    two = await ask(second, names)
    assert (two[0], two[2]) == ("other", 0) and two[1] != one[1]
    await second.begin_work.remote()
    await RESTING.give_back([second])
    third = RESTING.take("chat")
    busy, process = process, await ask(third, pid)
    assert process != busy
    await RESTING.give_back([third])
    os.kill(process, signal.SIGKILL)
    await gone(process)
    fourth = RESTING.take("chat")
    assert await ask(fourth, pid) != process
    await RESTING.give_back([fourth])
