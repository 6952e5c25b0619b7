"""What the calls of a slab's row API take in one process (E8).

    python -m benchmarks.slab_rows --samples 20000

On a slab of 4,000 ready rows of 64 KiB, as a writer has it: finding a row, pinning it and letting
it go, marking a row whose bytes are written, and taking over all 4,000 rows as the next writer.
Nanoseconds of the clock around each call, less those of an empty one.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from random import Random
from typing import Any

import numpy as np

from arbiter.pool import Rows, Slab, SlabView, create
from arbiter.units import KIB, MIB, Bytes, Content
from benchmarks import report

ROWS, ROW_BYTES, TERM_S = 4_000, Bytes(64 * KIB), 3_600.0
SIZE = Bytes(512 * MIB)
BARS_US = {"lookup": 1.0, "pin": 5.0, "unpin": 5.0, "mark": 10.0}  # of medians; of p99 tenfold
ADOPT_BAR_MS = 50.0


def key_of(number: int) -> bytes:
    """As long as vLLM's block hashes."""
    return number.to_bytes(36, "big")


@contextmanager
def slab() -> Iterator[int]:
    fd = create("rows", SIZE)
    with closing(SlabView(fd)) as view:
        view.limit_bytes = SIZE
        yield fd
    os.close(fd)


def opened(fd: int) -> Rows:
    return Rows(Slab(fd, Content.KV, b"n" * 32, ROW_BYTES), TERM_S, time.time)


def fill(rows: Rows) -> None:
    for key in rows.reserve([key_of(n) for n in range(ROWS)]).rows:
        rows.mark_ready(key)


def timed(call: Callable[[bytes], object], keys: list[bytes]) -> np.ndarray:
    """Shape [keys], ns."""
    took = np.empty(len(keys))
    for number, key in enumerate(keys):
        start_ns = time.perf_counter_ns()
        call(key)
        took[number] = time.perf_counter_ns() - start_ns
    return took


def calls(rows: Rows, samples: int, seed: int) -> dict[str, np.ndarray]:
    """Shape [samples] each, ns."""
    random = Random(seed)
    keys = [key_of(random.randrange(ROWS)) for _ in range(samples)]
    timings = {
        "empty": timed(lambda key: None, keys),
        "lookup": timed(rows.lookup, keys),
        "pin": timed(lambda key: rows.pin([key]), keys),
        "unpin": timed(lambda key: rows.unpin([key]), keys),
    }
    marks = []
    for number in range(samples // ROWS):
        new = [key_of((number + 1) * ROWS + n) for n in range(ROWS)]
        marks.append(timed(rows.mark_ready, list(rows.reserve(new).rows)))
    return timings | {"mark": np.concatenate(marks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--adoptions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with slab() as fd:
        fill(opened(fd))
        adopted = []
        for _ in range(args.adoptions):
            start_s = time.perf_counter()
            rows = opened(fd)
            adopted.append(1e3 * (time.perf_counter() - start_s))
            assert len(rows) == ROWS
        figures["adopt_ms"] = report.Sample(tuple(adopted))
        figures["adopt_meets_bar"] = figures["adopt_ms"].median < ADOPT_BAR_MS
        timings = calls(opened(fd), args.samples, args.seed)
    empty = float(np.median(timings.pop("empty")))
    for name, took in timings.items():
        middle, high = (1e-3 * (float(np.percentile(took, p)) - empty) for p in (50, 99))
        meets = middle < BARS_US[name] and high < 10 * BARS_US[name]
        figures[name] = {"us": round(middle, 2), "p99_us": round(high, 2), "meets_bar": meets}
    for name, value in figures.items():
        print(f"{name}: {value}")
    report.write("slab_rows", figures, seed=args.seed)


if __name__ == "__main__":
    main()
