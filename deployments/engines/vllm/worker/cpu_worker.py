"""vLLM's CPU worker, with a real sleep and a correct LoRA kernel.

vLLM's own sleep is a no-op on CPU. Asleep, the checkpoint lies in memfds named `host-copy-*`,
written and never mapped, so the kernel shows the process's private bytes fall and the host's rise;
weights, KV cache and LoRA slots are given back. Waking maps the memfds, repacks the weights from
them and closes them: no disk is read. A model whose files are links into a copy that the node
shares (D4) writes none, and wakes from that. KV cache and slots keep their addresses and only their
pages go, to come back as zeros when they are touched: a wake costs the weights, however large the
cache.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.weight_utils import (
    filter_duplicate_safetensors_files,
    safetensors_weights_iterator,
)
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from arbiter import heap
from deployments.engines import linux
from deployments.engines.vllm.arguments import SHARES_COPY
from deployments.engines.vllm.worker import drafter

_MEMFD_NAME_BYTES = 249  # memfd_create(2); a file's may have 255
_SENDFILE_BYTES = 1 << 30  # sendfile(2) moves at most 2 GiB at a time
_KERNEL = "deployments.engines.vllm.adapters.lora_cpu.SegmentedPunica"


class SleepingCpuWorker(CPUWorker):
    """Given to vLLM as `worker_cls`. Sleep and wake come through AsyncLLM's own calls."""

    def __init__(self, *args: Any, distributed_init_method: str, **kwargs: Any) -> None:
        # vLLM asks nowhere else which LoRA kernel to use.
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: _KERNEL)
        meeting = _named(distributed_init_method)
        super().__init__(*args, distributed_init_method=meeting, **kwargs)
        core = multiprocessing.parent_process()
        if core is not None and self.parallel_config.world_size > 1:
            # vLLM itself has a worker notice the core's death only once the model is loaded.
            linux.die_with_parent(core.pid or 0)
        if self.model_config.enforce_eager:
            # Otherwise the first request for logprobs would compile a small helper: 2-3 s, 90 MB.
            torch._dynamo.config.disable = True
        self.emptied: list[tuple[torch.UntypedStorage, int]] = []
        self.copies: list[int] = []
        self.shares_copy = bool(self.vllm_config.additional_config.get(SHARES_COPY))
        self.filling = linux.Prefault()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """vLLM asks here which memory the KV cache comes from: from pages that are not zeroed yet.
        They are filled once the model is loaded, so that no first token waits for them."""
        return untouched() if tag == "kv_cache" else super()._maybe_get_memory_pool_context(tag)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's last call of a load."""
        compile_times = super().compile_or_warm_up_model()
        if self.parallel_config.world_size > 1:
            linux.unname_shared_memory()
        caches = (tensor.untyped_storage() for tensor in self.model_runner.kv_caches)
        spans = {storage.data_ptr(): storage.nbytes() for storage in caches}
        self.filling.start(list(spans.items()))
        return compile_times

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the weights, and has the kernel let this process use AMX where the processor has
        it. vLLM's attention uses AMX without asking; oneDNN asks, but only when a prompt is long
        enough, so that a short first prompt would end the engine (SIGILL, vLLM 0.32)."""
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        with every_core():
            super().load_model(*args, **kwargs)
        self.versions = {path: version(path) for path in self._checkpoint()}
        _give_back()  # the loader's own garbage, before anything grows behind it

    def drop_drafter(self) -> int:
        """Returns the bytes that it gave back."""
        self.filling.stop()
        freed = drafter.free(self.model_runner)
        kept = drafter.caches_of_target(self.model_runner)
        self.filling = linux.Prefault()
        self.filling.start([(cache.data_ptr(), cache.nbytes) for cache in kept])
        return freed

    def _checkpoint(self) -> list[Path]:
        """The files that vLLM's loader reads: where an index lists them, no others."""
        folder = self.model_config.model
        files = [str(path) for path in Path(folder).glob("*.safetensors")]
        listed = filter_duplicate_safetensors_files(files, folder, SAFE_WEIGHTS_INDEX_NAME)
        return sorted(map(Path, listed))

    def sleep(self, level: int = 1) -> None:
        if self.emptied:
            return
        self.filling.stop()
        if not self.shares_copy:
            self.copies = [copy_to_memory(path, self.versions[path]) for path in self._checkpoint()]
        self._drop_adapters()
        for layer in self.model_runner.model.modules():
            if hasattr(layer, "cpu_linear"):
                layer.cpu_linear = None  # a closure over the repacked weight
        for tensor in self.model_runner.model.parameters():
            self._empty(tensor)
        for storage in self._rebuilt():
            linux.blank(storage.data_ptr(), storage.nbytes())
        _give_back()

    def wake_up(self, tags: list[str] | None = None) -> None:
        if not self.emptied:
            return
        for storage, size in self.emptied:
            storage.resize_(size)
        self.emptied = []
        if self.shares_copy:
            names = [str(path) for path in self.versions]
        else:
            names = [f"/proc/self/fd/{copy}" for copy in self.copies]
        self._reload(safetensors_weights_iterator(names, use_tqdm_on_load=False))
        for copy in self.copies:
            os.close(copy)
        self.copies = []
        _give_back()

    def load_from_disk(self) -> None:
        """Loads the weights from their files again, after a wake that did not verify."""
        self._reload(None)
        self.versions = {path: version(path) for path in self._checkpoint()}

    def _reload(self, weights: Iterator[tuple[str, torch.Tensor]] | None) -> None:
        with set_current_vllm_config(self.vllm_config), self._adapters_kept(), every_core():
            self.model_runner.reload_weights(weights_iterator=weights)
            # A head that shares the weight of the embedding is no weight of its own in the files:
            # vLLM leaves it out, and its closure over the repacked weight with it.
            for layer in self.model_runner.model.modules():
                if getattr(layer, "cpu_linear", layer) is None:
                    layer.quant_method.process_weights_after_loading(layer)

    @contextmanager
    def _adapters_kept(self) -> Iterator[None]:
        """vLLM drops every adapter on a reload, because the base may have changed; here it has
        not."""
        runner = self.model_runner
        runner.reset_lora_state = lambda: None
        try:
            yield
        finally:
            del runner.reset_lora_state

    def _drop_adapters(self) -> None:
        """Takes adapters out of their slots; they stay in vLLM's host cache and return on use."""
        manager = getattr(self.model_runner, "lora_manager", None)
        if manager is not None:
            adapters = manager._adapter_manager
            for number in list(adapters._active_adapters.cache):
                adapters.deactivate_adapter(number)

    def _rebuilt(self) -> list[torch.UntypedStorage]:
        """Storages whose content a sleep loses and use brings back: adapter slots and the KV
        cache."""
        tensors = (*self._slots(), *self.model_runner.kv_caches)
        storages = (tensor.untyped_storage() for tensor in tensors)
        return list({storage.data_ptr(): storage for storage in storages}.values())

    def _slots(self) -> Iterator[torch.Tensor]:
        manager = getattr(self.model_runner, "lora_manager", None)
        if manager is None:
            return
        for layer in manager._adapter_manager.modules.values():
            for name in ("lora_a_stacked", "lora_b_stacked"):
                stacked = getattr(layer, name, None)
                if stacked is not None:
                    yield from stacked if isinstance(stacked, tuple | list) else (stacked,)

    def _empty(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if size := storage.nbytes():  # zero when an earlier tensor shares the storage
            self.emptied.append((storage, size))
            storage.resize_(0)


@contextmanager
def every_core() -> Iterator[None]:
    """Packs weights on all cores that this process may use, because it serves no request
    meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def untouched() -> Iterator[None]:
    """Makes `torch.zeros` return zeros that hold no pages until they are written. Only around
    vLLM's allocation of the KV cache, which calls nothing else."""
    kept: Any = torch.zeros
    blank: Any = _blank
    torch.zeros = blank
    try:
        yield
    finally:
        torch.zeros = kept


def _blank(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(size, dtype=dtype, device=device)
    linux.blank(tensor.data_ptr(), tensor.nbytes)
    return tensor


def version(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or rewritten."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def copy_to_memory(path: Path, expected: tuple[int, ...]) -> int:
    """A memfd with the file's bytes, never mapped here, and no more of them than were loaded.
    Raises OSError, and RuntimeError when the file is not the loaded one: what sleeps must be what
    was awake."""
    name = os.fsdecode(os.fsencode(f"host-copy-{path.name}")[:_MEMFD_NAME_BYTES])
    copy = os.memfd_create(name, os.MFD_CLOEXEC)
    at, size_bytes = 0, expected[0]
    try:
        with path.open("rb") as source:
            while at < size_bytes:
                count = min(size_bytes - at, _SENDFILE_BYTES)
                if not (moved := os.sendfile(copy, source.fileno(), at, count)):
                    break
                at += moved
        if version(path) != expected:
            raise RuntimeError(f"{path} changed on disk since it was loaded; this engine must go")
    except (OSError, RuntimeError):
        os.close(copy)
        raise
    return copy


def _give_back() -> None:
    gc.collect()
    heap.trim()


def _named(meeting: str) -> str:
    """Returns the address of the rendezvous of an engine's processes, with the engine's name added
    to that of its file. vLLM names their shared memory after this file, and the node agent finds
    what a killed engine has left by the engine's name (`linux.shared_memory_prefix`)."""
    file = Path(meeting.removeprefix("file://"))
    if not file.is_absolute():
        return meeting
    return f"file://{file.with_name(linux.shared_memory_prefix() + file.name)}"
