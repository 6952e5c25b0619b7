"""The seams of vLLM 0.32 by which KV blocks lie in a slab (deployments.engines.vllm.kv)."""

import inspect
from types import SimpleNamespace
from typing import Any

from vllm import _custom_ops
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config as offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.request import Request

from deployments.engines.vllm.kv import connector_steps
from deployments.engines.vllm.kv.kv_offload import RowCopier, SlabManager, SlabSpec
from deployments.engines.vllm.kv.staged_copier import StagedCopier


def test_our_classes_have_every_method_that_vllm_leaves_open() -> None:
    ours = (
        (base.OffloadingManager, SlabManager),
        (base.OffloadingWorker, RowCopier),
        (base.OffloadingWorker, StagedCopier),
        (base.OffloadingSpec, SlabSpec),
    )
    for theirs, mine in ours:
        assert issubclass(mine, theirs) and not inspect.isabstract(mine)
        for name, function in inspect.getmembers(mine, inspect.isfunction):
            if name in vars(theirs) and name != "__init__":
                asked = list(inspect.signature(getattr(theirs, name)).parameters)
                assert list(inspect.signature(function).parameters) == asked, name


def test_spec_is_found_by_the_path_of_its_module() -> None:
    extra = {"spec_name": "SlabSpec", "spec_module_path": SlabSpec.__module__}
    assert OffloadingSpecFactory.get_spec_cls(extra) is SlabSpec
    fields = AsyncEngineArgs.__dataclass_fields__
    assert {"kv_transfer_config", "prefix_caching_hash_algo"} <= set(fields)


def test_request_knows_its_blocks_in_order() -> None:
    context = base.ReqContext("r")
    context.set_offload_key_position(base.OffloadKey(b"a"), 128)
    assert context._offload_key_positions == {b"a": 128}
    assert "set_offload_key_position(" in inspect.getsource(RequestOffloadState.update_offload_keys)


def test_blocks_of_a_request_are_noted_as_vllm_notes_them() -> None:
    """Our way looks at new hashes only; it is vLLM's but for that."""
    theirs = inspect.getsource(RequestOffloadState.update_offload_keys)
    assert theirs.startswith("    def update_offload_keys(self)"), "ours took its place already"
    groups = [
        SimpleNamespace(hashes_per_chunk=n, tokens_per_chunk=16 * n, group_idx=n) for n in (1, 3)
    ]

    def state() -> Any:
        return SimpleNamespace(
            config=SimpleNamespace(kv_group_configs=groups),
            group_states=[SimpleNamespace(offload_keys=[]) for _ in groups],
            req=SimpleNamespace(block_hashes=[]),
            req_context=base.ReqContext("r"),
        )

    one, other = state(), state()
    for more in (0, 1, 1, 5, 0, 4):
        hashes = [bytes([len(one.req.block_hashes) + n]) * 32 for n in range(more)]
        for each, note in (
            (one, RequestOffloadState.update_offload_keys),
            (other, connector_steps._update_offload_keys),
        ):
            each.req.block_hashes += hashes
            note(each)
        found = [[group.offload_keys for group in each.group_states] for each in (one, other)]
        assert found[0] == found[1]
        assert one.req_context._offload_key_positions == other.req_context._offload_key_positions
    assert [len(keys) for keys in found[0]] == [11, 3]


def test_request_whose_lookup_finds_no_number_is_looked_up_again_in_the_next_step() -> None:
    asks = inspect.getsource(OffloadingConnectorScheduler.get_num_new_matched_tokens)
    assert "num_hit_tokens = self._lookup(req_status, max_num_new_tokens)" in asks
    assert "return num_hit_tokens, bool(num_hit_tokens)" in asks
    later = inspect.getsource(Scheduler.schedule)
    assert "if ext_tokens is None:" in later


def test_manager_is_found_within_the_scheduler() -> None:
    assert "self.connector_scheduler = OffloadingConnectorScheduler(" in inspect.getsource(
        OffloadingConnector.__init__
    )
    assert "self.manager" in inspect.getsource(OffloadingConnectorScheduler.__init__)
    assert "self.connector = KVConnectorFactory.create_connector(" in inspect.getsource(
        Scheduler.__init__
    )


def test_scheduler_knows_a_request_and_its_salt_before_the_connector_does() -> None:
    source = inspect.getsource(Scheduler.add_request)
    known = source.index("self.requests[request.request_id] = request")
    assert known < source.index("self.connector.on_new_request(request)")
    assert "self.cache_salt" in inspect.getsource(Request.__init__)
    assert "self.arrival_time = arrival_time" in inspect.getsource(Request.__init__)
    create = inspect.getsource(scheduler._create_req_context)
    assert "req_id=req.request_id" in create


def test_stores_of_a_reset_engine_are_written_before_the_next_ones() -> None:
    """On that rests how long a reset manager leaves rows where they are."""
    flush = inspect.getsource(worker.OffloadingConnectorWorker.handle_preemptions)
    assert flush.index("submit_store") < flush.index("self.worker.wait(")
    reset = inspect.getsource(OffloadingConnectorScheduler.reset_cache)
    assert "_current_batch_jobs_to_flush.update(self._jobs.keys())" in reset
    assert "self._stale_job_threshold = self._job_counter" in reset


def test_block_of_a_worker_has_the_bytes_of_all_its_layers() -> None:
    source = inspect.getsource(offloading_config.build_offloading_config)
    assert "worker_kv_bytes_per_block = total_gpu_kv_bytes // kv_cache_config.num_blocks" in source


def test_copies_on_a_gpu_are_asked_for_as_vllm_asks() -> None:
    """Unproven on a GPU; at least the names agree, and where pages lie."""
    swap = inspect.signature(_custom_ops.swap_blocks_batch)
    assert list(swap.parameters) == ["src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any"]
    views = inspect.getsource(gpu_worker.CPUOffloadingWorker.__init__)
    assert "tensor.view(torch.int8).view(" in views and "(-1, gpu_page_size_bytes)" in views
    assert gpu_worker._select_swap_blocks_fn([[]], gpu_to_cpu=True) is _custom_ops.swap_blocks_batch
    handler = gpu_worker.SingleDirectionOffloadingHandler
    assert "is_src_access_order_any = not self.gpu_to_cpu" in inspect.getsource(
        handler.transfer_async
    )
    submits = inspect.getsource(worker.OffloadingConnectorWorker.start_kv_transfers)
    assert submits.count("self.worker.submit_store(") == submits.count("submit_load(") == 1
    assert "row_stride = tensor.stride(0)" in inspect.getsource(gpu_worker.compute_sub_block_ptrs)


def test_sleep_on_a_gpu_takes_the_blocks_without_asking_the_connector() -> None:
    """So that our worker has to wait for copies that are under way."""
    assert "kv_transfer" not in inspect.getsource(EngineCore.sleep)
