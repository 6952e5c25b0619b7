"""Calls between two of our processes, over a socket and by Ray: the same answers, the same ends."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from arbiter.errors import StaleEpoch
from arbiter.protocol import rpc
from arbiter.protocol.rpc import (
    ConnectionLost,
    RayPeer,
    RemoteError,
    RpcServer,
    SocketPeer,
    connect,
    connect_to_socket,
)
from arbiter.units import Epoch, NodeId
from tests.support.lines import FakeArbiter

HERE, ELSEWHERE = NodeId("n"), NodeId("m")
WITHIN_S = 5


@pytest.fixture
def path() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="cl-") as made:
        yield Path(made) / "s.sock"


async def doubled(number: int) -> int:
    return 2 * number


async def stale() -> None:
    raise StaleEpoch(Epoch(1), Epoch(2))


async def bug() -> None:
    raise KeyError("a bug")


async def never() -> None:
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def line(path: Path) -> AsyncIterator[tuple[RpcServer, SocketPeer]]:
    offers: Any = {f.__name__: f for f in (doubled, stale, bug, never)}
    door = RpcServer(HERE, path, offers)
    async with asyncio.timeout(WITHIN_S):
        assert await door.where() == {"node": HERE, "path": str(path)}
        peer = await connect(path)
        try:
            yield door, peer
        finally:
            peer.close()
            door.close()


@pytest.mark.spec("N2")
async def test_answers_find_their_calls_in_any_order(path: Path) -> None:
    async with line(path) as (_, peer):
        waiting = asyncio.ensure_future(peer.call("never"))
        assert await asyncio.gather(*(peer.call("doubled", n) for n in range(100))) == [
            2 * n for n in range(100)
        ]
        assert not waiting.done()
        waiting.cancel()


async def test_our_errors_cross_as_themselves_and_a_bug_over_there_as_one(path: Path) -> None:
    async with line(path) as (_, peer):
        with pytest.raises(StaleEpoch):
            await peer.call("stale")
        with pytest.raises(RemoteError, match="a bug"):
            await peer.call("bug")
        assert await peer.call("doubled", 1) == 2


@pytest.mark.spec("A18")
async def test_whoever_waits_hears_at_once_that_the_other_end_is_gone(path: Path) -> None:
    async with line(path) as (door, peer):
        waiting = asyncio.ensure_future(peer.call("never"))
        assert await peer.call("doubled", 1) == 2
        door.close()
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionLost):
            await peer.call("doubled", 1)


async def test_an_answer_nobody_waits_for_any_more_disturbs_nothing(path: Path) -> None:
    async with line(path) as (_, peer):
        left = asyncio.ensure_future(peer.call("doubled", 1))
        await asyncio.sleep(0)
        left.cancel()
        assert await peer.call("doubled", 2) == 4


@pytest.mark.spec("L4")
async def test_a_door_opens_to_its_own_user_only(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with line(path):
        assert path.stat().st_mode & 0o777 == 0o600
        uid = os.getuid()
        monkeypatch.setattr(rpc.os, "getuid", lambda: uid + 1)
        with pytest.raises(PermissionError):
            await connect(path)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.setblocking(False)
        stranger.connect(str(path))
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(stranger, 1) == b""
        stranger.close()


async def test_a_message_beyond_the_bound_ends_the_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with line(path) as (_, peer):
        monkeypatch.setattr(rpc, "MESSAGE_MOST_BYTES", 10)
        with pytest.raises(ConnectionLost):
            await peer.call("doubled", 1)


@pytest.mark.spec("N2")
async def test_a_door_on_this_node_is_taken_and_any_other_left_to_ray(path: Path) -> None:
    async with line(path) as (door, _):
        where = await door.where()
        near = await connect_to_socket(None, where, HERE)
        assert await near.call("doubled", 4) == 8
        near.close()
        assert isinstance(await connect_to_socket(None, where, ELSEWHERE), RayPeer)
        assert isinstance(await connect_to_socket(None, None, HERE), RayPeer)
    assert isinstance(await connect_to_socket(None, where, HERE), RayPeer)


async def test_a_door_that_cannot_open_is_not_named(path: Path) -> None:
    door = RpcServer(HERE, path.parent / "missing" / "s.sock", {})
    assert await door.where() is None
    door.close()


async def test_by_ray_the_same_ends_have_the_same_names() -> None:
    async def died() -> None:
        raise ActorDiedError()

    async def refused() -> None:
        raise RayTaskError("refused", "", StaleEpoch(Epoch(1), Epoch(2)))

    async def broke() -> None:
        raise RayTaskError("broke", "a bug", KeyError())

    peer = RayPeer(FakeArbiter(died=died, refused=refused, broke=broke, doubled=doubled))
    assert await peer.call("doubled", 3) == 6
    with pytest.raises(ConnectionLost):
        await peer.call("died")
    with pytest.raises(StaleEpoch):
        await peer.call("refused")
    with pytest.raises(RemoteError, match="a bug"):
        await peer.call("broke")
