"""Threads that read the files of models, which may lie on a file server that hangs.

The event loop's own threads are few, five where Ray gives the process no CPU of its own, and Ray is
asked in them, as for the arbiter. So files are read in others: of each model in one, and what it
waits for delays no other model. Threads that have done their work stay for the next, a few of them:
each request with an adapter looks at its files, and the start of a thread costs more than that.
Serve's controller, which may hang too, is asked in a thread of these for the same reason.

    made = await in_thread(config.source, plan, model, capability)
"""

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
IDLE_MOST_COUNT = 2  # threads without work that are kept for the next name


def _idle_pool() -> ThreadPoolExecutor:
    return _idle.pop() if _idle else ThreadPoolExecutor(1, "model-files")


@dataclass(slots=True)
class _Thread:
    pool: ThreadPoolExecutor = field(default_factory=_idle_pool)
    # Work that has not begun, in its order. The pool's own queue would keep cancelled work until
    # its turn comes. Where a file server hangs it never comes, and each client that gives up would
    # leave work behind.
    waiting: dict[Future[Any], Callable[[], Any]] = field(default_factory=dict)


_threads: dict[str, _Thread] = {}  # by name: the threads that have work
_idle: list[ThreadPoolExecutor] = []
_lock = threading.Lock()  # guards both, which change where work ends, in its own thread


def in_thread(
    name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    """Runs work in the thread of that name, after all work that was handed to it before. `name`:
    says which files are read, as the source of a model does. Work that is cancelled before it has
    begun leaves nothing behind. Raises what the work raises, and OSError where the process gets no
    thread."""
    answer: Future[T] = Future()
    with _lock:
        if is_idle := name not in _threads:
            _threads[name] = _Thread()
        thread = _threads[name]
        thread.waiting[answer] = partial(work, *args, **kwargs)
    answer.add_done_callback(partial(_forget, thread))
    if is_idle:
        _begin_next(name, thread)
    return asyncio.wrap_future(answer)


def _forget(thread: _Thread, cancelled: Future[Any]) -> None:
    """Removes work that was cancelled while it waited. Work that has begun is not among the waiting
    any more."""
    with _lock:
        thread.waiting.pop(cancelled, None)


def _begin_next(name: str, thread: _Thread) -> None:
    """Begins the first work that is not cancelled; where there is none, the thread is free."""
    while True:
        with _lock:
            answer = next(iter(thread.waiting), None)
            if answer is None:
                del _threads[name]
                if len(_idle) < IDLE_MOST_COUNT:
                    return _idle.append(thread.pool)
                break
            work = thread.waiting.pop(answer)
        if answer.set_running_or_notify_cancel():
            try:
                running = thread.pool.submit(work)
            except RuntimeError as error:  # the process may have no more threads
                answer.set_exception(OSError(errno.EAGAIN, str(error), name))
                continue
            return running.add_done_callback(partial(_settle, name, thread, answer))
    thread.pool.shutdown(wait=False)


def _settle(name: str, thread: _Thread, answer: Future[Any], running: Future[Any]) -> None:
    """Tells the caller how its work ended, and goes on with the next."""
    if error := running.exception():
        answer.set_exception(error)
    else:
        answer.set_result(running.result())
    _begin_next(name, thread)
