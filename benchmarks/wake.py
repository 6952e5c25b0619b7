"""A wake against a plain copy of the same bytes (N3: limited by copy bandwidth).

    python -m benchmarks.wake --model medium-chat --rounds 10

Wake: host RAM to weights in place, proved by one token. Copy: the checkpoint's bytes from a memfd
to fresh memory of this process, page faults included, in turn with the wakes. No Ray;
benchmarks.first_token measures an asleep model's first token through the whole graph.
"""

import argparse
import mmap
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.start_latency import ENTRY, first_token
from deployments.config import load_plan
from tests.support.engine_host import Child, device_bytes, host_bytes, zygote

# As the shipped configuration serves it: a KV cache five times the weights.
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 1 << 30,
    "max_num_seqs": 32,
    "enforce_eager": True,
}


def copy_s(folder: Path) -> float:
    """Seconds for one copy of the checkpoint from host RAM to new pages."""
    data = b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))
    source = os.memfd_create("checkpoint")
    os.truncate(source, len(data))
    with mmap.mmap(source, len(data)) as held:
        held.write(data)
        del data
        start = time.perf_counter()
        fresh = mmap.mmap(-1, len(held), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with memoryview(held) as view, memoryview(fresh) as target:
            target[:] = view
        took_s = time.perf_counter() - start
        fresh.close()
    os.close(source)
    return took_s


def slept_and_woken(child: Child, model: str) -> dict[str, float]:
    figures = {"awake_mib": device_bytes(child.pid) / 2**20}
    figures["sleep_s"] = child.call("POST", "/control/sleep")[1]["seconds"]
    figures["asleep_mib"] = device_bytes(child.pid) / 2**20
    figures["host_mib"] = host_bytes(child.pid) / 2**20
    start = time.perf_counter()
    woken = child.call("POST", "/control/wake")[1]
    assert woken["verified"], "the answer changed"
    figures["wake_s"] = woken["seconds"]
    first_token(child, model)
    figures["wake_to_first_token_s"] = time.perf_counter() - start
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="medium-chat")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    path = load_plan.resolve(f"made:{args.model}")
    rows: list[dict[str, float]] = []
    with zygote("deployments.engines.vllm.preload") as running:
        config = {"model": path, "served_name": args.model, "engine_args": ENGINE_ARGS}
        child = running.spawn("wake", ENTRY, config).hold()
        status, body = child.ready()
        assert status == 200, body
        first_token(child, args.model)
        for _ in range(args.rounds):
            rows.append(slept_and_woken(child, args.model) | {"copy_s": copy_s(Path(path))})
    figures: dict[str, Any] = {
        name: report.Sample(tuple(row[name] for row in rows)) for name in rows[0]
    }
    wakes, copies = [row["wake_s"] for row in rows], [row["copy_s"] for row in rows]
    figures["wake_of_copy"] = report.paired_ratio(wakes, copies)
    for name, sample in figures.items():
        print(f"{name}: {sample}")
    report.write("wake", {"model": args.model, **figures}, label=args.model)


if __name__ == "__main__":
    main()
