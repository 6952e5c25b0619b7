"""The seams of vLLM 0.32 by which slots are filled from images (deployments/engines/vllm)."""

import inspect

from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from deployments.engines.vllm.engine_core.core_process import ForkedCore


def test_adapter_is_loaded_added_and_activated_by_methods_that_can_be_replaced() -> None:
    adds = inspect.getsource(LRUCacheWorkerLoRAManager.add_adapter)
    load, add = adds.index("self._load_adapter(lora_request)"), adds.index(".add_adapter(lora)")
    assert load < add < adds.index("self._adapter_manager.activate_adapter(")
    assert "self._add_adapter(lora)" in inspect.getsource(LRUCacheLoRAModelManager.add_adapter)
    pins = inspect.getsource(LRUCacheLoRAModelManager._pin_lora_in_gpu_cache)
    assert "self.activate_adapter(lora_id)" in pins


def test_image_is_written_as_vllm_fills_a_slot() -> None:
    """What SlotImages does in the place of these two."""
    fills = inspect.getsource(LoRAModelManager.activate_adapter)
    for step in (
        "self._active_adapters[lora_id] = None",
        "self.lora_index_to_id[index] = lora_model.id",
        "in self.modules.items()",
        "self._get_lora_layer_weights(lora_model, module_name)",
        "module.reset_lora(index)",
        "module.set_lora(",
    ):
        assert step in fills
    adds = inspect.getsource(LoRAModelManager._add_adapter)
    for step in (
        "self._validate_moe_lora_format(lora)",
        "self._create_merged_loras_inplace(lora)",
        "self._registered_adapters[lora.id] = lora",
    ):
        assert step in adds
    evicts = inspect.getsource(LRUCacheLoRAModelManager.activate_adapter)
    assert "len(self._active_adapters) >= self.lora_slots" in evicts
    assert "self._active_adapters.remove_oldest()" in evicts


def test_layer_writes_a_slot_into_its_stacks_alone() -> None:
    """Because an image's layer is a copy whose stacks lie in the slab. `copy_` to host memory is
    done when it returns, also where it may be asked not to block."""
    writes = inspect.getsource(BaseLinearLayerWithLoRA.set_lora)
    assert "self.reset_lora(index)" in writes
    assert (
        "self.lora_a_stacked[0][index, 0" in writes and "self.lora_b_stacked[0][index, 0" in writes
    )


def test_step_sees_that_a_slot_has_another_adapter() -> None:
    source = inspect.getsource(LoRAModelManager.set_adapter_mapping)
    assert "tuple(self.lora_index_to_id)" in source


def test_manager_is_found_within_the_core() -> None:
    assert "self.driver_worker = WorkerWrapperBase(" in inspect.getsource(UniProcExecutor)
    loads = inspect.getsource(LoRAModelRunnerMixin.load_lora_model)
    assert "self.lora_manager = LRUCacheWorkerLoRAManager(" in loads


def test_core_converts_a_request_for_an_adapter_by_the_type_of_the_argument() -> None:
    assert "issubclass(p.annotation, msgspec.Struct)" in inspect.getsource(
        EngineCoreProc._convert_msgspec_args
    )
    for method in (ForkedCore.bring_adapter, ForkedCore.stage_adapter):
        first = list(inspect.signature(method).parameters.values())[1]
        assert inspect.isclass(first.annotation)
