"""A core that has hung, and cores that only take their time."""

import asyncio

import pytest

from deployments.engines.vllm.engine_core.core_watch import CoreWatch

pytestmark = pytest.mark.spec("H9")
MOST_S = 300.0


class Core:
    """Answers a question once it may."""

    def __init__(self) -> None:
        self.now_s, self.asked_count = 0.0, 0
        self.goes_on = asyncio.Event()
        self.fails = False
        self.watch = CoreWatch(self._ask, MOST_S, lambda: self.now_s)

    async def _ask(self) -> None:
        self.asked_count += 1
        await self.goes_on.wait()
        if self.fails:
            raise RuntimeError("no such question")

    async def check_at(self, now_s: float) -> None:
        self.now_s = now_s
        self.watch.check()
        for _ in range(3):  # an answer that may come has come
            await asyncio.sleep(0)


async def test_core_that_answers_no_question_for_longer_than_a_step_has_hung() -> None:
    core = Core()
    for now_s in (0.0, 5.0, MOST_S):
        await core.check_at(now_s)
    assert core.asked_count == 1
    with pytest.raises(RuntimeError, match="has not gone on for 301 s"):
        await core.check_at(MOST_S + 1)


async def test_core_is_asked_anew_after_each_answer_be_it_an_error() -> None:
    core = Core()
    core.fails = True
    await core.check_at(0.0)
    core.goes_on.set()
    for now_s in (MOST_S, 9 * MOST_S, 10 * MOST_S):
        await core.check_at(now_s)
    assert core.asked_count == 3
