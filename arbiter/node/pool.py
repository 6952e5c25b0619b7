"""The pool of one node: slabs, in which engines keep what should outlive them (E1, E4).

A slab is a memory file that the agent made and holds; one engine at a time writes it
(arbiter.pool.slab). The engine's death gives it back as it is, and the next engine of the same
model and key finds in it what the last one left. Before each reading that it sends, the agent
writes into every slab how many bytes it may take: so the pool stays within its budget without a
message to any engine. KV that must leave the RAM is saved to a file first (G4), unless there is no
time.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from arbiter.core.events import ContentReading, SlabDropped, SlabReading
from arbiter.errors import SlabUnusable
from arbiter.node import procfs
from arbiter.node.content_totals import ContentTotals
from arbiter.node.slab_files import Save, SlabFiles
from arbiter.pool import Removal, SlabView, create
from arbiter.pool.layout import EXTENT_BYTES, PAGE_BYTES
from arbiter.pool.slab import NAME
from arbiter.protocol.messages import SlabRequest
from arbiter.units import Bytes, Content, Span, TicketId

logger = logging.getLogger("arbiter.agent")

SHARE_FRACTION = 0.1  # of the node's RAM, where no size is configured
HIGH_FRACTION, LOW_FRACTION = 0.90, 0.80  # of the budget: above the first it shrinks to the second
KEPT_FREE_FRACTION = 0.05  # of the node's RAM, which the pool leaves to others
# Of what is kept free: with less available, no slab is saved before it goes.
CRITICAL_FRACTION = 0.5
SWEEP_S = 300.0  # G4
# An agent that ends saves slabs for this long: 2.4 GiB. An arbiter waits 10 s for its end.
END_S = 6.0
_LEAST_BYTES = 2 * EXTENT_BYTES  # a pool that holds less serves nothing
_STEP_BYTES = 2 * EXTENT_BYTES  # what a writer may grow by until the next reading
_LINK_PREFIX = f"/memfd:{NAME}-"  # of what /proc/PID/fd shows for a slab's file


@dataclass(frozen=True, slots=True)
class IdleCopy:
    """Describes a copy of models' files in host RAM that no engine has open (host_copies). It is in
    no slab and not within the pool's budget, but where RAM is short it leaves in one order with
    slabs."""

    key: str
    owner: str
    size_bytes: Bytes
    idle_since_s: float
    drop: Callable[[], None]

    @property
    def value(self) -> tuple[int, float]:
        return Content.WEIGHTS.rank, self.idle_since_s


@dataclass(slots=True)
class PooledSlab:
    """Describes one slab, lent to the engine of `ticket` or idle."""

    name: str  # among those of the node
    request: SlabRequest
    fd: int
    view: SlabView
    ticket: TicketId | None = None
    idle_since_s: float = field(default_factory=time.monotonic)
    # Under way while the slab is idle. It ends unwanted when the slab is lent or dropped meanwhile:
    # that is noted before an engine can open the slab, and a save looks for the note after it has
    # read the last row. So no file has bytes that an engine was writing. A file that was whole just
    # before is right, and stays: the engine is told of it too, and prefers its rows in RAM.
    save: Save | None = None
    leaves_for: str = ""  # the reason of the save
    erasing: list[Removal] = field(default_factory=list)  # of which its writer is to be told
    is_removed: bool = False  # its model was, while an engine had the slab: it ends with the engine
    # Of rows that no mark shows any more, while the slab is idle. It is lent to no engine before:
    # a writer may take such a row again. Where the agent ends first, the memory ends with it.
    overwriting: Future[None] | None = None

    @property
    def may_be_lent(self) -> bool:
        return self.ticket is None and (self.overwriting is None or self.overwriting.done())

    @property
    def value(self) -> tuple[int, float]:
        """Orders idle slabs: the least leaves first."""
        return self.request.content.rank, self.idle_since_s

    @property
    def may_be_saved(self) -> bool:
        """Says whether a file is worth it: only for KV, because anything else has a file already or
        is soon computed anew."""
        return self.request.content is Content.KV

    def end_save(self) -> None:
        """Lets a save that is under way make no file."""
        if self.save is not None:
            self.save.unwanted.set()
        self.save = None

    def give_back(self) -> None:
        """Gives its memory back at once; no engine has it open. A save that still reads it, perhaps
        for a disk that hangs, is unwanted: it finds zeros now, and makes no file."""
        self.end_save()
        try:
            self.view.empty()
        finally:
            self.close()

    def close(self) -> None:
        """Gives its memory back, once no engine has it open and no save reads it."""
        self.end_save()
        self.view.close()
        os.close(self.fd)

    def reading(self) -> SlabReading:
        counts = self.view.counts
        return SlabReading(
            slab=self.name,
            content=self.request.content,
            owner=self.request.owner,
            namespace=self.view.namespace.hex()[:12],
            ticket=self.ticket,
            allocated_bytes=self.view.allocated_bytes,
            limit_bytes=self.view.limit_bytes,
            rows_count=counts.ready_count,
            hits_count=counts.hits_count,
            misses_count=counts.misses_count,
            stored_count=counts.stored_count,
            evicted_count=counts.evicted_count,
            refused_count=counts.refused_count,
            restored_count=counts.restored_count,
            load=Span(counts.load_ns),
            restore=Span(counts.restore_ns),
            must_erase=(bool(self.erasing) and self._is_written) or self.view.must_erase,
            hot_count=counts.hot_count if self.ticket else 0,
            hot_hits_count=counts.hot_hits_count,
        )

    def erase_tenant(self, removal: Removal, thread: Executor) -> None:
        """Erases a tenant's rows: at once where the slab is idle, the bytes in the thread, else by
        its writer, which `order_erasures` tells."""
        if self.ticket is not None:
            self.erasing.append(removal)
            return self.order_erasures()
        self.end_save()  # it may have read some of them
        self._erase(removal, thread)

    def _erase(self, removal: Removal, thread: Executor) -> None:
        if rows := self.view.clear_tenant(removal):
            self.overwriting = thread.submit(self.view.overwrite, rows)

    @property
    def _is_written(self) -> bool:
        """Says whether an engine has ever opened it as its writer."""
        return self.view.geometry is not None

    def order_erasures(self) -> None:
        """Gives the writer the next removal, once it has carried out the last. An engine that has
        not opened the slab yet may never do so, but it may know the file with the tenant's rows
        already, and bring them back: its removals wait until it has."""
        if self.erasing and self._is_written and self.view.order_erasure(self.erasing[0]):
            del self.erasing[0]

    def carry_out_erasures(self, thread: Executor) -> None:
        """Erases the rows that the writer was told to erase and had not erased when it ended."""
        if (removal := self.view.ordered_removal) is not None:
            self.erasing.append(removal)
            self.view.finish_erasure()
        for removal in self.erasing:
            self._erase(removal, thread)
        self.erasing.clear()


class Pool:
    """Keeps the slabs of a node. `budget_bytes`: the most that all may take; None: a share of the
    RAM. `files`: where idle KV goes when it must leave the RAM; None: nowhere. `sweep_s`: seconds
    between two looks for slabs and files in which every row has expired."""

    def __init__(
        self,
        budget_bytes: Bytes | None,
        files: SlabFiles | None = None,
        sweep_s: float = SWEEP_S,
    ) -> None:
        self.files, self._sweep_s = files, sweep_s
        total_bytes, _ = procfs.ram()
        share = Bytes(int(SHARE_FRACTION * total_bytes))
        self.budget_bytes = share if budget_bytes is None else budget_bytes
        self._kept_free_bytes = int(KEPT_FREE_FRACTION * total_bytes)
        self._slabs: list[PooledSlab] = []
        self._dropped: list[SlabDropped] = []  # not yet told
        self._made_count = 0
        self._last_save: Save | None = None  # no other begins before it is done
        # Overwrites rows and gives memory back, each a second for some GiB, one after the other.
        self._thread = ThreadPoolExecutor(1, "slabs")
        self._leaving: list[tuple[Bytes, Future[None]]] = []  # dropped, and not yet given back
        self._swept_s = time.monotonic()
        self._totals = ContentTotals()
        if files is not None:
            files.sweep()

    @property
    def allocated_bytes(self) -> Bytes:
        return Bytes(sum(slab.view.allocated_bytes for slab in self._slabs))

    @property
    def leaving_bytes(self) -> Bytes:
        """Returns the bytes that dropped slabs have not given back yet."""
        self._leaving = [leaving for leaving in self._leaving if not leaving[1].done()]
        return Bytes(sum(size for size, _ in self._leaving))

    # -- lending ---------------------------------------------------------------------------------

    def lend(self, ticket: TicketId, request: SlabRequest) -> int | None:
        """Returns the descriptor of the slab that the ticket's engine may write until it ends: an
        idle one of the same place (`SlabRequest.place`), else a new one. None: there is no pool, or
        the machine has no memory for another slab, without which the engine loads as well."""
        if self.budget_bytes < _LEAST_BYTES:
            return None
        idle = [s for s in self._slabs if s.may_be_lent and s.request.place == request.place]
        try:
            slab = max(idle, key=lambda s: s.idle_since_s, default=None) or self._make(request)
            most = self._most(self._physical(procfs.ram()[1]))
        except (OSError, SlabUnusable) as error:
            logger.warning("no slab for %s: %s", request.owner, error)
            return None
        slab.end_save()
        slab.ticket = ticket
        self._set_limits(most)
        return slab.fd

    def lent(self, ticket: TicketId, content: str) -> tuple[int, ...]:
        """Returns the descriptor of the slab that a ticket's engine may write; none where it was
        lent none."""
        for slab in self._slabs:
            if slab.ticket == ticket and slab.request.content == content:
                return (slab.fd,)
        return ()

    def file_for(self, request: SlabRequest) -> str | None:
        """Returns the path of the file with what an earlier slab of that key held, if there is
        one."""
        return self.files.find(request) if self.files else None

    def writers(self, request: SlabRequest) -> list[TicketId]:
        """Returns the tickets whose engines write such slabs; none where one of these slabs is
        idle."""
        tickets = [s.ticket for s in self._slabs if s.request.place == request.place]
        return [] if None in tickets else [ticket for ticket in tickets if ticket is not None]

    async def overwritten(self, request: SlabRequest, within_s: float) -> None:
        """Returns once no such slab waits for its rows to be overwritten, or at the latest then."""
        of_place = (s.overwriting for s in self._slabs if s.request.place == request.place)
        if pending := {asyncio.wrap_future(done) for done in of_place if done}:
            await asyncio.wait(pending, timeout=within_s)

    def take_back(self, ticket: TicketId) -> None:
        """Takes back the slabs of a ticket whose engine has ended, or was never started."""
        for slab in self._slabs:
            if slab.ticket == ticket:
                slab.ticket, slab.idle_since_s = None, time.monotonic()
                slab.carry_out_erasures(self._thread)
        for slab in [s for s in self._slabs if s.ticket is None and s.is_removed]:
            self._drop(slab, "removed")

    def recover(self, ticket: TicketId, pids: Iterable[int]) -> None:
        """Finds the slabs again that engines had open when an earlier agent ended. Its idle slabs
        ended with it. What the ticket was lent meanwhile in the place of such a slab is idle."""
        inodes = {os.fstat(slab.fd).st_ino for slab in self._slabs}
        for pid in pids:
            for path in _open_slabs(pid):
                slab = self._adopt(path)
                if slab is None:
                    continue
                if os.fstat(slab.fd).st_ino in inodes:
                    slab.close()
                    continue
                inodes.add(os.fstat(slab.fd).st_ino)
                for other in self._slabs:
                    if (other.ticket, other.request.place) == (ticket, slab.request.place):
                        other.ticket = None
                slab.ticket = ticket
                self._slabs.append(slab)

    def _make(self, request: SlabRequest) -> PooledSlab:
        """Makes a new slab. Raises OSError, SlabUnusable."""
        size = int(self.budget_bytes) // PAGE_BYTES * PAGE_BYTES
        slab = self._viewed(request, create(_label(request), Bytes(size)))
        self._slabs.append(slab)
        return slab

    def _adopt(self, path: Path) -> PooledSlab | None:
        """Takes over a slab that an engine has open since an earlier life of the agent. None: the
        engine has just ended, or the file only has the name of a slab."""
        try:
            request = _request(os.readlink(path))
            return self._viewed(request, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except (OSError, ValueError, SlabUnusable):
            return None

    def _viewed(self, request: SlabRequest, fd: int) -> PooledSlab:
        """Returns a slab by its descriptor. Raises SlabUnusable, and then the descriptor is
        closed."""
        try:
            view = SlabView(fd)
        except SlabUnusable:
            os.close(fd)
            raise
        return PooledSlab(self._next_name(), request, fd, view)

    def _next_name(self) -> str:
        self._made_count += 1
        return str(self._made_count)

    # -- keeping to the budget -------------------------------------------------------------------

    def enforce_budget(self, copies: Sequence[IdleCopy] = ()) -> None:
        """Drops what is to go, of slabs and of `copies`, and tells every writer how much it may
        take."""
        self._drop_saved()
        _, available_bytes = procfs.ram()
        physical = self._physical(available_bytes)
        if self.allocated_bytes > HIGH_FRACTION * self._most(physical):
            has_time = available_bytes >= CRITICAL_FRACTION * self._kept_free_bytes
            physical = self._drop_some(copies, physical, self.files if has_time else None)
        if time.monotonic() - self._swept_s > self._sweep_s:
            self._sweep()
        self._set_limits(self._most(physical))
        for slab in self._slabs:
            slab.order_erasures()

    def _physical(self, available_bytes: Bytes) -> int:
        """Returns the bytes of RAM that slabs could take, where so many are available."""
        taken_bytes = self.allocated_bytes + self.leaving_bytes
        return taken_bytes + available_bytes - self._kept_free_bytes

    def _most(self, physical_bytes: int) -> int:
        """Returns the most that all slabs may take, where so many bytes of RAM could be theirs."""
        return max(0, min(self.budget_bytes, physical_bytes))

    def drop_tenant(self, removal: Removal) -> None:
        """Erases what leaves with a removed tenant (E6): in idle slabs no mark shows it from now on
        and its bytes go soon, as in files; in lent slabs their writers erase it."""
        for slab in self._slabs:
            slab.erase_tenant(removal, self._thread)
        if self.files:
            self.files.erase_tenant(removal)

    def drop_owner(self, owner: str) -> None:
        """Erases what belongs to a removed model (D9). Its engines have ended by then, or are being
        killed: the slab of such an engine goes as it comes back."""
        for slab in [s for s in self._slabs if s.request.owner == owner]:
            if slab.ticket is None:
                self._drop(slab, "removed")
            else:
                slab.is_removed = True
        if self.files:
            self.files.erase(owner)

    def readings(self) -> tuple[SlabReading, ...]:
        return tuple(slab.reading() for slab in self._slabs)

    def contents(self) -> tuple[ContentReading, ...]:
        """Returns what was done with each content since this pool was made."""
        return self._totals.readings([(s.request.content, s.view) for s in self._slabs])

    def dropped(self) -> tuple[SlabDropped, ...]:
        """Returns the slabs that left since the last `forget_dropped`."""
        return tuple(self._dropped)

    def forget_dropped(self, dropped: tuple[SlabDropped, ...]) -> None:
        del self._dropped[: len(dropped)]

    def save_idle(self, within_s: float = END_S) -> None:
        """Saves idle KV before the memory ends with this process, the slabs that were used last
        first, as far as the time goes. Returns when that is done. No engine may be lent a slab."""
        files, ends_s = self.files, time.monotonic() + within_s
        if files is None:
            return
        idle = [s for s in self._slabs if s.ticket is None and s.may_be_saved]
        for slab in sorted(idle, key=lambda slab: -slab.idle_since_s):
            if slab.save is None or slab.save.is_done:
                slab.save = files.save(slab.fd, slab.request, max(0.0, ends_s - time.monotonic()))
            slab.save.ends_s = min(slab.save.ends_s, ends_s)  # also where it was under way
        wait([slab.save.file_was_made for slab in idle if slab.save], ends_s - time.monotonic())

    def close(self) -> None:
        """Waits until the thread has done what it was told."""
        self._thread.shutdown()
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()
        if self.files:
            self.files.close()

    def _drop_some(self, copies: Iterable[IdleCopy], physical: int, files: SlabFiles | None) -> int:
        """Drops one after the other down to the low mark, so that no more goes than must. With
        `files`, KV is saved first: it and what would follow it stay until a later call. Returns
        what of the RAM could be the slabs' now: more than before where a copy has left, which is of
        use to them only up to their budget."""
        idle: list[PooledSlab | IdleCopy] = [s for s in self._slabs if s.ticket is None]
        for each in sorted([*idle, *copies], key=lambda each: each.value):
            if self.allocated_bytes <= LOW_FRACTION * self._most(physical):
                break
            reason = "full" if physical >= self.budget_bytes else "pressure"
            if isinstance(each, IdleCopy):
                if reason == "pressure":
                    self._drop_copy(each, reason)
                    physical += each.size_bytes
            elif files is not None and each.may_be_saved:
                self._begin_save(each, reason, files)
                break
            else:
                self._drop(each, reason)
        return physical

    def _drop_copy(self, copy: IdleCopy, reason: str) -> None:
        copy.drop()
        name = f"copy-{copy.key[:8]}"
        dropped = SlabDropped(name, Content.WEIGHTS, copy.owner, copy.size_bytes, reason)
        self._dropped.append(dropped)

    def _begin_save(self, slab: PooledSlab, reason: str, files: SlabFiles) -> None:
        """Begins to save an idle slab to disk, unless another save is under way."""
        if self._last_save is None or self._last_save.is_done:
            slab.leaves_for = reason
            slab.save = self._last_save = files.save(slab.fd, slab.request)

    def _drop_saved(self) -> None:
        """Drops the slab whose save has ended, or failed."""
        for slab in [s for s in self._slabs if s.save is not None and s.save.is_done]:
            assert slab.save is not None
            self._drop(slab, slab.leaves_for, was_saved=slab.save.file_was_made.result())

    def _drop(self, slab: PooledSlab, reason: str, *, was_saved: bool = False) -> None:
        size = slab.view.allocated_bytes
        request = slab.request
        dropped = SlabDropped(slab.name, request.content, request.owner, size, reason, was_saved)
        self._totals.note_left(request.content, slab.view.counts, was_saved=was_saved)
        slab.end_save()
        self._leaving.append((size, self._thread.submit(slab.give_back)))
        self._slabs.remove(slab)
        self._dropped.append(dropped)

    def _sweep(self) -> None:
        self._swept_s = time.monotonic()
        for slab in [s for s in self._slabs if s.ticket is None]:
            if not slab.view.has_live_rows(time.time()):
                self._drop(slab, "stale")
        if self.files:
            self.files.sweep()

    def _set_limits(self, budget: int) -> None:
        """Divides what idle slabs leave among the writers, the lightest first: each may grow by a
        step until it has its share, and the heaviest may have the rest. A writer that has more than
        it may is asked by the arbiter to shrink."""
        idle_bytes = sum(s.view.allocated_bytes for s in self._slabs if s.ticket is None)
        # Beside idle slabs writers may pass the mark: then these leave, and the writers need not.
        remaining_bytes = max(0.0, (1.0 if idle_bytes else HIGH_FRACTION) * budget - idle_bytes)
        writers = [slab for slab in self._slabs if slab.ticket is not None]
        writers.sort(key=lambda slab: slab.view.allocated_bytes)
        for number, slab in enumerate(writers):
            share = remaining_bytes / (len(writers) - number)
            next_bytes = slab.view.allocated_bytes + max(_STEP_BYTES, share / 4)
            is_heaviest = number == len(writers) - 1
            slab.view.limit_bytes = Bytes(int(share if is_heaviest else min(share, next_bytes)))
            remaining_bytes -= slab.view.limit_bytes


def _label(request: SlabRequest) -> str:
    """Names the request in the file's name, so that an agent that starts anew knows what its
    engines have open."""
    return f"{request.content}.{request.key}.{request.owner}"


def _request(target: str) -> SlabRequest:
    """Returns the request for which a slab was made, by the target of the link to its memory file.
    Raises ValueError where that names no slab."""
    name = target.removeprefix(_LINK_PREFIX).removesuffix(" (deleted)")
    content, key, owner = name.split(".", 2)
    return SlabRequest(Content(content), owner, key)


def _open_slabs(pid: int) -> list[Path]:
    folder = procfs.PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:  # it has just ended
        return []
    return [folder / name for name in names if _target(folder / name).startswith(_LINK_PREFIX)]


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed since it was listed
        return ""
