"""What an engine makes of what its agent says that it lent."""

import asyncio
import os
import socket
import subprocess
import sys
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
OTHER_USER = 65_534  # without rights, and on each machine
# A process that the agent hangs up on, or that cannot reach it, is handed nothing too.
ASKS = """
import contextlib, os, socket, sys
os.setuid(int(sys.argv[1]))
fds = []
with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError):
    asking.connect(sys.argv[2])
    asking.sendall(b'{"ticket": "t", "key": "kv"}\\n')
    fds = socket.recv_fds(asking, 64, 8)[1]
print(len(fds))
"""


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
        await asyncio.wait({serving})
        lending.close()


async def test_slab_is_opened_by_the_descriptor_that_was_handed_over(agent: str) -> None:
    told = {"socket": agent, "ticket": "t", "file": "/saved"}
    config = {"model": "m", "slabs": {"kv": told}}
    slabs = (await asyncio.to_thread(lent.with_slabs, config))["slabs"]
    assert slabs["kv"].keys() == {"path", "file"}
    path = Path(slabs["kv"]["path"])
    assert path.parent == Path(f"/proc/{os.getpid()}/fd"), "its own, not the agent's"
    assert not os.get_inheritable(int(path.name))
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
    assert await asyncio.to_thread(handed_to, OTHER_USER, agent) == 0


def handed_to(uid: int, path: str) -> int:
    """How many descriptors a process of that user gets."""
    command = [sys.executable, "-c", ASKS, str(uid), path]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


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


def test_agent_that_hangs_delays_a_load_once_and_not_for_each_slab(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lent, "CALL_S", 0.1)
    with tempfile.TemporaryDirectory(prefix="kp-") as folder, hanging(folder) as listener:
        told = {"socket": str(Path(folder, "slabs.sock")), "ticket": "t"}
        config = {"slabs": dict.fromkeys(("kv", "adapter", "picture"), told)}
        assert lent.with_slabs(config) == {"slabs": {}}
        asked, _ = listener.accept()
        asked.close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def hanging(folder: str) -> socket.socket:
    """The socket of an agent that has stopped: the kernel takes connections, none is answered."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(Path(folder, "slabs.sock")))
    listener.listen()
    listener.setblocking(False)
    return listener


def test_engine_without_slabs_is_told_what_it_was_told() -> None:
    config = {"model": "m"}
    assert lent.with_slabs(config) is config
