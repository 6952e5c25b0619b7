"""What vLLM's offloading connector looks at in each step of the core's thread: what is new, in
place of every running request and every block of it."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import make_offload_key

# Tokens that are stored as one job: a job costs the core's thread some 130 us, and a block of a GPU
# has 16. An engine that is killed, and a request that is preempted, lose less than so many more of
# each conversation.
STORED_TOGETHER = 64


def skip_known_blocks() -> None:
    """Has vLLM's connector look at new blocks, and at requests that have some. Its own way (0.32)
    looks at each running request in each step and skips all older blocks of each by iteration: 1.3
    ms with 128 requests of 500 tokens, more with longer ones (docs/adr/0051). A request whose
    blocks come from a file waits for the last of them, and is not looked up whole in each step."""
    RequestOffloadState.update_offload_keys = _update_offload_keys
    OffloadingConnectorScheduler._update_req_states = _update_req_states
    OffloadingConnectorScheduler._build_store_jobs = _build_store_jobs
    OffloadingConnectorScheduler._lookup = _lookup


@dataclass(slots=True)
class _NextStoreSteps:
    """For each request, the first step in which it can have enough tokens to store, if every step
    adds one. Before that step a request is looked at only when a step adds more than one."""

    step: int = 0
    not_before: dict[str, int] = field(default_factory=dict)


_theirs_update = OffloadingConnectorScheduler._update_req_states
_theirs_build = OffloadingConnectorScheduler._build_store_jobs
_theirs_lookup = OffloadingConnectorScheduler._lookup


def _group_of(self: OffloadingConnectorScheduler) -> GroupOffloadConfig | None:
    """Returns the group of layers of a model that has one group, with full attention. None for any
    other model, for which vLLM's own methods are called unchanged."""
    [group, *more] = self.config.kv_group_configs
    return None if more or self._sliding_window_groups else group


def _update_req_states(self: OffloadingConnectorScheduler, step: SchedulerOutput) -> None:
    if _group_of(self) is None:
        return _theirs_update(self, step)
    cached = step.scheduled_cached_reqs
    pairs = zip(cached.req_ids, cached.new_block_ids, strict=True)
    if resumed := cached.resumed_req_ids:
        changed = [(req_id, groups) for req_id, groups in pairs if groups or req_id in resumed]
    else:
        changed = [(req_id, groups) for req_id, groups in pairs if groups]
    news = SimpleNamespace(
        req_ids=[req_id for req_id, _ in changed],
        new_block_ids=[groups for _, groups in changed],
        resumed_req_ids=resumed,
    )
    _theirs_update(
        self,
        SimpleNamespace(
            scheduled_new_reqs=step.scheduled_new_reqs,
            scheduled_cached_reqs=news,
            kv_cache_block_copies=step.kv_cache_block_copies,
        ),
    )


def _build_store_jobs(
    self: OffloadingConnectorScheduler, step: SchedulerOutput
) -> dict[int, TransferJob]:
    group = _group_of(self)
    if group is None:
        return _theirs_build(self, step)
    size = group.tokens_per_chunk
    together = max(1, STORED_TOGETHER // size)
    looks: _NextStoreSteps = vars(self).setdefault("_looks", _NextStoreSteps())
    looks.step += 1
    now, not_before = looks.step, looks.not_before
    for req_id in step.finished_req_ids:
        not_before.pop(req_id, None)
    due: dict[str, int] = {}
    for req_id, count in step.num_scheduled_tokens.items():
        if count == 1 and now < not_before.get(req_id, 0):
            continue
        state = self._req_status.get(req_id)
        if state is None:
            continue
        request = state.req
        computed = request.num_computed_tokens + count
        least = (state.group_states[0].next_stored_chunk_idx + together) * size
        not_before[req_id] = now + least - computed
        # What is computed after this step; a token that is not sampled yet is not counted.
        if min(computed, request.num_tokens) >= least:
            state.update_offload_keys()
            due[req_id] = count
    reduced = SimpleNamespace(num_scheduled_tokens=due, finished_req_ids=step.finished_req_ids)
    return _theirs_build(self, reduced)


def _lookup(
    self: OffloadingConnectorScheduler,
    req_status: RequestOffloadState,
    max_num_new_tokens: int | None = None,
) -> int | None:
    if self.manager.still_awaits(req_status.req_context):
        return None  # vLLM asks again in the next step
    hit_tokens: int | None = _theirs_lookup(self, req_status, max_num_new_tokens)
    return hit_tokens


def _update_offload_keys(self: RequestOffloadState) -> None:
    hashes = self.req.block_hashes
    for config, state in zip(self.config.kv_group_configs, self.group_states, strict=True):
        each = config.hashes_per_chunk
        for block_hash in hashes[each * len(state.offload_keys) + each - 1 :: each]:
            key = make_offload_key(block_hash, config.group_idx)
            state.offload_keys.append(key)
            end = len(state.offload_keys) * config.tokens_per_chunk
            self.req_context.set_offload_key_position(key, end)
