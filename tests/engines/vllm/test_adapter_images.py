"""Images of slots, between vLLM's own manager of adapters and a slab (F3, E5, E10)."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from arbiter.pool import Removal, Rows, Slab, SlabView
from arbiter.pool.layout import tenant_digest
from arbiter.units import Bytes, Content
from deployments.engines.vllm.adapters import adapter_images
from deployments.engines.vllm.adapters.adapter_images import (
    COLD,
    HOT,
    WARM,
    Image,
    NoImages,
    SlotImages,
    key_of,
    slot_layout,
)
from tests.support.slabs import EXTENT, ROW, TERM_S, Clock, run_and_kill, set_limit, slab_file

SLOTS, RANK, MAX_RANK = 2, 3, 4
MODULES = {"layers.0.down": (24, 40), "layers.1.down": (40, 16)}  # out, in
KILLS = 15


class Layer(BaseLinearLayerWithLoRA):  # type: ignore[misc]
    """vLLM's layer with slots as it makes them; of its base only the sizes matter here."""

    def __init__(self, out: int, into: int, slots: int) -> None:
        torch.nn.Module.__init__(self)
        self.n_slices, self.tp_size = 1, 1
        self.lora_a_stacked = (torch.zeros(slots, 1, MAX_RANK, into),)
        self.lora_b_stacked = (torch.zeros(slots, 1, out, MAX_RANK),)


class Engine:
    """vLLM's two managers over such layers, and images in the slab of `fd`."""

    def __init__(
        self,
        fd: int,
        slots: int = SLOTS,
        most: int = 1_000,
        number_of_weights: Callable[[int], int] = int,
        caps: dict[bytes, float] | None = None,
    ) -> None:
        self.number_of_weights = number_of_weights
        manager = LRUCacheLoRAModelManager.__new__(LRUCacheLoRAModelManager)
        manager.lora_config = SimpleNamespace(max_loras=slots, max_cpu_loras=slots)
        manager.modules = {name: Layer(*shape, slots) for name, shape in MODULES.items()}
        manager.packed_modules, manager.is_pooling_model = {}, False
        manager._enable_mixed_moe_lora_format = False
        manager._registered_adapters = AdapterLRUCache(slots, manager.deactivate_adapter)
        manager._active_adapters = AdapterLRUCache(slots, manager._deactivate_adapter)
        manager.lora_index_to_id = [None] * slots
        self.manager = manager
        self.worker = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
        self.worker._adapter_manager = manager
        self.worker._load_adapter = self._parse
        self.parsed: list[int] = []
        parts = slot_layout(manager.modules)
        slab = Slab(fd, Content.ADAPTER, b"n" * 32, ROW, extent_bytes=EXTENT)
        rows = Rows(slab, TERM_S, Clock(), most=most, caps=caps)
        self.images = SlotImages(self.worker, rows, parts)

    def _parse(self, request: LoRARequest) -> LoRAModel:
        """In the place of the files: weights that follow from the number."""
        self.parsed.append(request.lora_int_id)
        loras = weights_of(self.number_of_weights(request.lora_int_id))
        if self.number_of_weights(request.lora_int_id) >= 100:
            loras["layers.0.down"].lora_a = torch.zeros(MAX_RANK + 1, 40)  # does not fit
        return LoRAModel(request.lora_int_id, RANK, loras)

    def bring(self, number: int) -> dict[str, torch.Tensor]:
        self.worker.add_adapter(asked(number))
        return self.slot_of(number)

    def slot_of(self, number: int) -> dict[str, torch.Tensor]:
        slot = self.manager.lora_index_to_id.index(number)
        layers = self.manager.modules.items()
        a = {f"{name}.a": layer.lora_a_stacked[0][slot].clone() for name, layer in layers}
        return a | {f"{name}.b": layer.lora_b_stacked[0][slot].clone() for name, layer in layers}


def weights_of(number: int) -> dict[str, LoRALayerWeights]:
    made = torch.Generator().manual_seed(number)
    only = list(MODULES)[: 1 if number % 2 else 2]  # some adapters leave a layer out
    return {
        name: LoRALayerWeights(
            name,
            RANK,
            2 * RANK,
            torch.randn(RANK, into, generator=made),
            torch.randn(out, RANK, generator=made),
        )
        for name, (out, into) in MODULES.items()
        if name in only
    }


def digest(number: int) -> str:
    return f"{number:032x}"


def asked(number: int) -> LoRARequest:
    return LoRARequest(digest(number), number, f"/store/{digest(number)}")


def plain(number: int) -> dict[str, torch.Tensor]:
    """What a slot has after vLLM's own arithmetic: the scale is in B, the rest is zero."""
    found = {}
    for name, (out, into) in MODULES.items():
        a, b = torch.zeros(1, MAX_RANK, into), torch.zeros(1, out, MAX_RANK)
        if one := weights_of(number).get(name):
            a[0, :RANK], b[0, :, :RANK] = one.lora_a, one.lora_b * 2
        found |= {f"{name}.a": a, f"{name}.b": b}
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one.keys() | other.keys())


@pytest.fixture
def fd() -> Iterator[int]:
    with slab_file() as made:
        yield made


@pytest.mark.spec("F3", "E10")
def test_slot_has_the_same_bytes_from_files_and_from_the_slab_also_of_the_next_engine(
    fd: int,
) -> None:
    first = Engine(fd)
    for number in (1, 2, 3, 1, 2, 3):  # more than there are slots
        assert same(first.bring(number), plain(number))
    assert first.parsed == [1, 2, 3]
    second = Engine(fd)
    for number in (3, 1, 2):
        assert same(second.bring(number), plain(number))
    assert second.parsed == [], "no file was read"
    assert second.images.facts()["loaded"] == 9, "each was copied out of the slab"


def test_adapter_in_a_slot_is_only_touched(fd: int) -> None:
    engine = Engine(fd)
    engine.bring(1)
    engine.bring(2)
    engine.bring(1)
    assert engine.images.facts()["loaded"] == 2
    engine.bring(3)
    assert engine.manager.lora_index_to_id == [1, 3]
    assert [engine.images.tier(asked(n)) for n in (1, 2, 3, 4)] == [HOT, WARM, HOT, COLD]


@pytest.mark.spec("E7")
def test_owner_of_the_slab_sees_where_requests_found_their_adapters(fd: int) -> None:
    engine = Engine(fd)
    engine.bring(1)
    engine.images.count(hot=5, warm=2, cold=1)
    engine.images.count(hot=1, warm=0, cold=0)
    with closing(SlabView(fd)) as view:
        counts = view.counts
    assert (counts.hot_hits_count, counts.hits_count, counts.misses_count) == (6, 2, 1)
    assert (counts.hot_count, counts.ready_count) == (1, 1)


def test_copies_by_torch_are_those_by_numpy(fd: int) -> None:
    """As on a GPU, whose slots numpy cannot reach."""
    engine = Engine(fd)
    engine.bring(1)
    engine.images._slots = [torch.from_numpy(slots) for slots in engine.images._slots]
    for number in (2, 3, 1):
        assert same(engine.bring(number), plain(number))


@pytest.mark.spec("F4")
def test_staged_adapter_needs_its_files_no_more(fd: int) -> None:
    engine = Engine(fd)
    assert [engine.images.stage(asked(1)) for _ in range(2)] == [COLD, WARM]
    assert same(engine.bring(1), plain(1))
    assert engine.parsed == [1]
    assert engine.images.stage(asked(1)) == HOT


@pytest.mark.spec("F3")
def test_adapters_that_are_kept_lose_their_slot_last(fd: int) -> None:
    engine = Engine(fd)
    engine.bring(1)
    engine.bring(2)
    engine.images.keep([1, 77])
    engine.bring(3)
    assert engine.manager.lora_index_to_id == [1, 3]


@pytest.mark.spec("E6", "F2")
def test_image_of_a_tenants_own_adapter_leaves_with_the_tenant_and_a_common_one_with_none(
    fd: int,
) -> None:
    engine = Engine(fd)
    for number, tenant in ((1, "acme"), (2, ""), (3, "other"), (4, "default")):
        engine.images.note_owner(asked(number), tenant)
        engine.bring(number)
    with closing(SlabView(fd)) as owner:
        for tenant, left in (("acme", {2, 3, 4}), ("default", {2, 3})):
            assert owner.order_erasure(Removal(tenant_digest(tenant)))
            engine.images.shrink()
            assert not owner.must_erase
            assert {mark.key.hex() for _, mark in owner.marks()} == {digest(n) for n in left}
    assert engine.images.forgotten() == [digest(1), digest(4)] and not engine.images.forgotten()
    assert same(engine.bring(1), plain(1)), "made anew"
    assert engine.parsed == [1, 2, 3, 4, 1]


@pytest.mark.spec("E6")
def test_image_that_tenants_share_is_of_the_tenant_that_had_it_made(fd: int) -> None:
    engine = Engine(fd)
    for tenant in ("acme", "other"):
        engine.images.note_owner(asked(1), tenant)
        engine.bring(1)
    with closing(SlabView(fd)) as owner:
        [(_, mark)] = owner.marks()
    assert mark.tenant == tenant_digest("acme")


@pytest.mark.spec("E6")
def test_tenant_has_no_more_images_than_its_cap(fd: int) -> None:
    engine = Engine(fd, caps={tenant_digest("acme"): 2 * ROW / (4 * EXTENT)})
    engine.images.note_owner(asked(9), "")
    engine.bring(9)
    for number in (1, 2, 3):
        engine.images.note_owner(asked(number), "acme")
        assert same(engine.bring(number), plain(number))
    assert [engine.images.tier(asked(n)) for n in (1, 2, 3, 9)] == [COLD, HOT, HOT, WARM]


@pytest.mark.spec("E6")
def test_adapter_that_finds_no_row_is_loaded_as_without_a_slab(fd: int) -> None:
    set_limit(fd, 0)
    engine = Engine(fd)
    for number in (1, 2, 1):
        assert same(engine.bring(number), plain(number))
    assert engine.images.facts()["refused"] == 2
    assert not any(isinstance(one, Image) for one in engine.worker.list_adapters())
    assert engine.images.warm() == []


def test_image_that_left_between_is_made_again(fd: int) -> None:
    engine = Engine(fd)
    engine.bring(1)
    engine.manager.deactivate_adapter(1)
    engine.images.rows.drop(key_of(asked(1)))
    assert same(engine.bring(1), plain(1))
    assert engine.parsed == [1, 1]


@pytest.mark.spec("E1")
def test_images_leave_with_the_limit_the_longest_unused_first(fd: int) -> None:
    engine = Engine(fd)
    fit = EXTENT // ROW
    for number in range(1, 2 * fit + 1):
        engine.bring(number)
    set_limit(fd, 1)
    engine.images.shrink()
    assert engine.images.warm() == [digest(n) for n in range(fit + 1, 2 * fit + 1)]
    for number in (1, fit + 1, 2 * fit):
        assert same(engine.bring(number), plain(number))


@pytest.mark.spec("F3")
def test_no_more_stay_warm_than_the_budget_however_much_memory_there_is(fd: int) -> None:
    engine = Engine(fd, most=3)
    for number in range(1, 7):
        engine.bring(number)
    assert engine.images.warm() == [digest(n) for n in (4, 5, 6)]
    assert Engine(fd, most=2).images.facts()["ready"] <= 2


@pytest.mark.spec("E7", "F3")
def test_nine_tenths_of_a_zipf_load_over_a_thousand_adapters_need_no_file() -> None:
    """Once the load has gone on for a while: each adapter is cold at its first request."""
    adapters = range(1, 1_001)
    wanted = random.Random(1).choices(adapters, [1 / n for n in adapters], k=6_000)
    found = []
    with slab_file(extents=260, rows=1_024) as fd:
        engine = Engine(fd, slots=8, number_of_weights=lambda number: number % 7 + 1)
        for number in wanted:
            found.append(engine.images.tier(asked(number)))
            engine.worker.add_adapter(asked(number))
    tail = Counter(found[-2_000:])
    assert tail[HOT] + tail[WARM] > 0.9 * tail.total()
    assert len(engine.parsed) == len(set(wanted)), "each file is read once"


@pytest.mark.spec("F2")
def test_adapter_that_does_not_fit_fails_alone_and_leaves_no_row(fd: int) -> None:
    engine = Engine(fd)
    engine.bring(1)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            engine.bring(100)
    assert same(engine.slot_of(1), plain(1))
    assert engine.images.warm() == [digest(1)]
    assert not engine.images.rows.is_reserved(bytes.fromhex(digest(100)))


def test_only_folders_named_by_content_have_a_key() -> None:
    assert key_of(asked(7)) == bytes.fromhex(digest(7))
    for name, path in (("a0", "/lora/a0"), (digest(7), "/lora/a0"), ("g" * 32, "/x/" + "g" * 32)):
        assert key_of(LoRARequest(name, 1, path)) is None


def test_layers_that_keep_more_than_their_stacks_have_no_images() -> None:
    layer = Layer(8, 8, SLOTS)
    layer.w13_lora_a_stacked = ()
    with pytest.raises(NoImages, match="w13_lora_a_stacked"):
        slot_layout({"experts": layer})
    with pytest.raises(NoImages, match="no layer"):
        slot_layout({})


class FakeConfig:
    """Of vLLM's, what the namespace reads."""

    def __init__(self, **change: Any) -> None:
        facts = {"dtype": "bf16", "shape": 1, "rank": 16, "tp": 1, "pp": 1, "worker": 0} | change
        shape = SimpleNamespace(to_dict=lambda: {"hidden_size": facts["shape"]})
        self.model_config = SimpleNamespace(hf_config=shape, dtype=facts["dtype"])
        self.lora_config = SimpleNamespace(max_lora_rank=facts["rank"])
        self.parallel_config = SimpleNamespace(
            tensor_parallel_size=facts["tp"],
            pipeline_parallel_size=facts["pp"],
            rank=facts["worker"],
        )


@pytest.mark.spec("E2")
def test_namespace_changes_with_each_fact_of_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = slot_layout({name: Layer(*shape, SLOTS) for name, shape in MODULES.items()})
    first = parts[0]
    other_parts = [
        [replace(first, module="layers.9.down"), *parts[1:]],
        [replace(first, shape=(1, 40, MAX_RANK)), *parts[1:]],
        [replace(first, dtype=torch.float16), *parts[1:]],
        parts[::-1],
        parts[1:],
    ]
    changes = ({"dtype": "f32"}, {"shape": 2}, {"rank": 8}, {"tp": 2}, {"pp": 2}, {"worker": 1})
    made = [adapter_images.namespace(FakeConfig(), parts)]
    made += [adapter_images.namespace(FakeConfig(**change), parts) for change in changes]
    made += [adapter_images.namespace(FakeConfig(), other) for other in other_parts]
    monkeypatch.setattr(adapter_images.vllm, "__version__", "0.0")
    made.append(adapter_images.namespace(FakeConfig(), parts))
    assert len(set(made)) == len(made) == 1 + len(changes) + len(other_parts) + 1


def bring_for_ever(fd: int, seed: int, ready: int) -> None:
    """Makes images, in a slab too small for them, until it is killed."""
    torch.set_num_threads(1)  # its threads have not come along
    dice, engine = random.Random(seed), Engine(fd)
    os.write(ready, b".")
    while True:
        engine.images.stage(asked(dice.randrange(1, 40)))


@pytest.mark.spec("E5", "F3")
def test_engine_killed_while_it_makes_images_leaves_only_whole_ones(fd: int) -> None:
    found = 0
    for seed in range(KILLS):
        run_and_kill(partial(bring_for_ever, fd, seed), seed, 20_000_000)
        engine = Engine(fd)
        for name in engine.images.warm():
            number = int(name, 16)
            assert same(engine.bring(number), plain(number)), seed
            found += 1
        assert engine.parsed == []
    assert found > KILLS


def test_rows_of_an_image_are_as_long_as_its_parts() -> None:
    parts = slot_layout({name: Layer(*shape, SLOTS) for name, shape in MODULES.items()})
    ends = np.cumsum([part.size for part in parts])
    assert [part.start for part in parts] == [0, *ends[:-1]]
    sizes = [4 * MAX_RANK * side for out, into in MODULES.values() for side in (into, out)]
    assert [part.size for part in parts] == sizes
    assert Bytes(int(ends[-1])) <= ROW
