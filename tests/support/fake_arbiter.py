"""An arbiter that is no actor: each method is a coroutine a test wrote, called as Ray's are."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from arbiter.client.holder import HolderClient
from arbiter.protocol.rpc import RayPeer
from arbiter.units import Epoch, HolderId


class Method:
    def __init__(self, act: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._act = act

    def remote(self, *args: object) -> Any:
        """A call that never answers is no coroutine, because some callers do not await it."""
        is_silent = self._act is never
        return asyncio.get_running_loop().create_future() if is_silent else self._act(*args)


class FakeArbiter:
    """A method that was not given never answers."""

    def __init__(self, **methods: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.methods = methods

    def __getattr__(self, name: str) -> Method:
        return Method(self.methods.get(name, never))


async def never(*_: object) -> None:
    await asyncio.Event().wait()


def joined_client(arbiter: FakeArbiter) -> HolderClient:
    """A client in the middle of an epoch, whose own joining is over: it never joins again."""
    client = HolderClient("chat", HolderId("h"), lambda: (), lambda command: None)
    client.session._tasks[0].cancel()
    client.session.arbiter, client.session.epoch = RayPeer(arbiter), Epoch(5)
    client.session.joined.set()
    return client


async def let_go(client: HolderClient) -> None:
    """Without last words, because no peer here would hear them."""
    client.session.epoch = None
    await client.close()
