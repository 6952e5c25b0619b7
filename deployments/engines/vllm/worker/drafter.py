"""A drafter that leaves while its target serves on, in place, on vLLM's CPU build (F9).

vLLM has no switch for it: with no tokens to draft it would still run the drafter's forward pass and
keep its memory. So the scheduler is told to expect no drafts, the runner that no input fits the
drafter, and then the drafter's weights and its layers' part of the KV cache go back to the kernel.
It happens between two steps, so a generation under way goes on, token for token as without a
drafter. The drafter comes back with the next load.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from deployments.engines import linux
from deployments.engines.vllm.kv.kv_offload import RowCopier, copier_of

_FITS_NOTHING = -1  # longest input of a drafter; the runner looks before each draft


def may_leave(core: Any) -> bool:
    """Whether no step is in flight while the core answers a call, so that no draft is."""
    return core.use_spec_decode and core.batch_queue is None and not core.async_scheduling


def expect_none(core: Any) -> None:
    """Has the scheduler plan no draft from the next step on."""
    scheduler = core.scheduler
    core.check_for_draft_tokens = core.use_spec_decode = False
    scheduler.num_spec_tokens = scheduler.num_lookahead_tokens = 0
    for request in scheduler.requests.values():
        request.spec_token_ids = []


def free(runner: Any) -> int:
    """Returns the bytes of the drafter that the kernel has back."""
    runner.effective_drafter_max_model_len = _FITS_NOTHING
    runner._draft_token_ids = None
    return _free_weights(runner) + _free_cache(runner)


def _free_weights(runner: Any) -> int:
    """Storages that the target shares stay."""
    model, freed = runner.drafter.model, 0
    shared = {tensor.untyped_storage().data_ptr() for tensor in runner.model.parameters()}
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            layer.cpu_linear = None  # a closure over the repacked weight
    for tensor in model.parameters():
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in shared:
            freed += storage.nbytes()
            storage.resize_(0)
    return freed


def _free_cache(runner: Any) -> int:
    caches = _caches(runner)
    copier = copier_of(get_kv_transfer_group()) if has_kv_transfer_group() else None
    if isinstance(copier, RowCopier):  # a drafter leaves on a CPU only
        copier.leave_out({cache.data_ptr() for cache in caches})
    for cache in caches:
        linux.blank(cache.data_ptr(), cache.nbytes)
    return sum(cache.nbytes for cache in caches)


def _caches(runner: Any) -> list[torch.Tensor]:
    """One of each layer of the drafter, each one range of the whole cache."""
    layers = runner.compilation_config.static_forward_context
    caches = [layers[name].kv_cache for name in runner.drafter._draft_attn_layer_names]
    assert all(cache.is_contiguous() for cache in caches), "blocks of several layers are mixed"
    return caches


def caches_of_target(runner: Any) -> list[torch.Tensor]:
    """Returns the caches of all layers but the drafter's."""
    of_target = {cache.data_ptr() for cache in _caches(runner)}
    return [cache for cache in runner.kv_caches if cache.data_ptr() not in of_target]
