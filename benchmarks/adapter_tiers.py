"""How long an adapter takes until its slot is filled, by the tier in which it is (E9).

    python -m benchmarks.adapter_tiers --samples 200

vLLM's core in this process, one process for each size of adapter: the calls that the core makes
between two steps, without the frontend's message. hot: the adapter is in a slot. warm: its image is
in the slab, and the slot has another adapter. cold: it has no image, and its files are in the page
cache. Bytes of the adapter are those of its file, bytes of a slot those that a warm one copies.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arbiter.pool import SlabView, create
from arbiter.units import GIB, KIB, MIB, Bytes
from benchmarks import report
from deployments.config import load_plan
from deployments.config.safetensors_header import linear_shapes
from tests.support.adapters import write

SLOTS, ADAPTERS = 2, 6
KV_BYTES = 64 * MIB
BARS_US = {"hot": 100.0, "warm": 1_000.0, "cold": 10_000.0}
WARM_BAR_BYTES, COLD_BAR_BYTES = int(1.5 * MIB), 512 * KIB  # up to so large; of a slot, of a file


@dataclass(frozen=True, slots=True)
class Case:
    """Adapters of one size: bfloat16, as their base."""

    model: str
    rank: int
    max_rank: int


CASES = (Case("tiny-chat", 5, 8), Case("tiny-chat", 24, 32), Case("mid-chat", 38, 64))


def make_adapters(folder: Path, model: Path, rank: int) -> list[Path]:
    """As PEFT writes them, in bfloat16. Their names are digests, as in the store."""
    from safetensors.torch import load_file, save_file

    shapes = {name: s for name, s in linear_shapes(model).items() if "_proj" in name}
    made = []
    for number in range(ADAPTERS):
        path = write(folder / f"{number:032x}", shapes, rank, lora_alpha=rank + number)
        weights = path / "adapter_model.safetensors"
        save_file({k: v.bfloat16() for k, v in load_file(weights).items()}, weights)
        made.append(path)
    return made


def opened(model: Path, max_rank: int, slab: int) -> Any:
    """Images over the slots of a new core in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import EngineArgs, LLMEngine

    from deployments.engines.vllm.adapters.adapter_images import LentSlab, open_images

    arguments = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=KV_BYTES,
        enforce_eager=True,
        distributed_executor_backend="uni",
        worker_cls="deployments.engines.vllm.worker.cpu_worker.SleepingCpuWorker",
        enable_lora=True,
        max_loras=SLOTS,
        max_cpu_loras=SLOTS,
        max_lora_rank=max_rank,
    )
    torch.set_num_threads(1)  # as an engine has on this machine
    engine = LLMEngine.from_engine_args(arguments)
    core = engine.engine_core.engine_core
    lent = LentSlab(f"/proc/{os.getpid()}/fd/{slab}")
    images = open_images(core.model_executor, engine.vllm_config, lent)
    assert images is not None
    return images


@dataclass(frozen=True, slots=True)
class Took:
    """Microseconds of some calls."""

    wall: list[float]
    processor: list[float]


def timed(samples: int, prepare: Callable[[int], Any], call: Callable[[Any], Any]) -> Took:
    """Of each call with what was prepared for it."""
    took = Took([], [])
    for number in range(samples):
        given = prepare(number)
        start_ns, computed_ns = time.perf_counter_ns(), time.thread_time_ns()
        call(given)
        took.wall.append(1e-3 * (time.perf_counter_ns() - start_ns))
        took.processor.append(1e-3 * (time.thread_time_ns() - computed_ns))
    return took


def measure(case: Case, samples: int, seed: int) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    from deployments.engines.vllm.adapters.adapter_images import key_of

    model = Path(load_plan.resolve(f"made:{case.model}"))
    slab = create("tiers", Bytes(GIB))
    view = SlabView(slab)
    view.limit_bytes = Bytes(GIB)
    with tempfile.TemporaryDirectory() as folder:
        paths = make_adapters(Path(folder), model, case.rank)
        images = opened(model, case.max_rank, slab)
        worker = images._worker
        asked = [LoRARequest(path.name, n + 1, str(path)) for n, path in enumerate(paths)]
        order = random.Random(seed)

        def absent(number: int, *, cold: bool = False) -> LoRARequest:
            """An adapter that is in no slot."""
            free = [a for a in asked if a.lora_int_id not in worker.list_adapters()]
            one = order.choice(free)
            if cold and (key := key_of(one)) in images.rows:
                images.rows.drop(key)
            return one

        for one in asked:  # vLLM's own first calls, and the pages of the slab
            worker.add_adapter(one)
        tiers = {
            "cold": timed(samples // 2, lambda n: absent(n, cold=True), worker.add_adapter),
            "warm": timed(samples, absent, worker.add_adapter),
        }
        present = next(a for a in asked if a.lora_int_id in worker.list_adapters())
        tiers["hot"] = timed(samples, lambda n: present, worker.add_adapter)
        weights = paths[0] / "adapter_model.safetensors"
        sizes = {
            "adapter_bytes": weights.stat().st_size,
            "slot_bytes": sum(part.size for part in images._parts),
            "tensors": len(images._parts),
        }
    return {**sizes, **tiers}


def judged(measured: dict[str, Any]) -> dict[str, Any]:
    """Figures of one size, with the bars of those that have one."""
    bars = dict(BARS_US)
    if measured["slot_bytes"] > WARM_BAR_BYTES:
        del bars["warm"]
    if measured["adapter_bytes"] > COLD_BAR_BYTES:
        del bars["cold"]
    figures = {name: measured[name] for name in ("adapter_bytes", "slot_bytes", "tensors")}
    for tier in ("hot", "warm", "cold"):
        took: Took = measured[tier]
        wall = report.Sample(tuple(took.wall))
        p90 = statistics.quantiles(took.wall, n=10)[-1]
        computed = round(statistics.median(took.processor), 1)
        figures[tier] = {"us": wall, "p90_us": round(p90, 1), "processor_us": computed}
        if tier in bars:
            figures[tier] |= {"bar_us": bars[tier], "meets_bar": wall.median < bars[tier]}
    speed = measured["slot_bytes"] / figures["warm"]["us"].median / 1e3
    return figures | {"warm_gb_per_s": round(speed, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for case in CASES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            measured = process.submit(measure, case, args.samples, args.seed).result()
        made = figures[f"{case.model} rank {case.rank} of {case.max_rank}"] = judged(measured)
        print(case, *(f"{tier} {made[tier]['us']}" for tier in BARS_US), flush=True)
    report.write("adapter_tiers", figures, seed=args.seed)


if __name__ == "__main__":
    main()
