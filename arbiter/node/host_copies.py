"""Copies of models' files in host RAM that the engines of one node share (D4).

Each is made at the first load that asks for it, under a lease of the host (copy_lease), and handed
to engines by descriptor (lending_socket). It outlives them: it leaves when nothing uses it and host
RAM is short, when a person drops it, when its files are replaced or its model leaves the table. A
copy that is to leave while engines have it open leaves with the last of them.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from arbiter.core.events import ContentReading, EngineReading, HostCopyReading
from arbiter.core.types import DeviceBytes, ModelName
from arbiter.errors import UnknownHostCopy
from arbiter.node import copy_files
from arbiter.node.copy_files import CopyFiles, SourceFiles
from arbiter.node.copy_lease import Calls, CopyLease
from arbiter.node.group_socket import GroupSocket
from arbiter.node.lending_socket import LendingSocket
from arbiter.node.pool import IdleCopy
from arbiter.protocol.messages import CopyRequest
from arbiter.units import Bytes, Content, NodeId, Span, TicketId, host_device

T = TypeVar("T")
logger = logging.getLogger("arbiter.agent")

# A file's ctime may stay as it was through a second change within one tick of the kernel's clock,
# or through a mapping that was not written back: so it is believed once it is as old as this.
# deployments/replica/model_files/loaded_files.py has the sources.
SETTLED_S = 60.0
SWEEP_S = 60.0  # between two looks for copies of replaced files; a load looks by itself
LOOK_S = 10.0  # a sweep waits for its looks; those of a file server that is away take minutes
LOADS_MOST = 8  # look, read and hash side by side, each for a folder of its own
AGAIN_S = 10.0  # before a used copy without a lease asks for one again: as long as leases lapse


@dataclass(frozen=True, slots=True)
class Source:
    """Names files on disk that had the bytes of a copy when they were looked at."""

    files: SourceFiles
    is_settled: bool  # every ctime was old enough to tell of the next change


@dataclass(slots=True, eq=False)
class HostCopy:
    """Describes one copy, and the engines that use it. It has no files while they are read."""

    lease: CopyLease
    size_bytes: Bytes
    files: CopyFiles | None = None
    models: set[ModelName] = field(default_factory=set)
    users: set[TicketId] = field(default_factory=set)
    sources: dict[CopyRequest, Source] = field(default_factory=dict)
    is_leaving: bool = False
    loads_count: int = 0  # the first of them made it
    idle_since_s: float = 0.0  # while it has no user

    @property
    def users_count(self) -> int:
        return len(self.users) + (self.files is None)

    @property
    def files_count(self) -> int:
        return len(self.files.index.names) if self.files else 0

    @property
    def held_bytes(self) -> Bytes:
        return self.files.allocated_bytes if self.files else self.size_bytes

    def may_serve(self, source: SourceFiles, request: CopyRequest) -> bool:
        """Says whether the copy may serve the request, by names, sizes and mode. The bytes are yet
        to be compared."""
        if self.files is None or self.is_leaving:
            return False
        index = self.files.index
        return index.layout == source.layout and index.for_group == request.for_group

    def has(self, source: SourceFiles) -> bool:
        """Says whether the copy has the bytes of these very files, unchanged since they were
        read."""
        return any(s.files == source and s.is_settled for s in self.sources.values())

    def take_source(self, request: CopyRequest, source: SourceFiles) -> None:
        settled_ns = time.time_ns() - round(SETTLED_S * 1e9)
        self.sources[request] = Source(source, source.newest_ns < settled_ns)
        self.models.add(request.owner)

    def leave_model(self, model: ModelName) -> None:
        """Takes a model off the copy: its files were replaced, or it has left the table."""
        self.models.discard(model)
        self.sources = {r: s for r, s in self.sources.items() if r.owner != model}
        self.is_leaving = self.is_leaving or not self.models


class HostCopies:
    """Makes copies of model files and lends them to engines. `start` runs a coroutine as a task of
    the agent."""

    def __init__(
        self,
        node: NodeId,
        folder: Path,
        calls: Calls,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._node, self._calls, self._start = node, calls, start
        self._copies: list[HostCopy] = []
        self._counts: Counter[str] = Counter()  # of loads and files, also of copies that have left
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by folder
        # Engines that are yet to be lent a copy, by owner; without those whose model was removed.
        self._asking: set[tuple[str, TicketId]] = set()
        self._looks: dict[CopyRequest, asyncio.Future[bool]] = {}  # of sweeps, under way
        self._threads = ThreadPoolExecutor(LOADS_MOST, "host-copies")
        self._socket = LendingSocket(folder / "copies.sock", self._lent)
        start(self._socket.serve())
        self._group: GroupSocket | None = None  # from the first copy for the group on

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Runs work in a thread that is not one of the agent's own: it takes its readings there,
        whatever hangs here."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    # -- lending ---------------------------------------------------------------------------------

    async def lend(self, ticket: TicketId, request: CopyRequest) -> dict[str, Any] | None:
        """Lends a copy to the engine of `ticket`, until that ends; returns what the engine is told
        of it. None: there is no room or no such file, and the engine reads the files itself."""
        asking = request.owner.path, ticket
        self._asking.add(asking)
        try:
            async with self._making[request.folder]:
                copy = await self._find_or_make(request)
        except OSError as error:
            logger.warning("no host copy of %s: %s", request.owner.path, error)
            copy = None
        finally:
            was_removed = asking not in self._asking
            self._asking.discard(asking)
        if copy is None or copy.files is None:
            self._counts.update(misses=1, refused=1)
            return None
        if copy.files.index.for_group:
            self._serve_group()
        copy.users.add(ticket)
        self._counts["hits" if copy.loads_count else "misses"] += 1
        copy.loads_count += 1
        if was_removed:
            copy.leave_model(request.owner)
        for other in [c for c in self._copies if c is not copy and request.owner in c.models]:
            other.leave_model(request.owner)
            self._drop_if_left(other)
        return {"socket": str(self._socket.path), "key": copy.files.index.key, "ticket": ticket}

    def take_back(self, ticket: TicketId) -> None:
        """Takes its copies back from the ticket's engine, which has ended or was never started."""
        for copy in [c for c in self._copies if ticket in c.users]:
            copy.users.discard(ticket)
            copy.idle_since_s = time.monotonic()
            self._drop_if_left(copy)

    async def _find_or_make(self, request: CopyRequest) -> HostCopy | None:
        """Returns a copy of the files as they are now; None: there is none. Raises OSError."""
        source = await self._in_thread(copy_files.look, request)
        if source is None:
            return None
        if existing := next((c for c in self._alike(source, request) if c.has(source)), None):
            existing.take_source(request, source)
            return existing
        if self._alike(source, request):  # only the bytes tell whether one of them will do
            key = await self._in_thread(copy_files.key_of, source)
            if await self._in_thread(copy_files.look, request) != source:
                return None
            if same := self._of_key(key, source, request):
                return same
        return await self._make(request, source)

    def _alike(self, source: SourceFiles, request: CopyRequest) -> list[HostCopy]:
        return [copy for copy in self._copies if copy.may_serve(source, request)]

    def _of_key(self, key: str, source: SourceFiles, request: CopyRequest) -> HostCopy | None:
        for copy in self._alike(source, request):
            if copy.files and copy.files.index.key == key:
                copy.take_source(request, source)
                return copy
        return None

    async def _make(self, request: CopyRequest, source: SourceFiles) -> HostCopy | None:
        """Makes a copy. None: its lease was refused, or the files changed while they were read.
        Raises OSError."""
        name = _new_name()
        lease = CopyLease(self._calls, self._node, name, request.owner.path, source.size_bytes)
        if not await lease.acquire():
            return None
        copy = HostCopy(lease, source.size_bytes)
        self._copies.append(copy)
        self._start(self._keep(copy))
        files: CopyFiles | None = None
        try:
            files = await self._in_thread(copy_files.make, source, name, request)
            is_same = await self._in_thread(copy_files.look, request) == source
        except OSError:
            copy.files = files  # which leave with it
            self._drop(copy)
            raise
        # Another folder's load may have made the same copy meanwhile.
        new_copy = self._of_key(files.index.key, source, request) if is_same else None
        copy.files = files
        if new_copy is not None or not is_same:
            self._drop(copy)
            return new_copy
        copy.take_source(request, source)
        self._counts["stored"] += copy.files_count
        return copy

    def _lent(self, ticket: TicketId, key: str) -> tuple[int, ...]:
        """Returns the descriptors of a lent copy, which can only read."""
        for copy in self._copies:
            if ticket in copy.users and copy.files and copy.files.index.key == key:
                return copy.files.fds
        return ()

    def _serve_group(self) -> None:
        """Opens the socket for processes of the group. A copy is of use to engines without it."""
        if self._group is None:
            try:
                self._group = GroupSocket(self._node, self._used_by_group, self.take_back)
            except OSError as error:
                logger.warning("no process of the group is handed copies: %s", error)
                return
            self._start(self._group.serve())

    def _used_by_group(self, user: TicketId, key: str) -> tuple[int, ...]:
        """Returns the descriptors of a copy for the group, which has this user from now on."""
        for copy in self._copies:
            if copy.files and not copy.is_leaving:
                index = copy.files.index
                if index.for_group and index.key == key:
                    copy.users.add(user)
                    return copy.files.fds
        return ()

    # -- its lease -------------------------------------------------------------------------------

    async def _keep(self, copy: HostCopy) -> None:
        """Renews its lease. A copy in use whose lease has lapsed asks for another; until it has one
        its bytes count as foreign."""
        while copy in self._copies:
            if copy.lease.is_held:
                await copy.lease.hold(
                    lambda: copy.users_count,
                    lambda: self._give_way(copy),
                    lambda: copy not in self._copies,
                )
            elif not copy.users_count:
                self._drop(copy)
            elif not await copy.lease.acquire():
                await asyncio.sleep(AGAIN_S)
                copy.lease = copy.lease.anew(_new_name())

    def _give_way(self, copy: HostCopy) -> None:
        """Drops an idle copy because host RAM is needed. A copy that engines have open stays."""
        if copy in self._copies and not copy.users_count:
            self._counts["evicted"] += copy.files_count
            self._drop(copy)

    def end(self, ticket: TicketId) -> bool:
        """Gives way because the arbiter wants the lease of this ticket ended. Returns whether a
        copy still has that lease: a copy in use stays, and asks for another."""
        for copy in [c for c in self._copies if c.lease.ticket == ticket]:
            self._give_way(copy)
            return copy in self._copies
        return False

    def recover(self, ticket: TicketId, pids: Iterable[int]) -> None:
        """Finds the copies again that engines had open when an earlier agent ended. Those that no
        engine had open ended with it."""
        for files in (files for pid in pids for files in copy_files.held_by(pid)):
            name = files.index.lease
            copy = next((c for c in self._copies if c.files and c.files.index.lease == name), None)
            if copy is None:
                size, label = files.allocated_bytes, files.index.owner.path
                lease = CopyLease(self._calls, self._node, name, label, size)
                copy = HostCopy(lease, size, files, {files.index.owner}, loads_count=1)
                self._copies.append(copy)
                self._start(self._keep(copy))
            else:
                files.close()
            copy.users.add(ticket)

    # -- leaving ---------------------------------------------------------------------------------

    def drop(self, key: str) -> bool:
        """Drops copies by hand. False: a copy leaves with the last engine that has it open. Raises
        UnknownHostCopy."""
        copies = [c for c in self._copies if c.files and c.files.index.key == key]
        if not copies:
            raise UnknownHostCopy(key)
        for copy in copies:
            copy.is_leaving = True
            self._drop_if_left(copy)
        return not any(copy in self._copies for copy in copies)

    def drop_owner(self, owner: str) -> None:
        """Takes a model that has left the table off its copies, also off those that are yet to be
        lent (D9)."""
        self._asking = {asking for asking in self._asking if asking[0] != owner}
        for copy in list(self._copies):
            for model in [m for m in copy.models if m.path == owner]:
                copy.leave_model(model)
            self._drop_if_left(copy)

    async def keep_swept(self) -> None:
        """Sweeps for ever. A file server that is away keeps a look for minutes, so nothing else may
        wait for one."""
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Drops copies whose files have been replaced. A look that takes longer than LOOK_S counts
        when it ends, and is not repeated meanwhile."""
        for copy in self._copies:
            for request, source in copy.sources.items():
                if request not in self._looks:
                    self._looks[request] = self._begin_look(copy, request, source)
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=LOOK_S)

    def _begin_look(
        self, copy: HostCopy, request: CopyRequest, source: Source
    ) -> asyncio.Future[bool]:
        """Looks in a thread of its own whether the files have changed, so that looks that hang take
        none of the agent's."""
        thread = ThreadPoolExecutor(1, "host-copy-look")
        loop = asyncio.get_running_loop()
        look = loop.run_in_executor(thread, _has_changed, request, source.files)
        thread.shutdown(wait=False)
        look.add_done_callback(partial(self._end_look, copy, request, source))
        return look

    def _end_look(
        self, copy: HostCopy, request: CopyRequest, source: Source, look: asyncio.Future[bool]
    ) -> None:
        del self._looks[request]
        if not look.cancelled() and look.result() and copy.sources.get(request) is source:
            copy.leave_model(request.owner)
        self._drop_if_left(copy)

    def idle(self) -> tuple[IdleCopy, ...]:
        """Returns the copies that may leave now, because no engine has them open."""
        return tuple(
            IdleCopy(
                copy.files.index.key,
                copy.files.index.owner.path,
                copy.held_bytes,
                copy.idle_since_s,
                partial(self._give_way, copy),
            )
            for copy in self._copies
            if copy.files and not copy.users
        )

    def _drop_if_left(self, copy: HostCopy) -> None:
        if copy.is_leaving and not copy.users_count and copy in self._copies:
            self._drop(copy)

    def _drop(self, copy: HostCopy) -> None:
        self._copies.remove(copy)
        if copy.files:
            copy.files.close()
        self._start(copy.lease.end())

    def close(self) -> None:
        """Drops every copy. Their leases end with the arbiter, which ends with its agents."""
        self._socket.close()
        if self._group:
            self._group.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for copy in self._copies:
            if copy.files:
                copy.files.close()
        self._copies.clear()

    # -- readings --------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> Bytes:
        return Bytes(sum(copy.held_bytes for copy in self._copies))

    def engine_readings(self) -> tuple[EngineReading, ...]:
        """Returns what each copy takes, as a reading of the ticket of its lease."""
        host = host_device(self._node)
        return tuple(
            EngineReading(c.lease.ticket, (DeviceBytes(host, c.held_bytes),)) for c in self._copies
        )

    def readings(self) -> tuple[HostCopyReading, ...]:
        return tuple(
            HostCopyReading(
                copy.files.index.key,
                copy.lease.ticket,
                tuple(sorted(copy.models)),
                tuple(sorted(copy.users)),
                copy.held_bytes,
                copy.is_leaving,
                files_count=copy.files_count,
                hits_count=copy.loads_count - 1,
                socket=self._socket_for(copy.files),
            )
            for copy in self._copies
            if copy.files is not None
        )

    def _socket_for(self, files: CopyFiles) -> str:
        return str(self._group.path) if self._group and files.index.for_group else ""

    def contents(self) -> tuple[ContentReading, ...]:
        """Returns what was done with weights since this agent began (E7), where a row is a file,
        and a load that finds its copy is a hit. Empty before the first load that asks for a
        copy."""
        if not self._counts and not self._copies:
            return ()
        return (
            ContentReading(
                Content.WEIGHTS,
                self.held_bytes,
                rows_count=sum(copy.files_count for copy in self._copies),
                hits_count=self._counts["hits"],
                misses_count=self._counts["misses"],
                stored_count=self._counts["stored"],
                evicted_count=self._counts["evicted"],
                refused_count=self._counts["refused"],
                restored_count=0,
                saves_count=0,
                load=Span(0),
                restore=Span(0),
            ),
        )


def _new_name() -> str:
    return f"copy-{uuid.uuid4().hex[:16]}"


def _has_changed(request: CopyRequest, source: SourceFiles) -> bool:
    try:
        return copy_files.look(request) != source
    except OSError:
        return False  # not looked
