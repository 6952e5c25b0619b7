"""Small Linux facts that engine processes rely on: privileges, names, descriptors, environment."""

import contextlib
import ctypes
import mmap
import os
import random
import re
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, NoReturn

from deployments.engines.protocol import BadSpawn

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS = 1, 15, 38  # linux/prctl.h
_DONTNEED = 4  # MADV_DONTNEED: private anonymous pages are given back and read as zeros again
# MADV_POPULATE_READ and _WRITE, of Linux 5.14. An older kernel refuses them, which only costs time.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
# The nice value of the thread that fills pages. At 5 it gets a third of what a thread of nice 0
# gets. At 19 it got nothing for minutes on a busy node, and what a model holds is learned from its
# first seconds.
_FILLING_NICE = 5
_RANDOM_BYTES = 8  # in the name of a block of shared memory
_FILLED_AT_ONCE = 4 << 20  # bytes: after each such step, a millisecond or two, a sleep may stop it
_HOT_CODE = re.compile(
    r"/(torch|vllm|tokenizers|pydantic_core|numpy/_core|safetensors|sentencepiece|uvloop)/.*\.so"
    r"|libpython|libstdc\+\+"
)
_libc = ctypes.CDLL(None, use_errno=True)

# What an engine may inherit or be given: paths, locale, thread counts, device choice, and the
# settings of the libraries it runs. Everything else, above all every secret, stays outside.
_ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TZ|TMPDIR|LANG|LC_\w+|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|PYTHON(PATH|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE|FAULTHANDLER)|ARBITER_\w+"
    r"|(XDG|OMP|KMP|MKL|OPENBLAS|MALLOC|CUDA|NVIDIA|NCCL|HF|TRANSFORMERS|TOKENIZERS|TORCH"
    r"|TORCHINDUCTOR|TRITON|PYTORCH|VLLM|SENTENCE_TRANSFORMERS|ONEDNN|LRU_CACHE|THP)_\w+"
)
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSWORD|CREDENTIAL|API_KEY|_KEY$")

# Set before the zygote's interpreter starts, because glibc and OpenMP read them only then.
DEFAULTS = {
    "MALLOC_ARENA_MAX": "1",  # one heap: what a sleep frees can be trimmed
    # Activations stay in the heap between steps: mapped anew for each one, as a lower threshold has
    # it, their page faults cost a quarter of a 214 M model's tokens. A sleep trims the heap.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest older versions of glibc take
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    # oneDNN keeps 1,024 compiled primitives, one per batch shape: 80 MB that no sleep frees.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "OMP_NUM_THREADS": "1",  # until an engine sets the number for its model
    "OPENBLAS_NUM_THREADS": "1",  # more would start at import, and a fork needs a single thread
    # pandas brings pyarrow, which would start a thread at its import
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "HF_HUB_OFFLINE": "1",  # models are folders on disk; a start must not wait for a network
    "THP_MEM_ALLOC_ENABLE": "1",  # torch takes huge pages: KV is there 10x sooner
    "TOKENIZERS_PARALLELISM": "false",  # its thread pool deadlocks after a fork
    # torch asks NVML whether there is a GPU. If it asked CUDA when a library is imported, CUDA
    # would work in no process that is forked from the zygote.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the executor be `uni` on the CPU build
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # `auto` wants a memory node for each process of a model
    "KMP_BLOCKTIME": "0",  # an idle OpenMP thread must not spin on a shared core
}


def is_allowed(name: str) -> bool:
    return bool(_ALLOWED.fullmatch(name)) and not _SECRET.search(name)


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that an engine may see, on top of our defaults."""
    return DEFAULTS | {k: v for k, v in environment.items() if is_allowed(k)}


def refuse_environment(environment: Mapping[str, str]) -> None:
    """Raises BadSpawn for a name outside the allow-list."""
    if bad := sorted(name for name in environment if not is_allowed(name)):
        raise BadSpawn(f"env: {bad[0]} is not on the allow-list of deployments.engines.linux")


def require_private(folder: Path) -> None:
    """Raises BadSpawn unless only this user can enter the folder."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise BadSpawn(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BadSpawn(f"{folder}: need a directory of mode 0700 owned by uid {os.getuid()}")


def prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def drop_privileges() -> None:
    """No program that this process starts gets more privileges than it has (no setuid)."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the parent thread ends; ends at once when it has."""
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def claim_priority() -> None:
    """Returns to the ordinary priority, where the system lets us (root, or RLIMIT_NICE). Ray runs
    its workers at nice 15, and their children inherit it: an engine would come after all else on
    its node. Proxy and replicas stay at 15: on two cores a first token takes 40 ms less so than
    with them at the engine's priority."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, min(0, os.getpriority(os.PRIO_PROCESS, 0)))


def set_name(name: str) -> None:
    """The name `ps` and `top` show; the kernel keeps 15 bytes."""
    prctl(_PR_SET_NAME, name.encode()[:15])


def reseed() -> None:
    """Seeds every random generator anew: forks of one zygote must not draw the same numbers."""
    seed = int.from_bytes(os.urandom(8), "little")
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed % 2**63)


def take_environment(own: Mapping[str, str]) -> None:
    """Sets the variables of this engine alone. Its temporary files go where TMPDIR says and are
    removed with it; what torch compiles stays where the next engine finds it."""
    cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    os.environ.update(own)
    if scratch := own.get("TMPDIR"):
        Path(scratch).mkdir(mode=0o700, exist_ok=True)
        _name_shared_memory(Path(scratch).stem)
    tempfile.tempdir = None  # looked up anew: it was before the fork


def close_all_but(*keep: int) -> None:
    """Closes every descriptor above stderr except these."""
    held = {int(name) for name in os.listdir("/proc/self/fd")}
    for fd in held - {0, 1, 2, *keep}:
        try:
            os.close(fd)
        except OSError:  # the listing's own descriptor is gone already
            continue


def threads() -> list[str]:
    """The names of this process's threads as the kernel has them, native ones included, the first
    thread's first."""
    folder = Path("/proc/self/task")
    return [(folder / n / "comm").read_text().strip() for n in sorted(os.listdir(folder), key=int)]


def end(status: int) -> NoReturn:
    """Ends this process now, and its process group when it leads one."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(status)


def share_code() -> None:
    """Maps the code that engines run, so that its pages count as shared with the zygote and not as
    an engine's own: 20 MB less per engine."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_, path = line.split(maxsplit=5)
        if mode in ("r-xp", "r--p") and _HOT_CODE.search(path):
            start, end = (int(part, 16) for part in span.split("-"))
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_READ)


def _name_shared_memory(scratch: str) -> None:
    """Has the shared memory of Python's multiprocessing named for the engine, as its temporary
    files are: the node agent removes what a killed engine has left (`Children.unlink`)."""
    names: Any = shared_memory
    names._SHM_NAME_PREFIX = f"/{scratch}-"
    names._SHM_SAFE_NAME_LENGTH = len(names._SHM_NAME_PREFIX) + 2 * _RANDOM_BYTES


def shared_memory_prefix() -> str:
    """Returns what the names of this engine's shared memory begin with."""
    names: Any = shared_memory
    return str(names._SHM_NAME_PREFIX).removeprefix("/")


def unname_shared_memory() -> None:
    """Takes the names of the shared memory that this process has mapped, once all processes that
    share it have: it then goes with the last of them, also when they and the agent are killed."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith(f"/dev/shm/{shared_memory_prefix()}"):
            Path(path).unlink(missing_ok=True)


def _whole_pages(address: int, size: int) -> tuple[int, int]:
    """Begin and end of the whole pages within a span; without any, the end is not after the
    begin."""
    page = mmap.PAGESIZE
    return -(-address // page) * page, (address + size) // page * page


def blank(address: int, size: int) -> None:
    """Zero `size` bytes of private anonymous memory by giving its pages back to the kernel: they
    cost nothing until they are touched again. Raises OSError."""
    start, end = _whole_pages(address, size)
    if start >= end:
        ctypes.memset(address, 0, size)
        return
    ctypes.memset(address, 0, start - address)
    ctypes.memset(end, 0, address + size - end)
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Prefault:
    """Gives untouched memory its pages, at a lower priority than the rest of this process.

    A large cache would be zeroed page by page when it is made. So no first token waits for that,
    and still the kernel soon sees what the process will hold."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, spans: list[tuple[int, int]]) -> None:
        """`spans`: addresses and sizes, which must stay mapped until `stop` has returned."""
        self._thread = threading.Thread(target=self._fill, args=(spans,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when no further page will be filled. Harmless without a start."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _fill(self, spans: list[tuple[int, int]]) -> None:
        own_nice = os.getpriority(os.PRIO_PROCESS, 0)  # this thread's; only root may lower it
        os.setpriority(os.PRIO_PROCESS, 0, max(_FILLING_NICE, own_nice))
        for address, size in spans:
            start, end = _whole_pages(address, size)
            for at in range(start, end, _FILLED_AT_ONCE):
                if self._stopped.is_set():
                    return
                length = ctypes.c_size_t(min(end - at, _FILLED_AT_ONCE))
                _libc.madvise(ctypes.c_void_p(at), length, _POPULATE_WRITE)
