"""What the pool takes of an engine's steps: its table, its copies, and vLLM's connector around both
(E8, G7).

    python -m benchmarks.slab_share --model mid-chat --rounds 6

One engine core within this process, which has one thread of compute: the processor time of the
thread within each call of the slab's manager, of the copies, and of all that vLLM calls on its
connector, by the processor time of the steps. Every prompt is new, so that all that is computed is
stored and the slab grows all the time. Unlike the speeds of two engines, whose processes differ by
some per cent, this is steady on a machine that does other work too.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from benchmarks import report
from benchmarks.restore import SLAB_BYTES, STREAM_PROMPT, STREAM_TOKENS, STREAMS
from deployments.config import load_plan
from tests.support.slabs import lent_slab, path_of

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
BAR_FRACTION = 0.005  # of a step, for the manager
MANAGER = "lookup prepare_load complete_load prepare_store complete_store on_new_request"
MANAGER += " on_request_finished on_schedule_end has_pending_work"
SCHEDULER = "get_num_new_matched_tokens update_state_after_alloc build_connector_meta"
SCHEDULER += " update_connector_output request_finished_all_groups has_pending_push_work"
WORKER = "handle_preemptions bind_connector_metadata start_load_kv wait_for_layer_load"
WORKER += " save_kv_layer wait_for_save get_transfer_results build_connector_worker_meta"
WORKER += " get_block_ids_with_load_errors clear_connector_metadata get_kv_connector_stats"


class Clock:
    """Nanoseconds of this thread by name; calls within calls of the same name count once."""

    def __init__(self) -> None:
        self.spent_ns: Counter[str] = Counter()
        self._open: Counter[str] = Counter()

    def watch(self, target: object, calls: str, name: str) -> None:
        for call in calls.split():
            setattr(target, call, self._timed(getattr(target, call), name))

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open[name] += 1
            began_ns = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._open[name] -= 1
                if not self._open[name]:
                    self.spent_ns[name] += time.thread_time_ns() - began_ns

        return timed


def engine(model: str, fd: int) -> Any:
    """vLLM's own, with the arguments that our engines have."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    from deployments.engines.vllm.arguments import arguments
    from deployments.engines.vllm.kv import kv_offload

    args = {
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 512 << 20,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
    }
    config: dict[str, Any] = {"model": load_plan.resolve(f"made:{model}"), "engine_args": args}
    config["slabs"] = {"kv": {"path": path_of(fd)}}
    settings = AsyncEngineArgs.from_cli_args(arguments(config)).create_engine_config()
    kv_offload.configure_connector(settings, config)
    executor = Executor.get_class(settings)
    return LLMEngine(settings, executor, False, multiprocess_mode=False)


def watched(made: Any) -> Clock:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from deployments.engines.vllm.kv import kv_offload

    scheduler, clock = made.engine_core.engine_core.scheduler, Clock()
    worker: Any = get_kv_transfer_group()
    clock.watch(kv_offload.manager_of(scheduler), MANAGER, "manager")
    clock.watch(worker.connector_worker.worker, "submit_store submit_load", "copies")
    clock.watch(scheduler.connector, SCHEDULER, "connector")
    clock.watch(worker, WORKER, "connector")
    return clock


def shares(made: Any, clock: Clock, random: Random) -> dict[str, float]:
    """Of the steps that answer one round of requests."""
    from vllm import SamplingParams

    clock.spent_ns.clear()
    for number in range(STREAMS):
        prompt = {"prompt_token_ids": [random.randrange(10, 2000) for _ in range(STREAM_PROMPT)]}
        most = SamplingParams(temperature=0, max_tokens=STREAM_TOKENS, ignore_eos=True)
        made.add_request(f"{random.random()}-{number}", prompt, most)
    began_ns = time.thread_time_ns()
    while made.has_unfinished_requests():
        made.step()
    steps_ns = time.thread_time_ns() - began_ns
    return {name: spent / steps_ns for name, spent in clock.spent_ns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more would compute beside the one whose time is taken
    random = Random(args.seed)
    with lent_slab(SLAB_BYTES) as fd:
        made = engine(args.model, fd)
        clock = watched(made)
        shares(made, clock, random)  # warms it
        rows = [shares(made, clock, random) for _ in range(args.rounds)]
    figures: dict[str, Any] = {
        f"{name}_percent": report.Sample(tuple(100 * row[name] for row in rows))
        for name in ("manager", "copies", "connector")
    }
    figures["manager_meets_bar"] = figures["manager_percent"].median < 100 * BAR_FRACTION
    for name, value in figures.items():
        print(f"{name}: {value}")
    report.write("slab_share", figures, seed=args.seed, label=args.model)


if __name__ == "__main__":
    main()
