"""Threads that read files of models, where some of the files wait for a server that hangs."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import pytest

from deployments.config import file_threads
from deployments.config.file_threads import IDLE_MOST_COUNT, in_thread
from tests.support.waits import WITHIN_S, eventually, wait_in_thread


def names() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("model-files")]


@pytest.fixture(autouse=True)
def no_idle_threads() -> Iterator[None]:
    """Those of the tests before in this process end first, and those of a test with it."""
    wait_in_thread(none_is_left)
    yield
    wait_in_thread(none_is_left)


def none_is_left() -> bool:
    """Ends those that are idle; a thread whose work has just ended is so a moment later."""
    while file_threads._idle:
        file_threads._idle.pop().shutdown()
    return not names()


async def test_next_model_takes_a_thread_that_is_done_and_few_of_them_stay() -> None:
    first = await in_thread("one", threading.get_ident)
    await eventually(lambda: len(file_threads._idle) == 1)
    assert await in_thread("another", threading.get_ident) == first
    meet = threading.Barrier(IDLE_MOST_COUNT + 2)
    together = [in_thread(f"m{n}", meet.wait, WITHIN_S) for n in range(IDLE_MOST_COUNT + 2)]
    await asyncio.gather(*together)
    await eventually(lambda: len(file_threads._idle) == IDLE_MOST_COUNT)


@pytest.mark.spec("D5")
async def test_files_that_hang_keep_one_thread_whose_readers_left_and_delay_no_other_model() -> (
    None
):
    server = threading.Event()
    asked = [in_thread("hangs", server.wait, WITHIN_S) for _ in range(5)]
    try:
        await eventually(lambda: len(names()) == 1)
        asked[0].cancel()  # its client has left; the thread still waits
        asked.append(in_thread("hangs", server.wait, WITHIN_S))
        assert await in_thread("other", lambda: "read") == "read"
        assert len(names()) == 2  # the other model's thread stays for the next
    finally:
        server.set()
    assert await asyncio.gather(*asked[1:]) == [True] * 5


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


class Request:
    def read(self) -> None:
        raise AssertionError("its client has left")


async def test_error_of_the_work_is_that_of_its_caller_and_the_next_is_done() -> None:
    with pytest.raises(OSError, match="stale"):
        await in_thread("gone", fail)
    assert await in_thread("gone", lambda: "read") == "read"


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
