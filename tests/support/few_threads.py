"""An event loop with as few threads of its own as Ray gives a replica that asks for no CPU."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

WITHIN_S = 60.0


@contextmanager
def few_threads() -> Iterator[None]:
    """Of the running loop, until it ends."""
    threads = ThreadPoolExecutor(5)
    asyncio.get_running_loop().set_default_executor(threads)
    yield
    threads.shutdown(wait=False)


async def is_free() -> bool:
    """A call in one of them, as for the arbiter, comes to its end."""
    return await asyncio.wait_for(asyncio.to_thread(lambda: True), WITHIN_S)
