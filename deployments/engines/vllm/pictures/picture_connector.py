"""vLLM's seams for projected pictures: a connector of its encoder cache over the rows of a slab.

vLLM asks the connector before it runs the encoder, and hands it what the encoder made. The slab
outlives the engine when the node's pool lent it, so that a new engine answers known pictures
without its encoder. On the device a picture is only while a request reads it (`PicturesInUse`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import Request

from arbiter.pool import Rows, Slab, SlabFile, layout
from arbiter.pool.tenants import caps_by_digest
from arbiter.units import Bytes, Content
from deployments.engines.vllm.pictures.picture_cache import (
    ROW_EMBEDDINGS,
    Copies,
    Copy,
    PictureCache,
    RequestedPicture,
)
from deployments.engines.vllm.slabs.lent_slab import mapped_rows, whole_pages

logger = init_logger(__name__)

IMAGE = "image"  # of vLLM's modalities, the one whose identities are ours


class PicturesInUse(EncoderCacheManager):
    """Given to vLLM as `encoder_cache_manager_cls`: the device has a picture while a request reads
    it. `on_hit`: called once for each picture of a request that another one reads just then."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> "PicturesInUse":
        return cls(cache_size)

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.on_hit: Callable[[], None] = lambda: None

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """A request is counted once for each of its pictures, however many steps ask again."""
        is_known = input_id in self.request_cached_ids.get(request.request_id, ())
        is_there: bool = super().check_and_update_cache(request, input_id)
        if is_there and not is_known:
            self.on_hit()
        return is_there

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """The worker drops what left the books with its next step: there is always one after the
        end of a request."""
        super().free_encoder_input(request, input_id)
        while self.freeable:
            key, count = self.freeable.popitem()
            del self.cached[key]
            del self.num_embeds_by_hash[key]
            self.num_free_slots += count
            self.freed.append(key)


@dataclass
class Step(ECConnectorMetadata):
    """What the workers have to copy in one step."""

    copies: Copies


@dataclass
class StepDone(ECConnectorWorkerMetadata):
    """A step that the workers have taken. `saved`: identities whose rows the first one wrote."""

    copies: Copies
    saved: set[str] = field(default_factory=set)

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "StepDone":
        assert isinstance(other, StepDone)
        return StepDone(self.copies, self.saved | other.saved)


class PictureConnector(ECConnectorBase):
    """One in the scheduler, which has the table, and one in each worker, which copies bytes."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._width = int(self._extra["width"])
        self._copier: Copier | None = None
        self._done: StepDone | None = None
        if role is ECConnectorRole.SCHEDULER:
            self.cache = self._open_cache()

    def _open_cache(self) -> PictureCache:
        extra = self._extra
        slab = Slab(
            extra["slab"],
            Content.PICTURE,
            bytes.fromhex(extra["namespace"]),
            row_bytes(self._width, self._dtype),
            extent_bytes=Bytes(extra["extent_bytes"]),
        )
        caps = caps_by_digest(extra["caps"])
        rows = Rows(slab, extra["term_s"], time.time, caps=caps)
        return PictureCache(rows, extra["entries"])

    # -- the scheduler's side --------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """vLLM calls it in each step before it asks for pictures of the request by identity; for
        those before `num_computed_tokens` it asks no more."""
        coming = [
            each
            for each in request.mm_features
            if each.modality == IMAGE
            and each.mm_position.offset + each.mm_position.length > num_computed_tokens
        ]
        if coming:
            whose = layout.tenant_digest(request.cache_salt or ""), request.arrival_time
            self.cache.expect(
                RequestedPicture(each.identifier, each.mm_position.get_num_embeds(), *whose)
                for each in coming
            )
        return True

    def has_cache_item(self, identifier: str) -> bool:
        return self.cache.promise(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.cache.begin(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        """Of what is freed no request reads anything: vLLM leaves out what is read again."""
        return Step(self.cache.end_step(set(scheduler_output.free_encoder_mm_hashes)))

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        done = connector_output.ec_connector_worker_meta
        if isinstance(done, StepDone):
            self.cache.finish(done.copies, done.saved)

    # -- a worker's side -------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Called before the model runs: puts the step's known pictures where its encoder would."""
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        copies = step.copies
        self._done = StepDone(copies) if copies.loads or copies.saves else None
        if self._done and self._copier is None:
            self._copier = Copier(SlabFile(self._extra["slab"]), self._width, self._dtype)
        for load in copies.loads:
            assert self._copier is not None
            loaded = self._copier.load(load).to(self._vllm_config.device_config.device)
            encoder_cache[load.picture.identity] = loaded

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Called after the encoder: all workers have the same embeddings, and the first one
        writes."""
        if self._done is None or get_tensor_model_parallel_rank() != 0:
            return
        assert self._copier is not None
        for save in self._done.copies.saves:
            is_it = save.picture.identity == mm_hash
            if is_it and self._copier.save(save, encoder_cache[mm_hash]):
                self._done.saved.add(mm_hash)

    def build_connector_worker_meta(self) -> StepDone | None:
        done, self._done = self._done, None
        return done


def spare_measuring() -> None:
    """vLLM would run the encoder once at each load, on the largest picture that the model takes, to
    learn how wide embeddings are. That takes seconds to minutes on a CPU; `picture_slab` knows."""
    core.measure_encoder_output_widths = lambda vllm_config, collective_rpc: None


def row_bytes(width: int, dtype: torch.dtype) -> Bytes:
    """The size of ROW_EMBEDDINGS embeddings, in whole kernel pages."""
    return whole_pages(ROW_EMBEDDINGS * width * dtype.itemsize)


class Copier:
    """Copies between pictures and the rows of a slab. On a GPU it waits for the device."""

    def __init__(self, file: SlabFile, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype
        self._part_bytes = ROW_EMBEDDINGS * width * dtype.itemsize
        self._rows = mapped_rows(file, row_bytes(width, dtype))

    def load(self, copy: Copy) -> torch.Tensor:
        """Shape [count, width], in memory of its own: the row may be another picture's soon."""
        loaded = torch.empty((copy.picture.count, self._width), dtype=self._dtype)
        flat = loaded.view(torch.int8).reshape(-1).numpy()
        for part, row in copy.rows.items():
            piece = self._piece(flat, part)
            piece[:] = self._rows[row, : piece.size]
        return loaded

    def save(self, copy: Copy, embeddings: torch.Tensor) -> bool:
        """Whether they have the shape and type that the rows are for."""
        expected, shape = (copy.picture.count, self._width), tuple(embeddings.shape)
        if shape != expected or embeddings.dtype != self._dtype:
            text = "pictures are not kept: embeddings are %s of %s, and rows are for %s of %s"
            logger.warning_once(text, shape, embeddings.dtype, expected, self._dtype)
            return False
        flat = embeddings.detach().cpu().contiguous().view(torch.int8).reshape(-1).numpy()
        for part, row in copy.rows.items():
            piece = self._piece(flat, part)
            self._rows[row, : piece.size] = piece
        return True

    def _piece(self, flat: np.ndarray, part: int) -> np.ndarray:
        start = part * self._part_bytes
        return flat[start : start + self._part_bytes]


def cache_of(scheduler: Any) -> PictureCache | None:
    """The cache within vLLM's scheduler, told of its hits; None for an engine without one."""
    connector = scheduler.get_ec_connector()
    if not isinstance(connector, PictureConnector):
        return None
    manager = scheduler.encoder_cache_manager
    if isinstance(manager, PicturesInUse):
        manager.on_hit = connector.cache.count_hit
    return connector.cache
