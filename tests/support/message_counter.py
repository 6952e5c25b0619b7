"""Counts every message that a process sends or hears: over the sockets between our processes, and
by Ray. What another process says to this one by Ray, that process counts as sent.

    before = await ask(handle, begin)    # in the actor's own process
    ...
    counted = await ask(handle, counts)
"""

from collections import Counter
from typing import Any

from ray.actor import ActorHandle
from ray.remote_function import RemoteFunction

from arbiter.protocol import rpc
from tests.support.waits import eventually

_counts: Counter[str] = Counter()
_counting: list[str] = []  # what this process counts already


async def ask(handle: Any, what: Any) -> Any:
    """Runs it in the actor's process."""
    return await handle.__ray_call__.remote(what)


def begin(_actor: object) -> None:
    """From now on; again: from zero."""
    _counts.clear()
    if not _counting:
        _counting.append("sockets and Ray")
        _count_sockets()
        _count_ray()


def counts(_actor: object) -> dict[str, int]:
    return dict(_counts)


async def a_heartbeat(holder: Any) -> None:
    """Returns behind one, so that the next is almost a second away."""
    await ask(holder, begin)

    async def answered() -> int:
        return int((await ask(holder, counts)).get("renew answered", 0))

    heard: int = await eventually(answered)
    assert heard


def _count_sockets() -> None:
    """By the name of the call; its answer is a message too."""
    write, hear, serve, answer = (
        rpc._Frames.write,
        rpc.SocketPeer.received,
        rpc._ServerConnection.received,
        rpc._ServerConnection._answer,
    )

    def sent(self: rpc._Frames, message: Any) -> None:
        if isinstance(self, rpc.SocketPeer):
            _counts[f"{message[1]} sent"] += 1
        write(self, message)

    def heard(self: rpc.SocketPeer, message: Any) -> None:
        name, _ = self._waiting.get(message[0], ("a call given up", None))
        _counts[f"{name} answered"] += 1
        hear(self, message)

    def served(self: rpc._ServerConnection, message: Any) -> None:
        _counts[f"{message[1]} heard"] += 1
        serve(self, message)

    def answers(self: rpc._ServerConnection, number: int, name: str, call: Any) -> None:
        _counts[f"{name} answered"] += 1
        answer(self, number, name, call)

    rpc._Frames.write = sent  # type: ignore[method-assign]
    rpc.SocketPeer.received = heard  # type: ignore[method-assign]
    rpc._ServerConnection.received = served  # type: ignore[method-assign]
    rpc._ServerConnection._answer = answers  # type: ignore[method-assign]


def _count_ray() -> None:
    """Calls of actors and of tasks that this process makes."""
    call, task = ActorHandle._actor_method_call, RemoteFunction._remote

    def called(self: Any, method_name: str, *args: Any, **options: Any) -> Any:
        _counts[f"{method_name} sent by Ray"] += 1
        return call(self, method_name, *args, **options)

    def began(self: Any, *args: Any, **options: Any) -> Any:
        _counts["a task sent by Ray"] += 1
        return task(self, *args, **options)

    ActorHandle._actor_method_call = called
    RemoteFunction._remote = began
