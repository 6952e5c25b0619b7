"""Threads that read files of models, where some of the files wait for a server that hangs."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest

from deployments.config.file_threads import in_thread
from tests.support.waits import WITHIN_S, eventually


def names() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("model-files")]


@pytest.mark.spec("D5")
async def test_files_that_hang_keep_one_thread_whoever_leaves_and_delay_no_other_model() -> None:
    server = threading.Event()
    asked = [in_thread("hangs", server.wait, WITHIN_S) for _ in range(5)]
    try:
        await eventually(lambda: len(names()) == 1)
        asked[0].cancel()  # its client has left; the thread still waits
        asked.append(in_thread("hangs", server.wait, WITHIN_S))
        assert await in_thread("other", lambda: "read") == "read"
        await eventually(lambda: len(names()) == 1)
    finally:
        server.set()
    assert await asyncio.gather(*asked[1:]) == [True] * 5
    await eventually(lambda: not names())


@pytest.mark.spec("D5")
async def test_reads_whose_clients_have_left_are_not_kept_while_a_server_hangs() -> None:
    server, kept = threading.Event(), WeakSet[Request]()
    begun = in_thread("hangs", server.wait, WITHIN_S)
    try:
        for _ in range(100):
            kept.add(request := Request())
            in_thread("hangs", request.read).cancel()
        del request
        await eventually(lambda: not gc.collect() and not kept)
        last = in_thread("hangs", lambda: "read")
    finally:
        server.set()
    assert await begun and await last == "read"
    await eventually(lambda: not names())


class Request:
    def read(self) -> None:
        raise AssertionError("its client has left")


async def test_error_of_the_work_is_that_of_its_caller_and_ends_the_thread_as_well() -> None:
    with pytest.raises(OSError, match="stale"):
        await in_thread("gone", fail)
    await eventually(lambda: not names())


def fail() -> None:
    raise OSError("stale")


async def test_work_that_gets_no_thread_says_so_and_the_next_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(ThreadPoolExecutor, "submit", no_thread)
        with pytest.raises(OSError, match="new thread"):
            await in_thread("scarce", lambda: "read")
    assert await in_thread("scarce", lambda: "read") == "read"
