"""KV blocks on their way between a GPU and a slab, with memory of the CPU in the GPU's place."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from deployments.engines.vllm.kv import staged_copier
from deployments.engines.vllm.kv.staged_copier import Addresses, StagedCopier

BLOCKS, PAGE, ROWS = 16, 64, 32
NO_BYTE = 77  # of rows that were never written
BOUND_S = 20.0


class MemoryDevice:
    """Copies at once, once it may. `marks`: what was asked for, in order."""

    def __init__(self, caches: CanonicalKVCaches, buffer: np.ndarray, *, is_store: bool) -> None:
        self.addresses = [
            Addresses(caches, group, buffer.ctypes.data, buffer.shape[1])
            for group in range(len(caches.group_data_refs))
        ]
        self.is_store = is_store
        self.may_copy, self.is_asked, self.copies = threading.Event(), threading.Event(), 0
        self.may_copy.set()
        self.fails = False
        self.marks: list[int] = []
        self.waited_for: list[int] = []

    def submitted(self) -> int:
        self.marks.append(len(self.marks))
        return self.marks[-1]

    @contextmanager
    def after(self, mark: int) -> Iterator[None]:
        self.is_asked.set()
        assert self.may_copy.wait(BOUND_S)
        self.waited_for.append(mark)
        yield

    def copy(self, blocks: np.ndarray, group: int) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.copies += 1
        for page, place, size in zip(
            *map(np.ndarray.tolist, self.addresses[group].of(blocks)), strict=True
        ):
            ctypes.memmove(*((place, page) if self.is_store else (page, place)), size)


def caches(seed: int) -> CanonicalKVCaches:
    """Three layers of one group, and one of another group in the first one's memory."""
    made = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8, generator=made) for _ in range(3)
    ]
    groups = [[CanonicalKVCacheRef(n, PAGE) for n in range(3)], [CanonicalKVCacheRef(0, PAGE - 8)]]
    return CanonicalKVCaches([CanonicalKVCacheTensor(t, PAGE) for t in tensors], groups)


class Under:
    """A copier whose devices are memory, with a buffer of three rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: np.ndarray, seed: int) -> None:
        self.caches, self.devices = caches(seed), dict[bool, MemoryDevice]()

        def of_memory(given: Any, block_bytes: int, is_store: bool) -> tuple[Any, np.ndarray]:
            buffer = np.zeros((3, block_bytes), np.int8)
            self.devices[is_store] = MemoryDevice(given, buffer, is_store=is_store)
            return self.devices[is_store], buffer

        monkeypatch.setattr(staged_copier, "_of_gpu", of_memory)
        self.copier = StagedCopier(self.caches, rows)

    @property
    def pages(self) -> list[torch.Tensor]:
        return [cache.tensor for cache in self.caches.tensors]


@pytest.fixture
def rows() -> np.ndarray:
    return np.full((ROWS, 3 * PAGE), NO_BYTE, np.int8)


def blocks(first: list[int], second: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec([*first, *second], [len(first), len(second)], [0, 0])


FIRST, SECOND = [5, 2, 6, 9, 1, 0, 3], [4, 8]
PLACES = [20, 3, 7, 31, 0, 12, 13, 5, 6]


@pytest.mark.spec("E10", "G4")
def test_blocks_of_one_engine_are_the_next_ones_through_a_buffer_that_is_smaller(
    monkeypatch: pytest.MonkeyPatch, rows: np.ndarray
) -> None:
    old, new = Under(monkeypatch, rows, 1), Under(monkeypatch, rows, 2)
    before = [page.clone() for page in new.pages]
    assert old.copier.submit_store(7, blocks(FIRST, SECOND), CPULoadStoreSpec(PLACES))
    old.copier.wait({7})
    [done] = old.copier.get_finished()
    assert (done.job_id, done.success) == (7, True)
    assert done.transfer_size == len(FIRST) * 3 * PAGE + len(SECOND) * (PAGE - 8)
    assert old.devices[True].copies == 4 and not old.copier.get_finished()

    targets = blocks([10, 11, 12, 13, 14, 15, 0], [1, 2])
    assert new.copier.submit_load(8, CPULoadStoreSpec(PLACES), targets)
    new.copier.wait({8})
    assert [done.job_id for done in new.copier.get_finished()] == [8]
    for layer in range(3):
        assert torch.equal(old.pages[layer][FIRST], new.pages[layer][[10, 11, 12, 13, 14, 15, 0]])
    assert torch.equal(old.pages[0][SECOND][:, :-8], new.pages[0][[1, 2]][:, :-8])
    assert torch.equal(before[0][[1, 2]][:, -8:], new.pages[0][[1, 2]][:, -8:])
    assert torch.equal(before[1][1:10], new.pages[1][1:10]), "only what was asked is written"


@pytest.mark.spec("E10", "G4")
@pytest.mark.parametrize("is_store", [True, False])
def test_gpu_is_asked_for_the_pages_of_blocks_in_the_direction_of_its_lane(
    is_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's operator, whose arguments are checked; done by memmove here."""

    def moves(source: Any, target: Any, sizes: Any, is_src_access_order_any: bool) -> None:
        assert is_src_access_order_any is not is_store
        for one, other, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(other, one, size)

    swap = create_autospec(staged_copier.ops.swap_blocks_batch, side_effect=moves)
    monkeypatch.setattr(staged_copier.ops, "swap_blocks_batch", swap)
    given, buffer = caches(1), np.full((3, 3 * PAGE), NO_BYTE, np.int8)
    gpu = object.__new__(staged_copier._Gpu)
    gpu._addresses = [Addresses(given, 0, buffer.ctypes.data, buffer.shape[1])]
    gpu._is_store, gpu._done = is_store, Mock()
    before = [cache.tensor.numpy()[[4, 2]].copy() for cache in given.tensors]
    gpu.copy(np.array([4, 2]), 0)
    assert [name for name, *_ in gpu._done.mock_calls] == ["record", "synchronize"]
    for layer, cache in enumerate(given.tensors):
        place = buffer[:2, layer * PAGE : (layer + 1) * PAGE]
        assert (place == (before[layer] if is_store else NO_BYTE)).all()
        assert (cache.tensor.numpy()[[4, 2]] == place).all()


@pytest.mark.spec("E6")
def test_row_gets_only_the_bytes_of_its_own_block(
    monkeypatch: pytest.MonkeyPatch, rows: np.ndarray
) -> None:
    """What an earlier job left in the buffer, perhaps another tenant's, stays there."""
    under = Under(monkeypatch, rows, 1)
    under.copier.submit_store(1, blocks(FIRST[:3], []), CPULoadStoreSpec([0, 1, 2]))
    under.copier.submit_store(2, blocks([], SECOND), CPULoadStoreSpec([3, 4]))
    under.copier.drain()
    assert (rows[[3, 4], PAGE - 8 :] == NO_BYTE).all() and (rows[5:] == NO_BYTE).all()


def test_engine_goes_on_while_blocks_are_copied_and_waits_where_it_must(
    monkeypatch: pytest.MonkeyPatch, rows: np.ndarray
) -> None:
    under = Under(monkeypatch, rows, 1)
    device = under.devices[True]
    device.may_copy.clear()
    under.copier.submit_store(1, blocks([0], []), CPULoadStoreSpec([0]))
    assert device.is_asked.wait(BOUND_S)
    for job in (2, 3):  # of one step
        under.copier.submit_store(job, blocks([job], [job]), CPULoadStoreSpec([job, 10 + job]))
    assert under.copier.get_finished() == [] and device.marks == [0, 1, 2]
    load = under.copier.submit_load(4, CPULoadStoreSpec([9]), blocks([9], []))
    under.copier.wait({4, 99})  # the other direction waits for nothing; a job may be known no more
    assert load and [done.job_id for done in under.copier.get_finished()] == [4]
    device.may_copy.set()
    under.copier.drain()
    done = {done.job_id: done.transfer_size for done in under.copier.get_finished()}
    assert done == {1: 3 * PAGE, 2: 4 * PAGE - 8, 3: 4 * PAGE - 8}
    assert (device.waited_for, device.copies) == ([0, 2], 3), "a step's jobs are copied together"
    for job in (2, 3):
        whole = torch.cat([page[job] for page in under.pages])
        assert torch.equal(torch.from_numpy(rows[job]), whole)
        assert torch.equal(torch.from_numpy(rows[10 + job, : PAGE - 8]), under.pages[0][job, :-8])
    under.copier.shutdown()


def test_copy_that_fails_ends_the_engine(monkeypatch: pytest.MonkeyPatch, rows: np.ndarray) -> None:
    under = Under(monkeypatch, rows, 1)
    under.devices[True].fails = True
    under.copier.submit_store(1, blocks([0], []), CPULoadStoreSpec([0]))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        under.copier.wait({1})
    with pytest.raises(RuntimeError, match="illegal memory access"):
        under.copier.get_finished()
    under.copier.submit_store(2, blocks([0], []), CPULoadStoreSpec([0]))
    with pytest.raises(RuntimeError, match="an earlier copy of KV blocks failed"):
        under.copier.wait({2})
