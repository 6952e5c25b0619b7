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
from tests.support.fake_arbiter import FakeArbiter

HERE, ELSEWHERE = NodeId("n"), NodeId("m")
WITHIN_S = 60


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
async def connection(path: Path) -> AsyncIterator[tuple[RpcServer, SocketPeer]]:
    offers: Any = {f.__name__: f for f in (doubled, stale, bug, never)}
    server = RpcServer(HERE, path, offers)
    async with asyncio.timeout(WITHIN_S):
        assert await server.address() == {"node": HERE, "path": str(path)}
        peer = await connect(path)
        try:
            yield server, peer
        finally:
            peer.close()
            server.close()


@pytest.mark.spec("N2")
async def test_answers_find_their_calls_in_any_order(path: Path) -> None:
    async with connection(path) as (_, peer):
        waiting = asyncio.ensure_future(peer.call("never"))
        assert await asyncio.gather(*(peer.call("doubled", n) for n in range(100))) == [
            2 * n for n in range(100)
        ]
        assert not waiting.done()
        waiting.cancel()


async def test_request_errors_cross_rpc_unchanged_and_a_bug_becomes_a_remote_error(
    path: Path,
) -> None:
    async with connection(path) as (_, peer):
        with pytest.raises(StaleEpoch):
            await peer.call("stale")
        with pytest.raises(RemoteError, match="a bug"):
            await peer.call("bug")
        assert await peer.call("doubled", 1) == 2


@pytest.mark.spec("A18")
async def test_waiting_call_fails_at_once_when_the_connection_is_lost(path: Path) -> None:
    async with connection(path) as (server, peer):
        waiting = asyncio.ensure_future(peer.call("never"))
        assert await peer.call("doubled", 1) == 2
        server.close()
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionLost):
            await peer.call("doubled", 1)


async def test_answer_to_a_cancelled_call_is_ignored(path: Path) -> None:
    async with connection(path) as (_, peer):
        left = asyncio.ensure_future(peer.call("doubled", 1))
        await asyncio.sleep(0)
        left.cancel()
        assert await peer.call("doubled", 2) == 4


@pytest.mark.spec("L4")
async def test_rpc_server_accepts_its_own_user_only(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connection(path):
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


async def test_message_beyond_the_bound_closes_the_connection(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connection(path) as (_, peer):
        monkeypatch.setattr(rpc, "MESSAGE_MOST_BYTES", 10)
        with pytest.raises(ConnectionLost):
            await peer.call("doubled", 1)


@pytest.mark.spec("N2")
async def test_connect_uses_the_socket_on_the_same_node_and_ray_otherwise(path: Path) -> None:
    async with connection(path) as (server, _):
        where = await server.address()
        near = await connect_to_socket(None, where, HERE)
        assert await near.call("doubled", 4) == 8
        near.close()
        assert isinstance(await connect_to_socket(None, where, ELSEWHERE), RayPeer)
        assert isinstance(await connect_to_socket(None, None, HERE), RayPeer)
    assert isinstance(await connect_to_socket(None, where, HERE), RayPeer)


async def test_rpc_server_that_cannot_listen_has_no_address(path: Path) -> None:
    server = RpcServer(HERE, path.parent / "missing" / "s.sock", {})
    assert await server.address() is None
    server.close()


async def test_ray_peer_raises_the_same_errors_as_a_socket_peer() -> None:
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


async def test_server_that_is_closed_as_it_opens_leaves_no_socket(path: Path) -> None:
    server = RpcServer(HERE, path, {})
    while not path.exists():
        await asyncio.sleep(0)
    server.close()
    async with asyncio.timeout(WITHIN_S):
        assert await server.address() is None
    assert not path.exists()
