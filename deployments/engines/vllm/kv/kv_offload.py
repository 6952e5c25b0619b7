"""KV blocks that outlive their engine: vLLM's offloading connector over a slab (`arbiter.pool`).

vLLM's own connector decides what is stored and loaded, and when; here is where the blocks lie. The
slab belongs to the node agent, so a killed engine's successor finds every block that was stored: of
an answer that was being made, all but the last few (`connector_steps.STORED_TOGETHER`). The key of
a row is vLLM's block hash, in which the prefix, the adapter and the tenant's salt are.

A model that sees takes pictures only, and no embeddings from clients.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from arbiter.pool import Rows, SavedRows, Slab, SlabFile, Term, layout
from arbiter.pool.layout import Count
from arbiter.pool.tenants import caps_by_digest
from arbiter.units import Content
from deployments import messages
from deployments.engines.protocol import Config
from deployments.engines.vllm.kv.connector_steps import skip_known_blocks
from deployments.engines.vllm.kv.kept_blocks import KeptSince
from deployments.engines.vllm.kv.kv_restore import Restorer
from deployments.engines.vllm.kv.staged_copier import StagedCopier
from deployments.engines.vllm.slabs.lent_slab import (
    hold_configured,
    mapped_rows,
    refuse_embeddings,
    weights_digest,
    whole_pages,
)
from deployments.engines.vllm.slabs.next_extent import NextExtent

logger = init_logger(__name__)

FACTS = "/slab"  # GET: what each slab holds, by content; POST: shrinks them to their limits first
# xxhash would begin each process with random numbers, and no key would be found again.
_HASH = "sha256"
_NOTED_S = 30.0  # until blocks of a request that runs on are noted as used again


def arguments(config: Config) -> dict[str, Any]:
    """vLLM's arguments for an engine that was lent a slab of KV: `config["slabs"]["kv"]` has its
    `path`, and perhaps a `file` with more rows, the `model_digest` of the weights, `term_s`, the
    length of the class `long`, and `caps`: by tenant the part of the rows that it may have. Empty
    without one."""
    slab = config.get("slabs", {}).get(Content.KV)
    if not slab:
        return {}
    extra = {
        "spec_name": SlabSpec.__name__,
        "spec_module_path": SlabSpec.__module__,
        "slab": slab["path"],
        "file": slab.get("file"),
        "term_s": float(slab.get("term_s", layout.TERMS_S[Term.LONG])),
        "caps": slab.get("caps", {}),
        "offload_prompt_only": False,  # vLLM's default would leave out what the model has said
    }
    return {
        "prefix_caching_hash_algo": _HASH,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    }


def configure_connector(vllm_config: VllmConfig, config: Config) -> None:
    """Takes the connector away again where it cannot work, so that the model loads as without a
    slab; else names the namespace. Called before the core is forked."""
    transfer = vllm_config.kv_transfer_config
    if not has_slab(vllm_config):
        return
    refuse_embeddings(vllm_config, config)
    extra = transfer.kv_connector_extra_config
    cause = refusal(vllm_config) or hold_configured(extra)
    digests = _digests(vllm_config, config["slabs"][Content.KV])
    if cause is None and None in digests:
        cause = "its weights are no files on disk, so that nothing tells them apart"
    if cause is not None:
        logger.warning("%s keeps no KV blocks in a slab: %s", config["model"], cause)
        vllm_config.kv_transfer_config = None
        return
    extra["namespace"] = _digest(_facts(vllm_config), digests).hex()
    # The worker writes what was in flight before the first step behind a reset. As many steps as
    # are planned ahead begin before that is known to be over.
    extra["steps_after_reset"] = vllm_config.max_concurrent_batches + 1


def has_slab(vllm_config: VllmConfig) -> bool:
    """Whether its connector is ours; a person may have configured another one."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and "slab" in transfer.kv_connector_extra_config


def refusal(vllm_config: VllmConfig) -> str | None:
    """Why vLLM 0.32 has no use for a connector, or would end with it, with this model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    causes = {
        "it does not generate": model.runner_type != "generate",
        "it has an encoder of text or sound": model.is_encoder_decoder,
        "its state is no KV cache alone": model.is_hybrid or model.is_attention_free,
        "its prefix cache is off": not vllm_config.cache_config.enable_prefix_caching,
        "its device is neither a CPU nor one of CUDA or ROCm": not (
            current_platform.is_cpu() or current_platform.is_cuda_alike()
        ),
        "it has several data-parallel cores, and a slab has one writer": (
            parallel.data_parallel_size > 1
        ),
        "stages of its pipeline differ in layers, and so in the size of their rows": (
            parallel.pipeline_parallel_size > 1 and _is_uneven(vllm_config)
        ),
    }
    return next((cause for cause, holds in causes.items() if holds), None)


def _is_uneven(vllm_config: VllmConfig) -> bool:
    """A drafter is in the last stage alone."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return bool(
        vllm_config.model_config.get_total_num_hidden_layers() % stages
        or vllm_config.speculative_config
        or os.environ.get("VLLM_PP_LAYER_PARTITION")
    )


def _facts(vllm_config: VllmConfig) -> dict[str, Any]:
    """What gives the bytes of a block their meaning, the weights aside."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, drafts = vllm_config.parallel_config, vllm_config.speculative_config
    return {
        "vllm": vllm.__version__,
        "torch": version("torch"),
        "hash": cache.prefix_caching_hash_algo,
        "device": current_platform.device_type,
        "weights": [str(model.dtype), str(model.quantization)],
        "shape": model.hf_config.to_dict(),
        "kv": str(cache.cache_dtype),
        "max_model_len": model.max_model_len,
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        ],
        "drafts": None if drafts is None else [drafts.method, drafts.num_speculative_tokens],
    }


def _digests(vllm_config: VllmConfig, slab: Mapping[str, Any]) -> list[str | None]:
    """Returns the digests of the model's weights and the drafter's; None where one has no files
    here."""
    model = slab.get("model_digest") or weights_digest(Path(vllm_config.model_config.model))
    drafts = vllm_config.speculative_config
    if drafts is None or drafts.model is None:
        return [model]
    return [model, weights_digest(Path(drafts.model))]


def _digest(*facts: Any) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


class SlabSpec(OffloadingSpec):
    """What vLLM's connector asks for the place of its blocks. One in the scheduler, which writes
    the table, and one in each worker, which copies bytes."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        assert self.blocks_per_chunk == 1, "a row is one block"
        parallel = config.parallel
        self.rank_bytes = config.worker_kv_bytes_per_block
        self.row_bytes = whole_pages(self.rank_bytes * parallel.world_size)
        self.manager: SlabManager | None = None

    @property
    def namespace(self) -> bytes:
        """The one of the configuration, with what is known only once the cache is laid out."""
        config = self.config
        groups = [(group.tokens_per_block, group.layer_names) for group in config.groups]
        layouts = (config.kv_cache_layout, config.canonical_layout, config.model.dtype)
        sizes = (config.cache.tokens_per_hash, self.row_bytes, config.parallel.world_size)
        return _digest(self.extra_config["namespace"], groups, layouts, sizes)

    def get_manager(self) -> "SlabManager":
        if self.manager is None:
            skip_known_blocks()
            path = self.extra_config["slab"]
            slab = Slab(path, Content.KV, self.namespace, self.row_bytes)
            slab.ahead = NextExtent(slab.file.fd)
            caps = caps_by_digest(self.extra_config["caps"])
            rows = Rows(slab, self.extra_config["term_s"], time.time, caps=caps)
            steps = int(self.extra_config["steps_after_reset"])
            self.manager = SlabManager(rows, self._restorer(rows), steps)
        return self.manager

    def _restorer(self, rows: Rows) -> Restorer | None:
        """None where no file was given, or it has nothing for this namespace."""
        file = self.extra_config["file"]
        if file is None:
            return None
        now_s = time.time()
        saved = SavedRows(Path(file), Content.KV, self.namespace, self.row_bytes, now_s)
        logger.info("%s has %d KV blocks of this model", file, len(saved.keys))
        if saved.keys:
            return Restorer(rows, saved, time.time)
        saved.close()
        return None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        rows = mapped_rows(SlabFile(self.extra_config["slab"]), self.row_bytes)
        start = self.config.parallel.rank * self.rank_bytes
        kind = RowCopier if current_platform.is_cpu() else StagedCopier
        return kind(kv_caches, rows[:, start : start + self.rank_bytes])


@dataclass(slots=True)
class _Use:
    """What the rows that a request uses are marked with: its tenant, its class of term, and when
    the request came."""

    tenant: bytes = layout.NO_TENANT
    term: Term = Term.LONG
    asked_s: float | None = None  # None: not known; rows then have the time when they are reserved
    noted_count: int = 0  # of its blocks, when they were noted as used last
    noted_s: float = 0.0  # when that was, by time.monotonic

    def must_be_noted(self, count: int, now_s: float) -> bool:
        """Whether to note the request's blocks as used again: once there are an eighth more, or
        after half a minute. Noting all blocks with each new block would cost their number
        squared."""
        return count >= self.noted_count * 9 / 8 or now_s - self.noted_s >= _NOTED_S


def _use(req_context: ReqContext) -> _Use:
    return req_context.get_state(_Use) or _Use()


def _term(params: Mapping[str, Any] | None) -> Term:
    """Returns the term of a request's `kv_transfer_params`, which only the front sets; a word that
    is none counts as nothing said, because an error here would end the engine."""
    word = str((params or {}).get(messages.KV_TERM, "")).upper()
    return Term[word] if word in Term.__members__ else Term.LONG


class SlabManager(OffloadingManager):
    """The scheduler's side: which block lies in which row. `restorer`: reads further blocks from
    the slab's file. `steps_after_reset`: after so many steps the worker has written the blocks that
    were in flight at a reset."""

    def __init__(
        self, rows: Rows, restorer: Restorer | None = None, steps_after_reset: int = 2
    ) -> None:
        self.rows, self.restorer, self._steps_after_reset = rows, restorer, steps_after_reset
        self.may_store = True  # False: its blocks lack layers that their namespace promises
        if restorer is not None:
            rows.before_erasure = restorer.forget_tenant
        self.requests: Mapping[str, Any] = {}  # the scheduler's own, by id: see `manager_of`
        self._kept: KeptSince | None = None
        self._steps_to_free = 0
        self._loads_began_ns: dict[str, int] = {}  # by request: it has one load at a time

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        if self.restorer is not None:
            if self.restorer.awaits(key, req_context):
                return LookupResult.RETRY
            if key in self.restorer.coming:
                return LookupResult.MISS  # its read hangs on the disk, so it is computed anew
        if self.rows.is_reserved(key):
            return LookupResult.HIT_PENDING
        return LookupResult.MISS if self.rows.lookup(key) is None else LookupResult.HIT

    def still_awaits(self, req_context: ReqContext) -> bool:
        """Whether all looks for a request's rows would be answered as in the last step."""
        return self.restorer is not None and self.restorer.still_awaits(req_context)

    def get_load_source(self, key: bytes, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> LoadStoreSpec:
        self._loads_began_ns[req_context.req_id] = time.monotonic_ns()
        rows = self.rows.pin(keys)
        self._used(req_context)
        return CPULoadStoreSpec(rows)

    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        self.rows.unpin(keys)
        began_ns = self._loads_began_ns.pop(req_context.req_id, None)
        if began_ns is not None:
            self.rows.count(Count.LOAD_NS, time.monotonic_ns() - began_ns)

    def prepare_store(self, keys: Collection[bytes], req_context: ReqContext) -> PrepareStoreOutput:
        """Reserves rows for as many keys as there is room for. The answer is never None, not even
        without any row: vLLM would ask again in every step, and log that."""
        if self.restorer is not None:
            self.restorer.give_up(keys)
        if not self.may_store:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        keep, use = req_context._offload_key_positions.keys(), _use(req_context)
        reserved = self.rows.reserve(
            keys, keep, tenant=use.tenant, term=use.term, asked_s=use.asked_s
        )
        spec = CPULoadStoreSpec(list(reserved.rows.values()))
        return PrepareStoreOutput(list(reserved.rows), spec, reserved.evicted)

    def complete_store(
        self, keys: Collection[bytes], req_context: ReqContext, success: bool = True
    ) -> None:
        use = _use(req_context)
        for key in keys:
            if success:
                self.rows.mark_ready(key, use.tenant, use.term)
            else:
                self.rows.abandon(key)
        if use.must_be_noted(len(req_context._offload_key_positions), time.monotonic()):
            self._used(req_context)

    def _used(self, req_context: ReqContext) -> None:
        """Makes all blocks of a request the most recently used, its first one the last to leave,
        and has none expire before its term: the connector tells us neither of blocks that the
        device has nor of their order."""
        places, use = req_context._offload_key_positions, _use(req_context)
        latest_first = sorted(places, key=places.__getitem__, reverse=True)
        self.rows.touch(latest_first, use.term)
        use.noted_count, use.noted_s = len(places), time.monotonic()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Notes the term and the tenant, whose name is the salt that the front gives to its
        requests. The connector leaves the salt out of its context, and the last blocks are stored
        when the request is gone."""
        request = self.requests.get(req_context.req_id)
        term = _term(req_context.kv_transfer_params)
        if request is None:
            use = _Use(term=term)
        else:
            tenant = layout.tenant_digest(request.cache_salt or "")
            use = _Use(tenant, term, request.arrival_time)
        req_context.set_state(use)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._used(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._steps_to_free:
            self._steps_to_free -= 1
            if not self._steps_to_free:
                self.rows.free_forgotten()
        if self.restorer is not None:
            self.restorer.end_step()
        self.shrink()

    def has_pending_work(self) -> bool:
        return self.restorer is not None and self.restorer.is_busy

    def shrink(self) -> None:
        """Erases what the owner has ordered to, and gives back what its limit no longer permits,
        also in an engine that sleeps."""
        self.rows.shrink_to_limit()
        if self._kept is not None:
            has_rows = self.may_store and len(self.rows)  # else it finds no room, or no use
            self._kept.lost_in_slab(self.rows.lost_used_s if has_rows else math.inf)
            for tenant, used_s in self.rows.capped_used_s.items():
                self._kept.lost_by_cap(tenant, used_s)

    def tell_kept(self, kept: KeptSince) -> None:
        """Says after each step what it has lost, from now on."""
        self._kept = kept
        self.shrink()

    def reset_cache(self) -> None:
        """What is READY stays: a block's key says what it holds. vLLM calls this for every sleep.
        The worker may still write what was in flight, so that those rows are not free yet."""
        written: Collection[bytes] = ()
        if self.restorer is not None:
            self.restorer.stop()
            written = self.restorer.coming
        self.rows.forget_in_flight(but=written)
        self._loads_began_ns.clear()
        self._steps_to_free = self._steps_after_reset

    def shutdown(self) -> None:
        if self.restorer is not None:
            self.restorer.close()

    def facts(self) -> dict[str, int]:
        return self.rows.slab.facts()


def manager_of(scheduler: Any) -> SlabManager | None:
    """The manager within vLLM's scheduler, told of its requests; None for an engine without a
    slab."""
    side = getattr(scheduler.connector, "connector_scheduler", None)
    manager = getattr(side, "manager", None)
    if not isinstance(manager, SlabManager):
        return None
    manager.requests = scheduler.requests
    return manager


def copier_of(connector: Any) -> "RowCopier | StagedCopier | None":
    """The copier within vLLM's connector in a worker; None where it is not ours."""
    worker = getattr(getattr(connector, "connector_worker", None), "worker", None)
    return worker if isinstance(worker, RowCopier | StagedCopier) else None


class RowCopier(OffloadingWorker):
    """The worker's side on the CPU build: copies blocks in the step that needs them.

    One memcpy by numpy for each block and layer: torch's `copy_` starts its threads for each one
    and falls to a tenth of that on busy cores. `rows`: the slab's, shape [rows, bytes of a block].
    Blocks are looked up anew for each transfer, because a sleep may give their storage back."""

    def __init__(self, kv_caches: CanonicalKVCaches, rows: np.ndarray) -> None:
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._layers = kv_caches.group_data_refs
        self._rows = rows
        self._starts: list[int] = []  # of each tensor's page within a row
        end = 0
        for cache in kv_caches.tensors:
            self._starts.append(end)
            end += cache.page_size_bytes
        assert end <= rows.shape[1], f"a block has {end} bytes, a row {rows.shape[1]}"
        self._left_out: set[int] = set()  # indices of tensors
        self._finished: list[TransferResult] = []

    def leave_out(self, addresses: set[int]) -> None:
        """Copies nothing more of the layers whose caches begin there: they gave their memory back.
        In a row that is written meanwhile their part becomes zeros."""
        indexes = {n for n, tensor in enumerate(self._tensors) if tensor.data_ptr() in addresses}
        assert len(indexes) == len(addresses), (
            f"{len(indexes)} of {len(addresses)} layers are known"
        )
        self._left_out |= indexes

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        began = time.perf_counter()
        size = 0
        for block, row in self._pieces(src_spec, dst_spec):
            row[:] = 0 if block is None else block
            size += row.nbytes
        return self._finish(job_id, size, began)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        began = time.perf_counter()
        size = 0
        for block, row in self._pieces(dst_spec, src_spec):
            if block is not None:
                block[:] = row
                size += row.nbytes
        return self._finish(job_id, size, began)

    def _pieces(
        self, blocks: GPULoadStoreSpec, rows: CPULoadStoreSpec
    ) -> Iterable[tuple[np.ndarray | None, np.ndarray]]:
        """Each layer's part of a block, None where it is left out, with its part of the row."""
        pages = [tensor.view(torch.int8).numpy() for tensor in self._tensors]
        pairs = iter(zip(blocks.block_ids.tolist(), rows.block_ids.tolist(), strict=True))
        for layers, count in zip(self._layers, blocks.group_sizes, strict=True):
            for block, row in [next(pairs) for _ in range(count)]:
                for layer in layers:
                    start, size = self._starts[layer.tensor_idx], layer.page_size_bytes
                    part = self._rows[row, start : start + size]
                    is_there = layer.tensor_idx not in self._left_out
                    yield pages[layer.tensor_idx][block, :size] if is_there else None, part

    def _finish(self, job_id: int, size: int, began: float) -> bool:
        seconds = time.perf_counter() - began
        self._finished.append(TransferResult(job_id, True, size, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every job is done when it has been submitted."""
