"""The seams of vLLM 0.32 by which pictures lie in a slab (deployments/engines/vllm/picture_*)."""

import inspect

import pytest
from vllm.config import ECTransferConfig, VllmConfig
from vllm.config.ec_manager_config import EncoderCacheManagerConfig
from vllm.distributed.ec_transfer.ec_connector import base
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin
from vllm.v1.worker.gpu.ec_connector import ActiveECConnector
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from deployments.config.config_file import check_file
from deployments.engines.vllm.pictures.picture_connector import PictureConnector, PicturesInUse
from tests.support.engine_host import ROOT


def source(of: object) -> str:
    return inspect.getsource(of)  # type: ignore[arg-type]


def test_our_classes_have_every_method_that_vllm_leaves_open() -> None:
    ours = {base.ECConnectorBase: PictureConnector, EncoderCacheManager: PicturesInUse}
    for theirs, mine in ours.items():
        assert issubclass(mine, theirs) and not inspect.isabstract(mine)
        for name, function in inspect.getmembers(mine, inspect.isfunction):
            if name in vars(theirs) and name != "__init__":
                asked = list(inspect.signature(getattr(theirs, name)).parameters)
                assert list(inspect.signature(function).parameters) == asked, name


@pytest.mark.parametrize(
    "file", ["serve_config.yaml", "serve_config.gpu.yaml", "serve_config.gpu80.yaml"]
)
def test_shipped_models_name_managers_that_vllm_can_make(file: str) -> None:
    table = check_file(ROOT / file)
    for capability in table.capabilities.values():
        for name, model in capability.models.items():
            given = model.engine_args.get("ec_manager_config")
            if given is not None:
                found = EncoderCacheManagerConfig(**given).get_encoder_cache_manager_obj()
                assert issubclass(found, EncoderCacheManager), name


def test_both_are_found_by_their_paths() -> None:
    config = ECTransferConfig(
        ec_connector=PictureConnector.__name__,
        ec_connector_module_path=PictureConnector.__module__,
        ec_role="ec_both",
    )
    assert ECConnectorFactory.get_connector_class(config) is PictureConnector
    assert config.is_ec_producer and config.is_ec_consumer
    path = f"{PicturesInUse.__module__}.{PicturesInUse.__name__}"
    manager = EncoderCacheManagerConfig(encoder_cache_manager_cls=path)
    assert manager.get_encoder_cache_manager_obj() is PicturesInUse
    fields = set(AsyncEngineArgs.__dataclass_fields__)
    assert {"ec_transfer_config", "ec_manager_config"} <= fields


def test_scheduler_tells_the_request_asks_for_its_pictures_and_then_says_what_it_took() -> None:
    """On this order rests that a promise ends with its step or is loaded in it."""
    asks = source(Scheduler._try_schedule_encoder_inputs)
    assert asks.index("check_and_update_cache(request, i)") < asks.index("has_cache_item(")
    takes = source(Scheduler._allocate_encoder_inputs)
    assert "self.ec_connector.update_state_after_alloc(request, input_id)" in takes
    step = source(Scheduler.schedule)
    tells = [step.index("ensure_cache_available("), step.index("_ec_transfer_pending(")]
    assert max(tells) < step.rindex("_try_schedule_encoder_inputs(")
    assert tells[0] < step.index("_try_schedule_encoder_inputs(")
    assert "ensure_cache_available(" in source(Scheduler._ec_transfer_pending)
    assert step.rindex("_allocate_encoder_inputs(") < step.index("build_connector_meta(")
    assert "self.ec_connector.update_connector_output(" in source(Scheduler.update_from_output)


def test_request_that_is_preempted_in_its_step_frees_its_pictures_before_the_step_is_told() -> None:
    """On this rests that what no request reads is neither loaded nor written. In a step without
    work for the worker it would never be told done."""
    assert "self.encoder_cache_manager.free(request)" in source(Scheduler._preempt_request)
    freed = source(EncoderCacheManager.get_freed_mm_hashes)
    assert "if mm_hash not in self.cached]" in freed
    step = source(Scheduler.schedule)
    told = step.index("free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes()")
    assert step.index("self._preempt_request(") < told < step.index("build_connector_meta(")
    execute = source(GPUModelRunner.execute_model)
    assert execute.index("return EMPTY_MODEL_RUNNER_OUTPUT") < execute.index("self._preprocess(")


def test_device_hears_of_dropped_pictures_before_it_loads_and_also_in_an_empty_step() -> None:
    execute = source(GPUModelRunner.execute_model)
    updates = execute.index("self._update_states(scheduler_output)")
    assert updates < execute.index("if not num_scheduled_tokens:")
    assert updates < execute.index("self._preprocess(")
    update = source(GPUModelRunner._update_states)
    assert "self._process_encoder_cache_scheduler_output(scheduler_output)" in update
    assert "maybe_get_ec_connector_output(" in source(GPUModelRunner._preprocess)
    assert "self.finished_req_ids" in source(Scheduler.has_finished_requests)


def test_worker_loads_then_encodes_and_saves_and_says_what_it_did() -> None:
    loads = source(ECConnectorModelRunnerMixin._get_ec_connector_output)
    assert loads.index("start_load_caches(") < loads.index("yield output")
    assert loads.index("yield output") < loads.index("build_connector_worker_meta()")
    assert "save_caches(" in source(ECConnectorModelRunnerMixin.maybe_save_ec_to_connector)
    later = source(ActiveECConnector.maybe_get_output)  # of vLLM's second model runner
    assert later.index("start_load_caches(") < later.index("ec_connector.save_caches(")
    assert later.index("ec_connector.save_caches(") < later.index("build_connector_worker_meta()")


def test_workers_answers_reach_the_scheduler_as_one() -> None:
    assert "worker_meta.aggregate(meta)" in source(ECOutputAggregator.aggregate)
    assert "init_ec_output_aggregator()" in source(EngineCore.__init__)


def test_encoder_is_measured_by_one_replaceable_function() -> None:
    """`spare_measuring` replaces it."""
    assert "measure_encoder_output_widths(vllm_config, self.collective_rpc)" in source(
        EngineCore.__init__
    )
    names = list(inspect.signature(core.measure_encoder_output_widths).parameters)
    assert names == ["vllm_config", "collective_rpc"]


def test_connector_alone_would_have_vllm_accept_embeddings() -> None:
    """So `refuse_embeddings` takes that back."""
    assert "mm_config.enable_mm_embeds = True" in inspect.getsource(VllmConfig)
