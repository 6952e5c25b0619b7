"""Freed heap is given back to the system, where the C library can."""

import asyncio
import os
import threading
from types import SimpleNamespace

import pytest

from arbiter.heap import trim, trim_forever
from arbiter.node.procfs import rollup
from arbiter.units import KIB, MIB


def private_bytes() -> int:
    return rollup(os.getpid())["Private_Dirty"]


def test_heap_that_a_thread_has_freed_goes_back_to_the_system() -> None:
    kept: list[bytes] = []

    def work() -> None:
        texts = [bytes(4 * KIB) for _ in range(20_000)]
        kept.extend(texts[::50])  # so that nothing lies free at an arena's end

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = private_bytes()
    if not trim():
        pytest.skip("the C library is not glibc")
    assert before - private_bytes() > 40 * MIB and len(kept) == 400


def test_library_without_a_way_to_give_heap_back_is_left_alone() -> None:
    assert trim(SimpleNamespace()) is False


async def test_heap_is_given_back_again_and_again_where_it_can_be() -> None:
    calls: list[str] = []
    is_third = asyncio.Event()
    loop = asyncio.get_running_loop()

    def release() -> bool:
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            loop.call_soon_threadsafe(is_third.set)
        return True

    async with asyncio.timeout(30):
        trimming = asyncio.ensure_future(trim_forever(0.001, release))
        await is_third.wait()
        trimming.cancel()
        await trim_forever(0.001, lambda: False)  # ends by itself
    assert threading.main_thread().name not in calls
