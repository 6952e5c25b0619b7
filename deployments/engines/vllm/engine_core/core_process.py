"""vLLM's engine core in a process of its own, forked from the frontend before it has threads.

vLLM would start it by spawn and import everything again. Its seams make a fork possible: a core
takes its two addresses from `_perform_handshakes`, and a frontend given `client_addresses` manages
no process. The core dies with its frontend (PR_SET_PDEATHSIG); the frontend watches a pidfd.

Why not a thread of the frontend: measured on 2 shared cores, 32 streams, six rounds in turn, two
processes give 0.98 (4 M parameters) and 1.04 (214 M) times the tokens per second of one, and start
as fast. They hold 30 MB more. In return a request is answered when the core crashes, and control
calls never wait for a step.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.executor import Executor

from arbiter.pool.tenants import caps_by_digest
from arbiter.units import Bytes, human
from deployments.engines import linux, nvidia
from deployments.engines.protocol import EngineLoadFailed, load_failure
from deployments.engines.vllm.adapters import adapter_images
from deployments.engines.vllm.batching import batch_hold
from deployments.engines.vllm.kv import kv_offload
from deployments.engines.vllm.kv.kept_blocks import KeptSince, watch_blocks
from deployments.engines.vllm.pictures import picture_connector, picture_slab
from deployments.engines.vllm.pictures.picture_cache import PictureCache
from deployments.engines.vllm.worker import drafter

logger = init_logger(__name__)


@dataclass(slots=True)
class StepTrace:
    """What the scheduler put into one step, summed: how mixed the batches are (F1)."""

    steps: int = 0
    requests: int = 0
    adapters: int = 0
    most_requests: int = 0
    most_adapters: int = 0
    most_beside_base: int = 0  # different adapters in one step with the base among them

    def note(self, names: list[str]) -> None:
        """`names`: of each request's adapter, empty for the base."""
        if not names:
            return
        different = set(names)
        count = len(different - {""})
        self.steps += 1
        self.requests += len(names)
        self.adapters += count
        self.most_requests = max(self.most_requests, len(names))
        self.most_adapters = max(self.most_adapters, count)
        if "" in different:
            self.most_beside_base = max(self.most_beside_base, count)

    def facts(self) -> dict[str, float]:
        steps = max(1, self.steps)
        return {
            "steps": self.steps,
            "mean_requests": self.requests / steps,
            "mean_adapters": self.adapters / steps,
            "most_requests": self.most_requests,
            "most_adapters": self.most_adapters,
            "most_adapters_beside_base": self.most_beside_base,
        }


class ForkedCore(EngineCoreProc):
    """An engine core that is told its addresses instead of asking a launcher for them."""

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        vllm_config: VllmConfig,
        stats: bool,
        images: adapter_images.LentSlab | None,
        kept: KeptSince,
    ) -> None:
        self.told_addresses = addresses
        if picture_slab.has_slab(vllm_config):
            picture_connector.spare_measuring()
        super().__init__(
            vllm_config=vllm_config,
            local_client=True,
            handshake_address="",
            executor_class=Executor.get_class(vllm_config),
            log_stats=stats,
        )

        watch_blocks(self.scheduler, kept)
        # Both calls also connect what they return to the scheduler: a manager of KV to its
        # requests, by which it knows their tenants; a cache of pictures to its hits on the device.
        if manager := kv_offload.manager_of(self.scheduler):
            manager.tell_kept(kept)
        picture_connector.cache_of(self.scheduler)
        self.images = adapter_images.open_images(self.model_executor, vllm_config, images)
        self.trace = StepTrace()
        self.hold = batch_hold.BatchHold(self.scheduler)
        self.scheduler.schedule = schedule = self.hold.schedule

        def traced(*args: Any, **kwargs: Any) -> Any:
            if self.images is not None:
                self.images.shrink()
            step = schedule(*args, **kwargs)
            requests = (self.scheduler.requests.get(key) for key in step.num_scheduled_tokens)
            self.trace.note(
                [r.lora_request.lora_name if r.lora_request else "" for r in requests if r]
            )
            return step

        if vllm_config.lora_config is not None:
            self.scheduler.schedule = traced

    def step_trace(self) -> dict[str, float]:
        """Called by name from the frontend."""
        return self.trace.facts()

    def hold_trace(self) -> dict[str, int]:
        """Called by name from the frontend."""
        return self.hold.trace.facts()

    @property
    def pictures(self) -> PictureCache:
        cache = picture_connector.cache_of(self.scheduler)
        assert cache is not None
        return cache

    def picture_facts(self) -> dict[str, int]:
        """Called by name from the frontend of an engine with a slab of pictures, as are the three
        methods below."""
        return self.pictures.facts()

    def expire_pictures(self) -> None:
        self.pictures.expire()

    def purge_pictures(self) -> None:
        self.pictures.purge()

    def shrink_pictures(self) -> dict[str, int]:
        """Returns the facts as they are then."""
        self.pictures.shrink()
        return self.pictures.facts()

    def bring_adapter(self, lora_request: LoRARequest, tenant: str, keep: list[int]) -> str:
        """Fills a slot with an adapter. `tenant`: the adapter's owner; empty for an adapter of all
        tenants. `keep`: adapters that should not lose their slots to it, the last of them least.
        Returns the tier in which the adapter was. Called by name from the frontend, as are the
        methods below."""
        if self.images is None:
            is_hot = lora_request.lora_int_id in self.list_loras()
            self.add_lora(lora_request)
            return adapter_images.HOT if is_hot else adapter_images.COLD
        self.images.note_owner(lora_request, tenant)
        self.images.keep(keep)
        tier = self.images.tier(lora_request)
        self.add_lora(lora_request)
        return tier

    def stage_adapter(self, lora_request: LoRARequest, tenant: str) -> str | None:
        """Makes an adapter warm that will be needed soon. Returns the tier in which it was; None
        without a slab for images."""
        if self.images is None:
            return None
        self.images.note_owner(lora_request, tenant)
        return self.images.stage(lora_request)

    def keep_adapters(self, keep: list[int]) -> None:
        if self.images is not None:
            self.images.keep(keep)

    def count_adapters(self, hot: int, warm: int, cold: int) -> None:
        """Notes requests by the tier in which they found their adapters."""
        if self.images is not None:
            self.images.count(hot, warm, cold)

    def adapter_tiers(self) -> dict[str, Any]:
        """Which adapters are in slots, by number, which have an image, by digest, and which are to
        be brought for a request only, because their tenant was removed."""
        images = self.images
        warm, forgotten = ([], []) if images is None else (images.warm(), images.forgotten())
        return {"hot": sorted(self.list_loras()), "warm": warm, "forgotten": forgotten}

    def slab_facts(self) -> dict[str, Any]:
        """What each slab of the engine holds, by content; empty without any."""
        facts: dict[str, Any] = {}
        if (manager := kv_offload.manager_of(self.scheduler)) is not None:
            facts["kv"] = manager.facts()
        if self.images is not None:
            facts["adapter"] = self.images.facts()
        return facts

    def shrink_slab(self) -> dict[str, Any]:
        """Shrinks each slab to its limit and returns its facts. A core does so in its steps, but an
        idle core has none."""
        if (manager := kv_offload.manager_of(self.scheduler)) is not None:
            manager.shrink()
        if self.images is not None:
            self.images.shrink()
        return self.slab_facts()

    def cap_slabs(self, caps: dict[str, float]) -> None:
        """`caps`: by tenant, the part of the rows that it may have from now on."""
        digests = caps_by_digest(caps)
        cached = (
            kv_offload.manager_of(self.scheduler),
            picture_connector.cache_of(self.scheduler),
            self.images,
        )
        for each in cached:
            if each is not None:
                each.rows.set_caps(digests)
                each.shrink()

    def drop_drafter(self) -> bool:
        """Gives the drafter's memory back, between two steps. Returns False where that cannot be
        done now, and only a new engine is without the drafter."""
        if not self.use_spec_decode:
            return True  # the drafter has left already
        if not drafter.may_leave(self):
            return False
        drafter.expect_none(self)
        if manager := kv_offload.manager_of(self.scheduler):
            # Blocks lack the drafter's layers from now on, which the next engine would miss.
            manager.may_store = False
        freed = self.collective_rpc("drop_drafter")
        logger.info("the drafter has left: %s", [human(Bytes(size)) for size in freed])
        return True

    @contextmanager
    def _perform_handshakes(self, *args: Any, **kwargs: Any) -> Iterator[EngineZmqAddresses]:
        yield self.told_addresses


@dataclass(frozen=True, slots=True)
class Core:
    """The frontend's view of its core."""

    pid: int
    pidfd: int  # readable once the core is dead
    report: int  # a pipe: one JSON line when the core is up or could not start
    client_addresses: dict[str, str]
    kept: KeptSince


def fork_core(
    vllm_config: VllmConfig,
    base: str,
    *,
    stats: bool,
    threads: int | None = None,
    images: adapter_images.LentSlab | None = None,
) -> Core:
    """`base`: path without suffix in a directory only this user may enter, for two sockets.
    `threads`: that compute; None leaves it to the library. `images`: the slab of adapters."""
    addresses = {"input_address": f"ipc://{base}.in", "output_address": f"ipc://{base}.out"}
    read, write = os.pipe()
    parent = os.getpid()
    kept = KeptSince()
    nvidia.close_nvml()  # vLLM has counted GPUs
    pid = os.fork()
    if pid == 0:
        if threads is not None:
            # Before the first operation, and in the thread that will run them all: libgomp starts
            # its pool then, with as many as this thread asks for.
            torch.set_num_threads(threads)
        _live(lambda: _core(vllm_config, addresses, stats, images, kept), write, parent)
    os.close(write)
    return Core(pid, os.pidfd_open(pid), read, addresses, kept)


def _core(
    vllm_config: VllmConfig,
    addresses: dict[str, str],
    stats: bool,
    images: adapter_images.LentSlab | None,
    kept: KeptSince,
) -> ForkedCore:
    engine_addresses = EngineZmqAddresses(
        inputs=[addresses["input_address"]], outputs=[addresses["output_address"]]
    )
    return ForkedCore(engine_addresses, vllm_config, stats, images, kept)


def _live(make: Callable[[], ForkedCore], report: int, parent: int) -> NoReturn:
    status = 1
    try:
        linux.die_with_parent(parent)
        linux.close_all_but(report)
        linux.set_name("engine-core")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _run(make, report)
        status = 0
    finally:
        try:
            if status:
                traceback.print_exc()  # Python would, at an end that this process does not reach
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also where the log's disk is full
            os._exit(status)


def _run(make: Callable[[], ForkedCore], report: int) -> None:
    try:
        core = make()
    except BaseException as error:
        cause = load_failure(error)
        _tell(report, {"kind": cause.kind, "message": cause.message, "oom": cause.out_of_memory})
        raise
    _tell(report, {})
    try:
        core.run_busy_loop()
    except BaseException:
        core._send_engine_dead()  # requests in flight learn of it before the process is gone
        raise


def _tell(report: int, message: dict[str, Any]) -> None:
    os.write(report, json.dumps(message).encode() + b"\n")
    os.close(report)


def await_core(core: Core) -> None:
    """Blocks until the core is up. Raises EngineLoadFailed with its cause."""
    with os.fdopen(core.report, "rb") as pipe:
        line = pipe.readline()
    if not line:  # it died without a report; the kernel sends SIGKILL when memory runs out
        _, status = os.waitpid(core.pid, 0)
        how = os.waitstatus_to_exitcode(status)
        text = f"the engine core ended with {how} while loading; its log has the rest"
        raise EngineLoadFailed("EngineCoreDied", text, how == -signal.SIGKILL)
    if cause := json.loads(line):
        raise EngineLoadFailed(cause["kind"], cause["message"], cause["oom"])
