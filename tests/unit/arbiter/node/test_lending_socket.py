"""The socket goes on where a connection cannot be taken."""

import asyncio
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from arbiter.node import lending_socket
from arbiter.node.lending_socket import LendingSocket
from tests.support.waits import WITHIN_S


@pytest.mark.spec("L4")
async def test_engine_is_answered_after_connections_that_could_not_be_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, paused = asyncio.get_running_loop(), list[float]()
    fails = [errno.ECONNABORTED, errno.EMFILE, errno.ENFILE]
    accept, sleep = loop.sock_accept, asyncio.sleep

    async def accepted(listener: Any) -> Any:
        if fails:
            number = fails.pop(0)
            raise OSError(number, os.strerror(number))
        return await accept(listener)

    async def no_sleep(delay_s: float) -> None:
        paused.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(loop, "sock_accept", accepted)
    monkeypatch.setattr("arbiter.node.lending_socket.asyncio.sleep", no_sleep)
    with tempfile.TemporaryDirectory(prefix="kp-") as folder:
        lending = LendingSocket(Path(folder, "slabs.sock"), lambda *_: [])
        serving = asyncio.ensure_future(lending.serve())
        reader, writer = await asyncio.open_unix_connection(str(lending.path))
        writer.write(b'{"ticket": "t", "key": "kv"}\n')
        async with asyncio.timeout(WITHIN_S):
            assert await reader.read() == b"", "it was lent nothing, and is told so"
        writer.close()
        assert not serving.done()
        serving.cancel()
        lending.close()
    assert paused == [lending_socket.SHORT_PAUSE_S] * 2
    assert "Too many open files" in caplog.text and "slabs.sock" in caplog.text


async def test_socket_that_is_broken_itself_is_told_and_not_tried_for_ever() -> None:
    with tempfile.TemporaryDirectory(prefix="kp-") as folder:
        lending = LendingSocket(Path(folder, "slabs.sock"), lambda *_: [])
        lending.close()
        with pytest.raises(OSError):
            async with asyncio.timeout(WITHIN_S):
                await lending.serve()
