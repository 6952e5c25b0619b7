"""Adapters that are warm: images of a filled slot in a slab (`arbiter.pool`), in the engine's core.

The image of an adapter is what vLLM's layers make of its files, laid out as they keep one slot:
each `set_lora` writes it, into the slab's row instead of into a slot. From then on the adapter is
brought into any slot by copies out of the row, in this engine and in the next,
and its files are not read (F3, E10). vLLM's own cache on the host then keeps a placeholder.
The image of a tenant's own adapter is a row of that tenant, and leaves with it (E6); of several
tenants with equal files it is that of the tenant whose request had it made.

An adapter that finds no row is loaded as vLLM does it, and so is one whose image is gone.
"""

import copy
import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from arbiter.pool import Rows, Slab, SlabUnusable
from arbiter.pool.layout import SHARED, Count, Removal
from arbiter.pool.tenants import caps_by_digest, owner_digest
from arbiter.units import Content
from deployments.engines.protocol import Config
from deployments.engines.vllm.slabs.lent_slab import hold, whole_pages

logger = init_logger(__name__)

MOST_ROWS = 1_000  # adapters of one model that stay warm (F3)
TERM_S = 3_600.0  # how long an image stays after its last use, as the blocks of a conversation
HOT, WARM, COLD = "hot", "warm", "cold"
_STACKS = ("lora_a_stacked", "lora_b_stacked")
# Attributes in which other layers of vLLM keep an adapter (mixtures of experts, classifiers). An
# image has no copy of these, so a model with such layers has no images.
_OTHER_STACKS = ("w13_lora_a_stacked", "w2_lora_a_stacked", "full_weight_stacked")
_DIGEST = re.compile(r"[0-9a-f]{32}")  # a folder of deployments.adapters.store


@dataclass(frozen=True, slots=True)
class LentSlab:
    """A slab for images. `path`: where this process tree opens it."""

    path: str
    term_s: float = TERM_S
    most_rows: int = MOST_ROWS
    caps: dict[str, float] = field(default_factory=dict)  # by tenant, a part of the rows


class NoImages(Exception):
    """The slots of a model cannot be kept as images; the text says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of one layer, as a row has it for one slot."""

    module: str
    stack: str  # the attribute of the layer
    index: int  # within the attribute, where that is a tuple
    start: int  # within the row, bytes
    size: int
    shape: tuple[int, ...]  # of one slot
    dtype: torch.dtype


class Image(LoRAModel):
    """Stands in vLLM's host cache for an adapter whose bytes lie in the slab."""

    def __init__(self, request: LoRARequest, key: bytes) -> None:
        super().__init__(request.lora_int_id, 1, {})
        self.request, self.key = request, key


class SlotImages:
    """The images of one worker's slots. Three methods of vLLM's manager of adapters are replaced by
    those here, which call the replaced ones where there is no image.

    All calls come from the core's thread. `rows`: the slab's; `parts`: the layout of a row."""

    def __init__(self, worker: LRUCacheWorkerLoRAManager, rows: Rows, parts: list[Part]) -> None:
        self.rows, self._parts = rows, parts
        self._owners: dict[bytes, bytes] = {}  # by key of an adapter of one tenant: its digest
        self._forgotten: set[bytes] = set()  # keys of adapters whose tenant was removed
        rows.before_erasure = self._forget
        self._worker, self._manager = worker, worker._adapter_manager
        self._slots = [_slots_of(self._stack(part)) for part in parts]
        self._blanks = {name: copy.copy(m) for name, m in self._manager.modules.items()}
        self._parse = worker._load_adapter
        self._add, self._activate = self._manager._add_adapter, self._manager.activate_adapter
        worker._load_adapter = self.load
        self._manager._add_adapter = self.add
        self._manager.activate_adapter = self.activate

    def note_owner(self, request: LoRARequest, tenant: str) -> None:
        """Says whose adapter it is before it is loaded. `tenant`: empty for an adapter of all."""
        key = key_of(request)
        if key is not None and tenant:
            self._owners[key] = owner_digest(tenant)
        elif key is not None:
            self._owners.pop(key, None)

    def load(self, request: LoRARequest) -> LoRAModel:
        """Loads an adapter in place of vLLM's `_load_adapter`: where there is an image, no file is
        read."""
        key = key_of(request)
        if key is not None and key in self.rows:
            return Image(request, key)
        lora = self._parse(request)
        if key is not None and self._store(key, lora):
            return Image(request, key)
        return lora

    def add(self, lora: LoRAModel) -> None:
        """Adds an adapter in place of vLLM's `_add_adapter`, which would look for weights to
        merge."""
        if isinstance(lora, Image):
            self._manager._registered_adapters[lora.id] = lora
        else:
            self._add(lora)

    def activate(self, number: int) -> bool:
        """Fills a slot from the slab, in place of vLLM's `activate_adapter`."""
        manager = self._manager
        lora = manager._registered_adapters.get(number)
        if number not in manager._active_adapters and isinstance(lora, Image):
            if lora.key in self.rows:
                self._fill(number, lora.key)
                return True
            self.add(self.load(lora.request))  # the image has left since
            return self.activate(number)
        activated: bool = self._activate(number)
        return activated

    def stage(self, request: LoRARequest) -> str:
        """Makes the image of an adapter that will be needed soon. Returns the tier in which it was.
        Raises what vLLM raises for a bad adapter."""
        key = key_of(request)
        if request.lora_int_id in self._manager._active_adapters:
            return HOT
        if key is None or key in self.rows:
            return WARM
        self._store(key, self._parse(request))
        return COLD

    def _fill(self, number: int, key: bytes) -> None:
        manager = self._manager
        if len(manager._active_adapters) >= manager.lora_slots:
            manager._active_adapters.remove_oldest()
        slot = manager.lora_index_to_id.index(None)
        (row,) = self.rows.pin([key])
        source = self._row(row)
        for part, slots in zip(self._parts, self._slots, strict=True):
            slots[slot] = source[part.start : part.start + part.size]
        self.rows.unpin([key])
        self.rows.touch([key])
        manager._active_adapters[number] = None
        manager.lora_index_to_id[slot] = number

    def _row(self, row: int) -> Any:
        """Shape [bytes], int8: of numpy beside slots of numpy, else of torch."""
        flat = np.frombuffer(self.rows.slab.row(row), np.int8)
        return flat if isinstance(self._slots[0], np.ndarray) else torch.from_numpy(flat)

    def _store(self, key: bytes, lora: LoRAModel) -> bool:
        """Writes the image, then its mark (E5). False where no row is free for it; `lora` is then
        as it was."""
        owner = self._owners.get(key, SHARED)
        rows = self.rows.reserve([key], tenant=owner).rows
        if key not in rows:
            return key in self.rows
        try:
            self._manager._validate_moe_lora_format(lora)
            self._manager._create_merged_loras_inplace(lora)
            self._write(rows[key], lora)
        except BaseException:
            self.rows.abandon(key)
            raise
        self.rows.mark_ready(key, owner)
        return True

    def _write(self, row: int, lora: LoRAModel) -> None:
        """Fills a row as `LoRAModelManager.activate_adapter` fills slot 0, of layers whose only
        slot is the row."""
        flat = torch.from_numpy(np.frombuffer(self.rows.slab.row(row), np.int8))
        stacks: dict[tuple[str, str], list[torch.Tensor]] = {}
        for part in self._parts:
            piece = flat[part.start : part.start + part.size].view(part.dtype)
            place = stacks.setdefault((part.module, part.stack), [])
            place.append(piece.view(1, *part.shape))
        for (name, stack), tensors in stacks.items():
            is_tuple = isinstance(getattr(self._manager.modules[name], stack), tuple | list)
            setattr(self._blanks[name], stack, tuple(tensors) if is_tuple else tensors[0])
        for name, blank in self._blanks.items():
            weights = self._manager._get_lora_layer_weights(lora, name)
            if weights:
                blank.set_lora(0, weights.lora_a, weights.lora_b)
            else:
                blank.reset_lora(0)

    def _stack(self, part: Part) -> torch.Tensor:
        tensors = getattr(self._manager.modules[part.module], part.stack)
        stack: torch.Tensor = tensors[part.index] if isinstance(tensors, tuple | list) else tensors
        return stack

    def keep(self, numbers: list[int]) -> None:
        """Makes these the last to lose their slot, the last of them the very last; their images
        stay too."""
        for number in numbers:
            self._manager._active_adapters.touch(number)
            self._manager._registered_adapters.touch(number)
            lora = self._manager._registered_adapters.get(number)
            if isinstance(lora, Image):
                self.rows.touch([lora.key])

    def count(self, hot: int, warm: int, cold: int) -> None:
        """Notes requests by the tier in which they found their adapters."""
        counts = self.rows.slab.file.counts
        counts[Count.HOT_HITS] += hot
        counts[Count.HITS] += warm
        counts[Count.MISSES] += cold
        counts[Count.HOT] = len(self._manager._active_adapters)

    def tier(self, request: LoRARequest) -> str:
        """Where an adapter is now. Counts nothing."""
        if request.lora_int_id in self._manager._active_adapters:
            return HOT
        key = key_of(request)
        return WARM if key is not None and key in self.rows else COLD

    def warm(self) -> list[str]:
        """The digests of all that have an image."""
        return [key.hex() for key in self.rows.keys()]

    def _forget(self, removal: Removal) -> None:
        self._forgotten |= {key for key, o in self._owners.items() if o == removal.tenant}

    def forgotten(self) -> list[str]:
        """The digests of adapters whose tenant was removed since the last call: they are to be
        brought again by a request only."""
        keys = sorted(key.hex() for key in self._forgotten)
        self._forgotten.clear()
        return keys

    def shrink(self) -> None:
        """Erases what the slab's owner ordered to, and gives back what it no longer permits."""
        self.rows.shrink_to_limit()

    def facts(self) -> dict[str, int]:
        """Counts by name, bytes of the whole file and of an image, and the file's limit."""
        slab = self.rows.slab
        return {**slab.facts(), "row_bytes": slab.geometry.row_bytes}


def key_of(request: LoRARequest) -> bytes | None:
    """The digest of the adapter's content; None where the request names a folder that may change
    (`lora_modules` of vLLM)."""
    name = request.lora_name
    is_digest = _DIGEST.fullmatch(name) and Path(request.lora_path).name == name
    return bytes.fromhex(name) if is_digest else None


def hold_slab(config: Config) -> LentSlab | None:
    """Opens the slab that an engine was lent for its adapters, for as long as this process lives:
    the core finds it so although the owner may end meanwhile. `config["slabs"]["adapter"]` has its
    `path`, and perhaps `term_s`, `rows` and `caps`. None without one."""
    slab = config.get("slabs", {}).get(Content.ADAPTER)
    if not slab or "adapters" not in config:
        return None
    try:
        path = hold(slab["path"])
    except SlabUnusable as error:
        logger.warning("adapters are not kept in a slab: %s", error)
        return None
    term_s, most_rows = slab.get("term_s", TERM_S), slab.get("rows", MOST_ROWS)
    return LentSlab(path, float(term_s), int(most_rows), dict(slab.get("caps", {})))


def open_images(executor: Any, vllm_config: VllmConfig, lent: LentSlab | None) -> SlotImages | None:
    """None for an engine without a slab for images, or whose slots cannot be kept in one."""
    if lent is None:
        return None
    try:
        worker = _lora_manager(executor, vllm_config)
        parts = slot_layout(worker._adapter_manager.modules)
        space = namespace(vllm_config, parts)
        slab = Slab(lent.path, Content.ADAPTER, space, whole_pages(_end(parts)))
    except (NoImages, SlabUnusable) as error:
        logger.warning("adapters are not kept in a slab: %s", error)
        return None
    caps = caps_by_digest(lent.caps)
    rows = Rows(slab, lent.term_s, time.time, most=lent.most_rows, caps=caps)
    return SlotImages(worker, rows, parts)


def _lora_manager(executor: Any, vllm_config: VllmConfig) -> LRUCacheWorkerLoRAManager:
    """Raises NoImages."""
    if vllm_config.parallel_config.world_size > 1:
        raise NoImages("the model has several workers, and a slab has one writer")
    manager = getattr(executor.driver_worker.worker.model_runner, "lora_manager", None)
    if not isinstance(manager, LRUCacheWorkerLoRAManager):
        raise NoImages("the engine serves no adapters")
    return manager


def slot_layout(modules: dict[str, Any]) -> list[Part]:
    """What one slot has, layer by layer, one part behind the other. Raises NoImages."""
    parts: list[Part] = []
    for name in sorted(modules):
        if other := next((o for o in _OTHER_STACKS if hasattr(modules[name], o)), None):
            raise NoImages(f"layer {name} has {other}")
        for stack, index, tensor in _stacks(modules[name]):
            if not tensor.is_contiguous():
                raise NoImages(f"{stack} of layer {name} is not contiguous")
            size = tensor[0].nbytes
            shape = tuple(tensor.shape[1:])
            parts.append(Part(name, stack, index, _end(parts), size, shape, tensor.dtype))
    if not parts:
        raise NoImages("no layer takes adapters")
    return parts


def _stacks(module: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    for stack in _STACKS:
        found = getattr(module, stack, ())
        tensors = found if isinstance(found, tuple | list) else (found,)
        for index, tensor in enumerate(tensors):
            yield stack, index, tensor


def _end(parts: list[Part]) -> int:
    return parts[-1].start + parts[-1].size if parts else 0


def _slots_of(stack: torch.Tensor) -> Any:
    """Shape [slots, bytes], int8. Of numpy without a GPU: one memcpy each, where torch's copy
    starts its threads and falls to a tenth of the speed on busy cores."""
    flat = stack.view(torch.int8).view(stack.shape[0], -1)
    return flat.numpy() if flat.device.type == "cpu" else flat


def namespace(vllm_config: VllmConfig, parts: list[Part]) -> bytes:
    """The hash of what gives the bytes of an image their meaning. The weights of the base are not
    in it: an image holds an adapter alone."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    assert vllm_config.lora_config is not None
    facts = [
        {"vllm": vllm.__version__, "torch": version("torch")},
        {"base": model.hf_config.to_dict(), "dtype": str(model.dtype)},
        {"max_rank": vllm_config.lora_config.max_lora_rank},
        [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank],
        [(p.module, p.stack, p.index, p.shape, str(p.dtype)) for p in parts],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
