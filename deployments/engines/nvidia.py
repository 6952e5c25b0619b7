"""What NVIDIA's libraries leave in a process that is to fork, and what of it may stay.

Libraries ask NVML at their import whether there is a GPU. The driver then has a thread in the
process, and a forked process that inherits NVML open is answered "the operating system has blocked
the request"; closed before the fork it opens anew. CUDA itself must not be initialised before the
fork, or no forked process can use it. Seen on an H200 with driver 580.
"""

import ctypes
import os

_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"
_THREADS = "cuda"  # how the driver's libraries begin the names of their threads
_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED of cuda.h
_MOST_OPENED = 1_000  # NVML counts how often it was opened, and is closed as often


def close_nvml() -> None:
    """Closes NVML as often as this process has opened it."""
    library = _loaded(_NVML)
    if library is None:
        return
    for _ in range(_MOST_OPENED):
        if library.nvmlShutdown() != 0:
            return


def may_stay(thread: str) -> bool:
    """Whether a thread of that name is the driver's. Such a thread makes no fork unsound while CUDA
    is not initialised."""
    return thread.startswith(_THREADS) and not _cuda_is_initialised()


def _cuda_is_initialised() -> bool:
    library = _loaded(_CUDA)
    count = ctypes.c_int()
    return library is not None and library.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALISED


def _loaded(name: str) -> ctypes.CDLL | None:
    """The library, if this process has it already."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
