"""What an engine makes of what its agent says that it lent."""

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from arbiter.node.lending_socket import LendingSocket
from arbiter.pool import SlabFile
from arbiter.units import MIB
from deployments.engines import lent
from tests.support.slabs import lent_slab

pytestmark = pytest.mark.spec("L4")
NOBODY, FAILED = 65_534, 99


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[str]:
    """Where it hands the ticket `t` its slab of KV. The path of a socket is short."""
    with lent_slab(8 * MIB) as fd, tempfile.TemporaryDirectory(prefix="kp-") as folder:
        lending = LendingSocket(
            Path(folder, "slabs.sock"), lambda *asked: [fd] if asked == ("t", "kv") else []
        )
        serving = asyncio.ensure_future(lending.serve())
        yield str(lending.path)
        serving.cancel()
        lending.close()


async def test_slab_is_opened_by_the_descriptor_that_was_handed_over(agent: str) -> None:
    told = {"socket": agent, "ticket": "t", "file": "/saved"}
    config = {"model": "m", "slabs": {"kv": told}}
    slabs = (await asyncio.to_thread(lent.with_slabs, config))["slabs"]
    assert slabs["kv"].keys() == {"path", "file"}
    path = Path(slabs["kv"]["path"])
    assert path.parent == Path(f"/proc/{os.getpid()}/fd"), "its own, not the agent's"
    file = SlabFile(str(path))
    assert file.limit_bytes == 8 * MIB
    file.close()
    os.close(int(path.name))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_process_of_another_user_that_can_reach_the_socket_is_handed_nothing(
    agent: str,
) -> None:
    assert await asyncio.to_thread(handed_to, os.getuid(), agent) == 1
    Path(agent).parent.chmod(0o755)
    Path(agent).chmod(0o666)
    assert await asyncio.to_thread(handed_to, NOBODY, agent) == 0


def handed_to(uid: int, path: str) -> int:
    """How many descriptors a process of that user gets."""
    child = os.fork()
    if child == 0:
        status = FAILED
        try:
            os.setresuid(uid, uid, uid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                asking.settimeout(lent.CALL_S)
                asking.connect(path)
                asking.sendall(b'{"ticket": "t", "key": "kv"}\n')
                status = len(socket.recv_fds(asking, 64, 8)[1])
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def test_engine_goes_on_without_what_it_is_not_handed(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "adapter": {"socket": agent, "ticket": "t"},
        "picture": {"socket": "/tmp/no-such-agent.sock", "ticket": "t"},
    }
    assert await asyncio.to_thread(lent.with_slabs, {"slabs": told}) == {"slabs": {}}
    monkeypatch.setattr(lent, "peer_uid", lambda _: os.getuid() + 1)
    strangers = {"slabs": {"kv": {"socket": agent, "ticket": "t"}}}
    assert await asyncio.to_thread(lent.with_slabs, strangers) == {"slabs": {}}
