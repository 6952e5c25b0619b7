"""An engine that says it fell asleep and keeps its memory."""

from deployments.engines.protocol import Config
from tests.support.fake_engine import FakeEngine


class FalseSleepEngine(FakeEngine):
    async def sleep(self) -> None:
        return

    async def wake(self) -> None:
        return


def build(config: Config) -> FalseSleepEngine:
    return FalseSleepEngine(config)
