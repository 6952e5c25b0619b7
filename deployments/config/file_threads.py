"""Threads that read the files of models, which may lie on a file server that hangs.

The event loop's own threads are few, five where Ray gives the process no CPU of its own, and Ray is
asked in them, as for the arbiter. So files are read in others: of each model in one, and what it
waits for delays no other model.

    made = await in_thread(config.source, plan, model, capability)
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_threads: dict[str, ThreadPoolExecutor] = {}  # by name; each has one thread


def in_thread(
    name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    """Begins the work in the thread of that name, once what was begun there before is done. `name`:
    of a model's files, as its source."""
    if name not in _threads:
        _threads[name] = ThreadPoolExecutor(1, "model-files")
    loop = asyncio.get_running_loop()
    return loop.run_in_executor(_threads[name], partial(work, *args, **kwargs))
