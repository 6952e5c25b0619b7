"""Text (and large embedding models) through vLLM: its own OpenAI app over a core forked here.

`engine_args` are vLLM's own, by name (`max_model_len: 1024`, `enable_lora: true`, on a GPU
`device_ids: [2]`, `gpu_memory_utilization: 0.4`); `arguments.py` adds ours. `kv_cache_memory_bytes`
is required, because vLLM's default is a share of what happens to be free.

A request passes these parts, each left out where the model has no use for it: ContextGrowth
(`VllmEngine.app`), Pictures (`_route`), AdapterService (`_infer`), vLLM's own application, and
within it AdmittingLLM.generate, which waits for a place in the batch (BatchGate).
"""

import asyncio
import os
from argparse import Namespace
from functools import cache, partial
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from torch import float32
from vllm import PoolingParams, SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.utils.fingerprint import build_system_fingerprint
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError

from arbiter.core.types import Priority
from arbiter.errors import RequestError
from arbiter.units import Content
from deployments import messages
from deployments.engines import asgi, linux
from deployments.engines.protocol import (
    Asgi,
    CannotReload,
    Config,
    EngineLoadFailed,
    Receive,
    Scope,
    Send,
)
from deployments.engines.vllm.adapters import adapter_images
from deployments.engines.vllm.adapters.adapter_service import AdapterService, AdmittingLLM
from deployments.engines.vllm.arguments import (
    SHARES_COPY,
    arguments,
    compute_threads,
    on_cpu,
    parser,
    processes_count,
)
from deployments.engines.vllm.batching import callers
from deployments.engines.vllm.batching.batch_gate import AHEAD, BatchGate
from deployments.engines.vllm.batching.callers import HeldHead
from deployments.engines.vllm.engine_core import core_watch, own_sockets
from deployments.engines.vllm.engine_core.core_process import Core, await_core, fork_core
from deployments.engines.vllm.kv import kv_offload
from deployments.engines.vllm.pictures import picture_identity, picture_slab
from deployments.engines.vllm.pictures.picture_identity import Pictures
from deployments.engines.vllm.refusals_log import leave_out_refusals
from deployments.engines.vllm.routes import pooling
from deployments.engines.vllm.routes.context_growth import ContextGrowth
from deployments.engines.vllm.routes.prewarm import NO_CACHE, Prewarmer
from deployments.requests import prefixes
from deployments.routing.pieces import KeptKv

if TYPE_CHECKING:
    from deployments.engines.vllm.routes.whisper import WhisperHearing

HEARING_ROUTES = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
# What a replica may call. vLLM also registers routes that pause, scale or reload an engine, or run
# any of its calls by name; those stay out of reach.
ROUTES = (
    frozenset(
        "/v1/chat/completions /v1/completions /v1/embeddings /v1/responses /v1/messages "
        "/v1/messages/count_tokens /v1/models "
        "/tokenize /detokenize /pooling /metrics /adapters /admission /pictures /slab".split()
    )
    | HEARING_ROUTES
    | frozenset(pooling.HANDLERS)
)
WHISPER = "whisper"
_PROBE = "The answer is"
_DEAD_S = 0.5  # for so long a frontend whose core is dead still answers its requests


def build(config: Config) -> "VllmEngine":
    """Forks vLLM's core from this process, which is single threaded because the zygote has just
    forked it, and returns the frontend to load. Raises EngineLoadFailed, and what vLLM raises."""
    if "host_copy" in config and not on_cpu():
        why = "host_copy: on a GPU vLLM sleeps in copies of its own; give it `host_copy: private`"
        raise EngineLoadFailed("BadConfig", why, False)
    os.environ.update(VLLM_SERVER_DEV_MODE="0", VLLM_ALLOW_RUNTIME_LORA_UPDATING="0")
    own_sockets.make_private(os.environ["ARBITER_ENGINE"])
    leave_out_refusals()
    args = arguments(config)
    vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
    _refuse_float32_adapters(vllm_config)
    if on_cpu():
        # vLLM would start each process of a parallel model by spawn, which imports everything anew.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if "shared_copy" in config:
            vllm_config.additional_config = {**vllm_config.additional_config, SHARES_COPY: True}
    kv_offload.configure_connector(vllm_config, config)
    picture_slab.configure_connector(vllm_config, config)
    core = fork_core(
        vllm_config,
        os.environ["ARBITER_ENGINE"],
        stats=not args.disable_log_stats,
        threads=compute_threads(config),
        images=(images := adapter_images.hold_slab(config)),
    )
    gate = _gate(config, vllm_config)
    # Each process of a CPU would have a copy of all weights in host RAM, which counts one. A model
    # that shares a copy has no room for one of its own.
    is_whole = not on_cpu() or processes_count(config) == 1
    lacks_copy = "host_copy" in config and "shared_copy" not in config
    return VllmEngine(
        args,
        vllm_config,
        core,
        gate,
        can_sleep=is_whole and not lacks_copy and config.get("can_sleep", True),
        has_slab=images is not None or kv_offload.has_slab(vllm_config),
        most_tokens=int(config.get("grows_to", {}).get("max_model_len", 0)),
        adapters=AdapterService(config, gate) if "adapters" in config else None,
    )


def _refuse_float32_adapters(vllm_config: VllmConfig) -> None:
    """Raises EngineLoadFailed for what ends a load on a GPU with an assertion that says nothing:
    vLLM's kernels for adapters there take no float32 (0.32, lora_shrink_op.py)."""
    if vllm_config.lora_config and vllm_config.model_config.dtype == float32 and not on_cpu():
        why = "engine_args: dtype float32: adapters on a GPU need float16 or bfloat16"
        raise EngineLoadFailed("BadConfig", why, False)


def _hearing(llm: AdmittingLLM, name: str) -> "WhisperHearing":
    """Makes what transcribes with a model of Whisper's class. Raises EngineLoadFailed for any other
    model that hears."""
    from deployments.engines.vllm.routes.whisper import WhisperHearing  # which imports FFmpeg

    kind = llm.model_config.hf_config.model_type
    if kind != WHISPER:
        why = f"a model of type {kind!r} hears in another way than Whisper, which this engine knows"
        raise EngineLoadFailed("BadConfig", why, False)
    return WhisperHearing(llm, name)


def _gate(config: Config, vllm_config: VllmConfig) -> BatchGate:
    """Makes the gate of the batch. Without adapters only tenants, priorities and deadlines matter,
    and a request waits for as long as its caller does."""
    window = vllm_config.scheduler_config.max_num_seqs + AHEAD
    if "adapters" not in config:
        return BatchGate(0, window)
    return BatchGate(config["adapters"]["slots"], window, config["adapters"]["wait_s"])


@cache
def text_api() -> FastAPI:
    """vLLM's routes for a model that generates, without state: the same for every model, so the
    zygote makes them once (0.2 s and 14 MB of schemas)."""
    return build_app(parser().parse_args(["--disable-fastapi-docs"]), ("generate",))


class VllmEngine:
    """The frontend: tokenizer, templates, OpenAI's semantics. It is the core's only client.

    `has_slab`: the engine was lent a slab for KV or adapters. `most_tokens`: the context that the
    model may grow to; 0: it does not grow. `adapters`: None for a model without adapters."""

    def __init__(
        self,
        args: Namespace,
        config: VllmConfig,
        core: Core,
        gate: BatchGate,
        *,
        can_sleep: bool,
        has_slab: bool = False,
        most_tokens: int = 0,
        adapters: AdapterService | None = None,
    ) -> None:
        self.args, self.config, self.core, self.gate = args, config, core, gate
        self.can_sleep, self.has_slab, self.most_tokens = can_sleep, has_slab, most_tokens
        self.adapters = adapters
        most_s = core_watch.CPU_STEP_MOST_S if on_cpu() else core_watch.GPU_STEP_MOST_S
        self.watch = core_watch.CoreWatch(self._ask_core, most_s)
        self.probes_count = 0
        # What `load` makes: of every model,
        self.llm: AdmittingLLM | None = None
        self.api: FastAPI | None = None
        # of a pooling model,
        self.is_pooling = False
        self.probe_params: PoolingParams | None = None
        # of a model that generates,
        self.prewarmer: Prewarmer | None = None
        # of a model that hears,
        self.is_hearing = False
        self.hearing: WhisperHearing | None = None
        # of a model that sees,
        self.pictures: Pictures | None = None
        self.expiring: asyncio.Task[None] | None = None
        # and of a model whose context grows.
        self.growth: ContextGrowth | None = None

    async def load(self) -> None:
        if self.llm is not None:
            if not on_cpu():
                raise CannotReload("on a GPU its copy has tables too that lie in no file")
            await self.llm.collective_rpc("load_from_disk")
            return
        await asyncio.to_thread(await_core, self.core)
        self.llm = AdmittingLLM.from_vllm_config(
            self.config,
            client_addresses=self.core.client_addresses,
            disable_log_stats=self.args.disable_log_stats,
        )
        self.llm.gate, self.llm.served_name = self.gate, self.args.served_model_name[0]
        asyncio.get_running_loop().add_reader(self.core.pidfd, self._core_died)
        self.api = await self._make_api(self.llm)
        self._add_services(self.llm, self.api)

    async def _make_api(self, llm: AdmittingLLM) -> FastAPI:
        """vLLM's own application for what the model can do."""
        tasks = await llm.get_supported_tasks()
        self.is_hearing = "transcription" in tasks and "generate" not in tasks
        self.is_pooling = "generate" not in tasks and not self.is_hearing
        if self.is_pooling:
            self.probe_params = PoolingParams(task=llm.model_config.get_pooling_task(tasks))
        is_text = "generate" in tasks
        api = text_api() if is_text else build_app(self.args, tasks, llm.model_config)
        self.args.fingerprint_value, self.args.fingerprint_mode = fingerprint(self), "custom"
        api.state.args = self.args
        # vLLM's error handler sets this flag when the core is dead. Nothing reads it here, because
        # `_core_died` ends the process.
        api.state.server = SimpleNamespace(should_exit=False)
        await init_app_state(llm, api.state, self.args, tasks)
        return api

    def _add_services(self, llm: AdmittingLLM, api: FastAPI) -> None:
        """Makes the parts that a request passes before vLLM's application (see the module), as far
        as the model needs them. Raises EngineLoadFailed."""
        if self.is_hearing:
            self.hearing = _hearing(llm, self.args.served_model_name[0])
            return
        if self.args.ec_manager_config and llm.model_config.is_multimodal_model:
            name, has_cache = self.args.served_model_name[0], picture_slab.has_slab(self.config)
            self.pictures = Pictures(llm, name, has_cache=has_cache)
            self.pictures.adopt(api.state)
            self.expiring = asyncio.ensure_future(self.pictures.expire())
        if not self.is_pooling:
            self.prewarmer = Prewarmer(llm, self.config, api)
        if self.most_tokens:
            longest = llm.tokenizer.max_chars_per_token if llm.tokenizer else inf
            name = self.args.served_model_name[0]
            self.growth = ContextGrowth(api, name, self.most_tokens, longest)
        if self.adapters is not None:
            llm.adapters = self.adapters
            self.adapters.adopt(llm, api.state)

    def _core_died(self) -> None:
        """Answers every request with an error and ends the process: a frontend serves nothing
        alone."""
        assert self.llm is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.core.pidfd)
        self.llm.engine_core.resources.engine_dead = True
        self.llm.engine_core.outputs_queue.put_nowait(EngineDeadError())
        loop.call_later(_DEAD_S, linux.end, 1)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.api is not None and self.llm is not None
        if scope["path"] == prefixes.ROUTE:
            return await self._prewarm(scope, receive, send)
        if scope["path"] not in ROUTES:
            return await asgi.refuse(send, 404, f"no route {scope['path']}")
        if self.growth is not None:
            return await self.growth.serve(self._route, scope, receive, send)
        await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.api is not None and self.llm is not None
        if scope["path"] == kv_offload.FACTS:
            return await self._slab(scope, send)
        if scope["path"] in HEARING_ROUTES:
            return await self._transcribe(scope, receive, send)
        if self.is_pooling and scope["path"] in pooling.HANDLERS:
            return await pooling.serve(self.api, scope, receive, send)
        if self.pictures is not None and scope["path"] == picture_identity.FACTS:
            return await self.pictures.serve_facts(scope, send)
        await self._infer(scope, receive, send)

    async def _transcribe(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.hearing is None:
            text = "this model hears no sound; transcription takes a model of Whisper's class"
            return await asgi.refuse(send, 400, text, param="model")
        held = HeldHead(callers.begin(scope), send)
        try:
            await self.hearing.answer(scope, receive, held)
        except RequestError as error:
            if held.has_begun:
                raise
            await asgi.refuse_request(send, error)

    async def _infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.api is not None and self.llm is not None
        if scope["path"] == "/admission":
            hold = await self.llm.engine_core.call_utility_async("hold_trace")
            return await asgi.respond(send, 200, {**self.gate.facts(), "hold": hold})
        send = HeldHead(callers.begin(scope), send)
        api: Asgi = self.api
        if self.pictures is not None:
            api = partial(self.pictures.serve, self.api)
        if self.adapters is None:
            return await api(scope, receive, send)
        if scope["path"] == messages.ADAPTERS and scope["method"] == "POST":
            return await self.adapters.tell_tiers(receive, send)
        if scope["path"] == messages.ADAPTERS:
            trace = await self.llm.engine_core.call_utility_async("step_trace")
            return await asgi.respond(send, 200, {**await self.adapters.facts(), "trace": trace})
        await self.adapters.serve(api, scope, receive, send)

    async def _prewarm(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.prewarmer is None:
            return await asgi.respond(send, 200, NO_CACHE)
        caller = callers.begin(scope)
        caller.is_prewarm = True
        caller.priority = Priority.BATCH  # no request waits behind it for a place in the batch
        send = HeldHead(caller, send)
        if self.adapters is not None:
            return await self.adapters.serve(self.prewarmer, scope, receive, send)
        await self.prewarmer(scope, receive, send)

    async def _slab(self, scope: Scope, send: Send) -> None:
        """Answers what each lent slab holds, by content; POST shrinks it to its limit first."""
        if not self._has_lent_slabs:
            return await asgi.refuse(send, 404, "this engine was lent no slab")
        await asgi.respond(send, 200, await self._slabs(shrinks=scope["method"] == "POST"))

    @property
    def _has_lent_slabs(self) -> bool:
        return self.has_slab or self._was_lent_pictures

    @property
    def _was_lent_pictures(self) -> bool:
        return picture_slab.has_slab(self.config) and picture_slab.is_lent(self.config)

    async def _slabs(self, *, shrinks: bool) -> dict[str, Any]:
        """What each lent slab holds, by content; `shrinks`: after it was shrunk to its limit."""
        assert self.llm is not None
        call = self.llm.engine_core.call_utility_async
        facts: dict[str, Any] = {}
        if self.has_slab:
            facts = await call("shrink_slab" if shrinks else "slab_facts")
        if self._was_lent_pictures:
            slab_facts = await call("shrink_pictures" if shrinks else "picture_facts")
            facts = {**facts, Content.PICTURE: slab_facts}
        return facts

    async def sleep(self) -> None:
        """What lies in slabs of the node's pool stays there."""
        assert self.llm is not None
        if self.adapters is not None:
            await self.adapters.forget_loaded()
        if self.pictures is not None and not self._was_lent_pictures:
            await self.pictures.purge()
        await self._slabs(shrinks=True)
        await self.llm.sleep(level=1)

    async def purge(self) -> None:
        """Drops projected pictures, where it has any, and what slabs have beyond their limits."""
        if self.pictures is not None:
            await self.pictures.purge()
        if self.llm is not None:
            await self._slabs(shrinks=True)

    async def shrink_slabs(self) -> None:
        """Asleep too: the core has the tables of its slabs, and needs no weights for it."""
        if self.llm is not None:
            await self._slabs(shrinks=True)

    async def cap_slabs(self, caps: dict[str, float]) -> None:
        if self.llm is not None and self._has_lent_slabs:
            await self.llm.engine_core.call_utility_async("cap_slabs", caps)

    async def forget_tenant(self, tenant: str) -> None:
        if self.adapters is not None:
            await self.adapters.forget_tenant(tenant)

    async def drop_drafter(self) -> bool:
        """Drops the drafter on a CPU. On GPUs compiled graphs hold the drafter, and the memory pool
        gives no part back."""
        if not on_cpu() or self.llm is None or self.config.speculative_config is None:
            return False
        dropped: bool = await self.llm.engine_core.call_utility_async("drop_drafter")
        return dropped

    async def wake(self) -> None:
        assert self.llm is not None
        await self.llm.wake_up()

    async def probe(self) -> str:
        """The next token with its log-probability and those of its rivals; of a pooling model, the
        first eight numbers of a vector or of the labels' scores."""
        assert self.llm is not None
        self.probes_count += 1
        number = f"probe-{self.probes_count}"
        if self.probe_params is not None:
            pooled = [out async for out in self.llm.encode(_PROBE, self.probe_params, number)]
            return str([round(x, 4) for x in pooled[-1].outputs.data.flatten()[:8].tolist()])
        one = SamplingParams(temperature=0, max_tokens=1, logprobs=4)
        prompt = _PROBE if self.hearing is None else self.hearing.probe_prompt()
        output = [out async for out in self.llm.generate(prompt, one, number)][-1].outputs[0]
        ranked = {token: round(p.logprob, 3) for token, p in output.logprobs[0].items()}
        return f"{list(output.token_ids)} {ranked}"

    async def health(self) -> None:
        """Of the frontend with its background tasks and the thread that decodes sound, and of the
        core where it has work."""
        assert self.llm is not None
        await self.llm.check_health()
        rebalancing = self.adapters.rebalancing if self.adapters is not None else None
        for task in (self.expiring, rebalancing):
            if task is not None and task.done() and (error := task.exception()):
                raise RuntimeError(f"a background task of the frontend failed: {error!r}")
        if self.hearing is not None:
            self.hearing.worker.check()
        if self.pictures is not None:
            self.pictures.check()
        if self.llm.output_processor.has_unfinished_requests():
            self.watch.check()

    def kept_kv(self) -> KeptKv:
        return self.core.kept.facts()

    async def _ask_core(self) -> None:
        assert self.llm is not None
        await self.llm.engine_core.call_utility_async("hold_trace")


def fingerprint(engine: VllmEngine) -> str | None:
    """What vLLM would compute anew for each of its six serving objects, by hashing all settings."""
    args = engine.args
    return build_system_fingerprint(engine.config, args.fingerprint_mode, args.fingerprint_value)
