"""The seams of vLLM 0.32 by which a drafter leaves in place (deployments.engines.vllm.worker)."""

import inspect

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def test_core_and_scheduler_look_for_drafts_where_we_say_that_there_are_none() -> None:
    core = inspect.getsource(EngineCore)
    for name in ("check_for_draft_tokens", "use_spec_decode", "batch_queue", "async_scheduling"):
        assert f"self.{name}" in core, name
    assert "if self.check_for_draft_tokens and not self.async_scheduling" in core
    scheduler = inspect.getsource(Scheduler)
    for name in ("num_spec_tokens", "num_lookahead_tokens"):
        assert f"self.{name} = " in scheduler, name
    assert "request.spec_token_ids = []" in scheduler


def test_runner_asks_before_each_draft_whether_the_input_fits_the_drafter() -> None:
    asked = inspect.getsource(GPUModelRunner._input_fits_in_drafter)
    assert "<= self.effective_drafter_max_model_len" in asked
    sampling = inspect.getsource(GPUModelRunner.sample_tokens)
    assert sampling.index("self._input_fits_in_drafter(") < sampling.index("self.drafter.")


def test_drafter_knows_its_layers_and_the_connector_its_copier() -> None:
    assert any(
        "self._draft_attn_layer_names" in inspect.getsource(kind)
        for kind in DraftModelProposer.__mro__[:-1]
    )
    assert "self.connector_worker" in inspect.getsource(OffloadingConnector.__init__)
    assert "self.worker = self.spec.get_worker(" in inspect.getsource(OffloadingConnectorWorker)
