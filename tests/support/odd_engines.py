"""Engines that show one thing each."""

import random

import numpy

from deployments.engines.asgi import respond
from deployments.engines.protocol import Config, Receive, Scope, Send


class RandomEngine:
    """Answers with numbers drawn after the fork."""

    can_sleep = False

    def __init__(self, config: Config) -> None:
        self.drawn = [random.random(), float(numpy.random.rand())]

    async def load(self) -> None:
        return None

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, self.drawn)

    async def sleep(self) -> None:
        raise AssertionError("cannot sleep")

    async def wake(self) -> None:
        raise AssertionError("cannot sleep")

    async def probe(self) -> str:
        return ""

    async def health(self) -> None:
        return None


def broken(config: Config) -> RandomEngine:
    raise ValueError("no such layer: attention.9")
