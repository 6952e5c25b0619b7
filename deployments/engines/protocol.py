"""What an engine author writes, and what the zygote is told.

An engine is one module or package, which alone imports its library and has one function
`build(config) -> Engine`. The function runs in a process of its own, forked a moment ago from the
zygote, single threaded, with no event loop: the place to fork helpers or set thread counts. The
host (deployments.engines.host) then calls `load` in an event loop and serves `app` on a unix
socket. Killing the process is the unload, so there is none here and no state can outlive it.
`sleep`, `wake` and `probe` are called only where `can_sleep` is True; an engine that never sleeps
leaves them out.

    class Echo:
        can_sleep = True

        def __init__(self, config) -> None: ...                 # see Config; no event loop yet

        async def load(self) -> None: ...                       # allocate; raise to fail
        async def app(self, scope, receive, send) -> None: ...  # OpenAI routes, ASGI
        async def sleep(self) -> None: ...                      # weights to host RAM
        async def wake(self) -> None: ...                       # and back, no disk
        async def probe(self) -> str: ...                       # one token or one step, as text
        async def health(self) -> None: ...                     # raise when it cannot serve
        async def purge(self) -> None: ...                      # only where it has caches

An engine with a prefix cache may serve `POST /prewarm` too, as
deployments.engines.vllm.routes.prewarm does; another answers 404.

    build = Echo

Then one line of the configuration names it: `engine: my_package.echo:build`.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from deployments.routing.pieces import KeptKv

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
# What `build` is given: JSON that deployments.config.load_plan makes and the node agent completes.
# Always: "model" (a folder, or as the source was written), "served_name", "can_sleep" and
# "engine_args". The rest only where the configuration or the grant has it:
#   "threads", "adapters", "merged"     as load_plan says
#   "dispatch_lock"                     the lock under which the engine computes
#   "parts"                             bytes on each GPU, of a ticket over several
#   "grows_to"                          the `engine_args` after a growth
#   "drafter"                           {"model", "tokens"}
#   "slabs"                             by content, the slabs of the pool that were lent (lent.py)
#   "host_copy"                         {"own_bytes"}: what it may hold asleep beside a shared copy
#   "shared_copy"                       that copy, where it was lent: a SharedCopy, and no JSON
Config = dict[str, Any]

# A header by which an engine says that it refused a request for want of memory that its
# configuration lets it grow to (`grows_to`). The answer is its refusal; it is asked again, grown.
COULD_GROW = "x-engine-could-grow"

MAX_LINE_BYTES = 1 << 20  # a spawn message with thousands of adapter paths is ~200 KB
MAX_SOCKET_PATH = 107  # sockaddr_un: 108 bytes with the closing zero (unix(7))

_TICKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # it names log files
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Engine(Protocol):
    """One loaded model. Every method may raise whatever the library raises; the host turns it into
    the cause that the holder is told."""

    can_sleep: bool

    async def load(self) -> None:
        """Brings the model from disk. Called again when `probe` after a wake gave another answer
        than before the sleep; then it may raise CannotReload."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: the data routes, in OpenAI's shapes."""

    async def sleep(self) -> None:
        """Moves the weights to host RAM, in memfds named `host-copy*`, and drops all else."""

    async def wake(self) -> None:
        """Undoes `sleep` from host RAM alone."""

    async def probe(self) -> str:
        """A short deterministic answer; equal before a sleep and after its wake."""

    async def health(self) -> None:
        """Raises when the engine cannot answer requests."""


@runtime_checkable
class Purges(Protocol):
    """An engine that keeps something only to answer sooner: it may be told to drop it."""

    async def purge(self) -> None:
        """Drops what no request is using."""


@runtime_checkable
class ShrinksSlabs(Protocol):
    """An engine that writes slabs of the node's pool."""

    async def shrink_slabs(self) -> None:
        """Erases the rows that the owner of its slabs ordered erased, and gives back the bytes
        that the owner no longer permits. Called awake and asleep."""


@runtime_checkable
class CapsSlabs(Protocol):
    """An engine whose slabs keep tenants to caps."""

    async def cap_slabs(self, caps: dict[str, float]) -> None:
        """Keeps each tenant to its part of the rows from now on; a tenant without an entry may have
        all. Called awake and asleep."""


@runtime_checkable
class ForgetsTenants(Protocol):
    """An engine that keeps something of one tenant between its requests: its own adapters."""

    async def forget_tenant(self, tenant: str) -> None:
        """Unloads what is the tenant's own; what is in use goes with the end of its last request.
        Called awake and asleep."""


@runtime_checkable
class TellsKept(Protocol):
    """An engine whose prefix cache loses first what was used longest ago."""

    def kept_kv(self) -> KeptKv:
        """Says of which requests it holds most of the KV, by when they came. Called awake and
        asleep, and waits for nothing."""


@runtime_checkable
class DropsDrafter(Protocol):
    """An engine whose drafter may leave while it serves."""

    async def drop_drafter(self) -> bool:
        """Gives the drafter's memory back and goes on without it, until the next load. False:
        nothing has changed, and only a new process is without it."""


class CannotSleep(Exception):
    """The engine has no sleep, is not loaded, or has no copy to sleep in."""


class CannotReload(Exception):
    """What the engine lost lies in no file, so that only a new process brings it back."""


class EngineLoadFailed(Exception):
    """A load that did not succeed, as its engine tells it; `kind` is the library's own error class.
    The holder raises arbiter.errors.LoadFailed for it."""

    def __init__(self, kind: str, message: str, out_of_memory: bool) -> None:
        super().__init__(kind, message, out_of_memory)
        self.kind, self.message, self.out_of_memory = kind, message, out_of_memory

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


# Words of libraries when memory is the cause; torch and vLLM raise RuntimeError or ValueError.
_MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "free memory on device",
    "no available memory for the cache",
    "kv cache is needed, which is larger than the available",
)


# What ends a task or the process from outside. Everything else is a failure of what was done, an
# error that is no Exception too: a panic of a library in Rust is none (pyo3's PanicException).
ENDINGS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)


def load_failure(error: BaseException) -> EngineLoadFailed:
    """The cause of a failed load, from any error."""
    if isinstance(error, EngineLoadFailed):
        return error
    text = str(error) or repr(error)
    memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
    memory = memory or any(words in text.lower() for words in _MEMORY_WORDS)
    return EngineLoadFailed(type(error).__name__, text, memory)


class BadSpawn(ValueError):
    """A spawn message that the zygote refuses."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """Everything that an engine process needs. `socket` lies in a directory that only its owner may
    enter."""

    ticket: str
    entry: str  # `module:function`, called with `config` in the child
    config: Config
    env: dict[str, str]
    socket: Path

    @property
    def log(self) -> Path:
        """The child's stdout and stderr."""
        return self.socket.with_suffix(".log")


def parse_spawn(raw: dict[str, Any]) -> Spawn:
    """Reads a spawn message. Raises BadSpawn that names the bad field."""
    spawn = Spawn(
        _text(raw, "ticket"),
        _text(raw, "entry"),
        _mapping(raw, "config"),
        {name: str(value) for name, value in _mapping(raw, "env").items()},
        Path(_text(raw, "socket")),
    )
    if not _TICKET.fullmatch(spawn.ticket):
        raise BadSpawn(f"ticket: {spawn.ticket!r} is not a plain name")
    if not _ENTRY.fullmatch(spawn.entry):
        raise BadSpawn(f"entry: {spawn.entry!r} is not `module:function`")
    if not spawn.socket.is_absolute() or len(str(spawn.socket)) > MAX_SOCKET_PATH:
        raise BadSpawn(f"socket: need an absolute path of at most {MAX_SOCKET_PATH} bytes")
    return spawn


def _text(raw: dict[str, Any], field: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str):
        raise BadSpawn(f"{field}: expected text, got {type(value).__name__}")
    return value


def _mapping(raw: dict[str, Any], field: str) -> dict[str, Any]:
    value = raw.get(field, {})
    if not isinstance(value, dict):
        raise BadSpawn(f"{field}: expected an object, got {type(value).__name__}")
    return value
