"""vLLM's GPU worker, whose sleep other engines of the card do not disturb."""

import logging

from vllm.v1.worker.gpu_worker import Worker

logger = logging.getLogger(__name__)
# Of vLLM's last check of a sleep (0.32): all is done by then but a line of its log.
_CARD_FILLED = "Memory usage increased after sleeping."


class SleepingGpuWorker(Worker):
    """Given to vLLM as `worker_cls` on GPUs."""

    def sleep(self, level: int = 1) -> None:
        """Sleeps although the card has less free memory than before: vLLM asserts that it has not,
        as if the card were its own, while the arbiter lends what is free to the next load. What
        this process gave back is told by NVML to the node agent."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if str(error) != _CARD_FILLED:
                raise
            logger.info("asleep, while another process took more of the card than this one gave")
