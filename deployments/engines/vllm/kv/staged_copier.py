"""Copies KV blocks between a GPU and a slab, beside the steps of the engine.

Rows of a slab are not pinned (see lent_slab.mapped_rows), and CUDA copies to and from such memory
within the call: the engine would wait in each step for the last one's blocks. So blocks pass
through a pinned buffer, in a thread for each direction (docs/adr/0051).
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from arbiter.units import MIB

BUFFER_BYTES = 32 * MIB  # pinned, for each direction


class Device(Protocol):
    """What a lane needs of its GPU. One for each direction."""

    def submitted(self) -> Any:
        """Returns a mark behind all work that the engine has given the device so far. Called by the
        engine."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Returns a context, within which all work before the mark is done and copies may be made.
        Called by the lane's thread."""

    def copy(self, blocks: np.ndarray, group: int) -> None:
        """Copies blocks of a group to or from the first rows of the buffer, as many; returns once
        they are there. Called by the lane's thread."""


class StagedCopier(OffloadingWorker):
    """The worker's side on a GPU. `rows`: the slab's part of this worker, shape [rows, bytes of a
    block]."""

    def __init__(self, kv_caches: CanonicalKVCaches, rows: np.ndarray) -> None:
        spans = _spans(kv_caches)
        self._store, self._load = (
            Lane(*_of_gpu(kv_caches, rows.shape[1], is_store), rows, spans, is_store=is_store)
            for is_store in (True, False)
        )

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._store.submit(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._load.submit(job_id, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        return self._store.finished() + self._load.finished()

    def wait(self, job_ids: set[int]) -> None:
        self._store.wait(job_ids)
        self._load.wait(job_ids)

    def drain(self) -> None:
        """Returns once nothing is copied any more: what sleeps has no blocks."""
        self._store.drain()
        self._load.drain()

    def shutdown(self) -> None:
        self._store.close()
        self._load.close()


@dataclass(frozen=True, slots=True)
class _Job:
    blocks: GPULoadStoreSpec
    rows: np.ndarray  # indices, one for each block
    mark: Any
    submitted_s: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What fits in the buffer, all of one group."""

    blocks: np.ndarray  # their numbers
    rows: np.ndarray  # indices
    group: int


class Lane:
    """Copies in one direction, in a thread of its own. All jobs that wait are copied together,
    because a step submits one for each of its requests; they pass the buffer piece by piece.

    `buffer`: pinned, shape [rows, bytes of a block]. `spans`: by group, the bytes of a row that its
    blocks have. The other bytes of a row are not copied, because in the buffer they are left from
    other rows."""

    def __init__(
        self,
        device: Device,
        buffer: np.ndarray,
        rows: np.ndarray,
        spans: Sequence[Sequence[slice]],
        *,
        is_store: bool,
    ) -> None:
        self._device, self._buffer, self._rows = device, buffer, rows
        self._spans, self._is_store = spans, is_store
        self._thread = ThreadPoolExecutor(1, "store-kv" if is_store else "load-kv")
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[int, tuple[_Job, Future[None]]] = {}
        self._next: Future[None] | None = None  # the run of `_copy_waiting` that was queued last
        self._is_next_begun = self._is_broken = False

    def submit(self, job_id: int, blocks: GPULoadStoreSpec, rows: LoadStoreSpec) -> bool:
        assert isinstance(rows, CPULoadStoreSpec) and len(rows.block_ids) == len(blocks.block_ids)
        job = _Job(blocks, rows.block_ids, self._device.submitted())
        self._waiting.append(job)
        if self._next is None or self._is_next_begun:
            self._is_next_begun = False
            self._next = self._thread.submit(self._copy_waiting)
        self._jobs[job_id] = job, self._next
        return True

    def finished(self) -> list[TransferResult]:
        """Raises what a copy raised: without its blocks no answer would be right."""
        done = [job_id for job_id, (_, copied) in self._jobs.items() if copied.done()]
        return [self._result(job_id) for job_id in done]

    def _result(self, job_id: int) -> TransferResult:
        job, copied = self._jobs.pop(job_id)
        copied.result()
        sizes = (sum(s.stop - s.start for s in spans) for spans in self._spans)
        size = sum(n * each for n, each in zip(job.blocks.group_sizes, sizes, strict=True))
        return TransferResult(job_id, True, size, time.perf_counter() - job.submitted_s)

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id][1].result()

    def drain(self) -> None:
        self.wait(set(self._jobs))

    def close(self) -> None:
        self._thread.shutdown()

    def _copy_waiting(self) -> None:
        """Copies all jobs that wait, in the thread. A job that is submitted after its begin queues
        another run, which finds nothing to do if this one took the job along."""
        self._is_next_begun = True
        if self._is_broken:
            raise RuntimeError("an earlier copy of KV blocks failed")
        jobs = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not jobs:
            return
        self._is_broken = True  # unless all of it succeeds
        with self._device.after(jobs[-1].mark):  # and so after those of the others
            for piece in self._pieces(jobs):
                if not self._is_store:
                    self._turn_over(piece)
                self._device.copy(piece.blocks, piece.group)
                if self._is_store:
                    self._turn_over(piece)
        self._is_broken = False

    def _pieces(self, jobs: list[_Job]) -> Iterator[_Piece]:
        for group in range(len(self._spans)):
            parts = [_of_group(job, group) for job in jobs]
            ids, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            for first in range(0, len(ids), len(self._buffer)):
                part = slice(first, first + len(self._buffer))
                yield _Piece(ids[part], rows[part], group)

    def _turn_over(self, piece: _Piece) -> None:
        """Copies a piece between buffer and slab. numpy does so without the interpreter's lock; a
        store is one call, because between two calls this thread would wait for the engine's thread
        to give the lock up. A load copies row by row, because one call that gathers rows is five
        times slower."""
        for span in self._spans[piece.group]:
            if self._is_store:
                self._rows[:, span][piece.rows] = self._buffer[: len(piece.rows), span]
                continue
            for place, row in enumerate(piece.rows.tolist()):
                self._buffer[place, span] = self._rows[row, span]


def _of_group(job: _Job, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the blocks and rows of one group, whose places in a job follow the last group's."""
    sizes = job.blocks.group_sizes
    part = slice(start := sum(sizes[:group]), start + sizes[group])
    return job.blocks.block_ids[part], job.rows[part]


def _spans(kv_caches: CanonicalKVCaches) -> list[list[slice]]:
    """By group, the bytes of a row that its blocks have, neighbours joined."""
    starts = [0, *itertools.accumulate(cache.page_size_bytes for cache in kv_caches.tensors)]
    spans = []
    for refs in kv_caches.group_data_refs:
        joined: list[slice] = []
        for start, end in sorted(
            (starts[ref.tensor_idx], starts[ref.tensor_idx] + ref.page_size_bytes) for ref in refs
        ):
            if joined and joined[-1].stop >= start:
                joined[-1] = slice(joined[-1].start, max(joined[-1].stop, end))
            else:
                joined.append(slice(start, end))
        spans.append(joined)
    return spans


class Addresses:
    """Where the pages of one group's blocks lie, on the device and in the buffer. `buffer`: the
    address of its first row, of `row_bytes`. A sleep gives the device's memory back, and a wake
    maps memory at the same addresses."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, group: int, buffer: int, row_bytes: int
    ) -> None:
        refs, tensors = kv_caches.group_data_refs[group], kv_caches.tensors
        starts = [0, *itertools.accumulate(cache.page_size_bytes for cache in tensors)]
        # Kept, so that nothing else gets their memory while copies may come.
        self._views = views = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in tensors
        ]

        def column(values: Iterable[int]) -> np.ndarray:
            return np.array(list(values), np.int64)[:, None]

        self._pages = column(views[ref.tensor_idx].data_ptr() for ref in refs)
        self._page_bytes = column(views[ref.tensor_idx].stride(0) for ref in refs)
        self._places = column(buffer + starts[ref.tensor_idx] for ref in refs)
        self._sizes = column(ref.page_size_bytes for ref in refs)
        self._row_bytes = row_bytes

    def of(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns for each page of the blocks its address on the device, its address in the buffer,
        and its size; int64 of shape [pages]. The blocks lie in the buffer's first rows."""
        ids = blocks.astype(np.int64)
        pages = self._pages + ids * self._page_bytes
        places = self._places + np.arange(len(ids)) * self._row_bytes
        return pages.ravel(), places.ravel(), np.repeat(self._sizes.ravel(), len(ids))


class _Gpu:
    """Copies by the card's copy engine for one direction, beside the engine's stream."""

    def __init__(self, addresses: Sequence[Addresses], *, is_store: bool) -> None:
        self._addresses, self._is_store = addresses, is_store
        self._stream = current_platform.Stream()
        self._done = current_platform.Event(blocking=True)

    def submitted(self) -> Any:
        mark = current_platform.Event(blocking=True)  # to wait takes no processor time
        mark.record()
        return mark

    def after(self, mark: Any) -> AbstractContextManager[None]:
        # A new thread begins on the first GPU, and would leave a context on it.
        torch.cuda.set_device(self._stream.device)
        mark.synchronize()
        on_stream: AbstractContextManager[None] = current_platform.stream(self._stream)
        return on_stream

    def copy(self, blocks: np.ndarray, group: int) -> None:
        addresses = self._addresses[group].of(blocks)
        pages, places, sizes = map(torch.from_numpy, addresses)
        source, target = (pages, places) if self._is_store else (places, pages)
        # What a load reads is written by no stream, so the card may read it out of order.
        is_order_any = not self._is_store
        ops.swap_blocks_batch(source, target, sizes, is_src_access_order_any=is_order_any)
        self._done.record()
        self._done.synchronize()


def _of_gpu(
    kv_caches: CanonicalKVCaches, block_bytes: int, is_store: bool
) -> tuple[Device, np.ndarray]:
    """The device of a lane, and its buffer."""
    shape = max(1, BUFFER_BYTES // block_bytes), block_bytes
    buffer = torch.empty(shape, dtype=torch.int8, pin_memory=True)
    groups = range(len(kv_caches.group_data_refs))
    addresses = [Addresses(kv_caches, group, buffer.data_ptr(), block_bytes) for group in groups]
    return _Gpu(addresses, is_store=is_store), buffer.numpy()
