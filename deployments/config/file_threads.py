"""Threads that read the files of models, which may lie on a file server that hangs.

The event loop's own threads are few, five where Ray gives the process no CPU of its own, and Ray is
asked in them, as for the arbiter. So files are read in others: of each model in one, and what it
waits for delays no other model.

    made = await in_thread(config.source, plan, model, capability)
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Thread:
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "model-files"))
    work_count: int = 0  # begun and not done, also where its caller has left


_threads: dict[str, _Thread] = {}  # by name, while each has work
_lock = threading.Lock()  # of these, because work ends in its own thread


def in_thread(
    name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    """Begins the work in the thread of that name, once what was begun there before is done. `name`:
    of a model's files, as its source. The thread ends with its last work."""
    with _lock:
        thread = _threads.setdefault(name, _Thread())
        thread.work_count += 1
        begun = thread.pool.submit(partial(work, *args, **kwargs))
    begun.add_done_callback(partial(_note_done, name))
    return asyncio.wrap_future(begun)


def _note_done(name: str, _: Future[Any]) -> None:
    with _lock:
        thread = _threads[name]
        thread.work_count -= 1
        if thread.work_count == 0:
            del _threads[name]
            thread.pool.shutdown(wait=False)
