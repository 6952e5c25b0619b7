"""A GPU worker for benchmarks.engine_modes, whose copy of sleeping weights is spoiled."""

from vllm.device_allocator.cumem import CuMemAllocator

from deployments.engines.vllm.worker.gpu_worker import SleepingGpuWorker


class DamagedGpuWorker(SleepingGpuWorker):
    """Given to vLLM as `worker_cls`."""

    def sleep(self, level: int = 1) -> None:
        """Zeros in the middle half of what sleeps in host RAM, the first time only."""
        super().sleep(level)
        if getattr(self, "is_damaged", False):
            return
        self.is_damaged = True
        for data in CuMemAllocator.get_instance().pointer_to_data.values():
            if (copy := data.cpu_backup_tensor) is not None:
                copy[len(copy) // 4 : 3 * len(copy) // 4] = 0
