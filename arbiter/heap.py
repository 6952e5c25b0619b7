"""Gives freed heap back to the system: in processes that run for weeks, and in engines that sleep
or have computed.

glibc keeps what was freed in the arena of the thread that had it, up to eight arenas for each core,
and gives back by itself only what lies at an arena's end. The arbiter's process had 74 MiB of that
in sixteen arenas after half an hour of a soak; a node agent has it from texts of /proc, a MB each,
which its threads read.
"""

import asyncio
import ctypes
from collections.abc import Callable

# One call takes 40 ms where 300 MiB lie free, a tenth of a percent of a core at this pace; other
# threads wait for the arena that is walked at the moment.
TRIM_EVERY_S = 30.0


def trim(libc: ctypes.CDLL | None = None) -> bool:
    """Gives back what is free in all arenas, without holding the interpreter's lock. Returns False
    where the C library cannot (it is not glibc)."""
    release = getattr(libc or ctypes.CDLL(None), "malloc_trim", None)
    if release is None:
        return False
    release.argtypes = (ctypes.c_size_t,)
    release(0)
    return True


async def trim_forever(every_s: float = TRIM_EVERY_S, release: Callable[[], bool] = trim) -> None:
    """Runs until it is cancelled, or ends where the C library cannot give anything back. In a
    thread, so that no request waits for it."""
    await asyncio.sleep(every_s)
    while await asyncio.to_thread(release):
        await asyncio.sleep(every_s)
