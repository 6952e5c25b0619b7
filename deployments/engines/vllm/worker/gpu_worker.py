"""vLLM's GPU worker, whose sleep other engines of the card do not disturb."""

import logging

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.worker.gpu_worker import Worker

from deployments.engines.vllm.kv.kv_offload import copier_of
from deployments.engines.vllm.kv.staged_copier import StagedCopier

logger = logging.getLogger(__name__)
# Of vLLM's last check of a sleep (0.32): all is done by then but a line of its log.
_CARD_FILLED = "Memory usage increased after sleeping."


class SleepingGpuWorker(Worker):
    """Given to vLLM as `worker_cls` on GPUs."""

    def sleep(self, level: int = 1) -> None:
        """Sleeps although the card has less free memory than before: vLLM asserts that it has not,
        as if the card were its own, while the arbiter lends what is free to the next load. What
        this process gave back is told by NVML to the node agent. KV blocks that are on their way
        to a slab or from it arrive first."""
        if has_kv_transfer_group():
            copier = copier_of(get_kv_transfer_group())
            if isinstance(copier, StagedCopier):
                copier.drain()
        try:
            super().sleep(level)
        except AssertionError as error:
            if str(error) != _CARD_FILLED:
                raise
            logger.info("asleep, while another process took more of the card than this one gave")
