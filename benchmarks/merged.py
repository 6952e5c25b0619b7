"""What a copy of the base with an adapter in its weights gains on the same adapter in a slot (F7).

    python -m benchmarks.merged --model mid-chat --rounds 10

Two engine children, no Ray: tokens a second and processor time of a closed loop whose requests all
name one adapter, by streams. A round asks one engine and then the other, so that a machine whose
speed drifts changes both sides of a pair.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.adapters import ENGINE_ARGS, TOKENS, Bench, make_adapters, run
from deployments.config import load_plan
from tests.support.engine_host import Child, zygote

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SLOTS = 8
SIDES = ("slot", "merged")


def processes(child: Child) -> Iterator[int]:
    """The frontend, and the core that it forked."""
    yield child.pid
    for task in Path(f"/proc/{child.pid}/task").glob("*/children"):
        yield from map(int, task.read_text().split())


def processor_s(child: Child) -> float:
    """By the kernel's own count (utime and stime of /proc/PID/stat)."""
    stats = (Path(f"/proc/{pid}/stat").read_text() for pid in processes(child))
    fields = [text.rpartition(")")[2].split() for text in stats]
    return sum(int(row[11]) + int(row[12]) for row in fields) * TICK_S


def one(child: Child, name: str, streams: int, seed: int) -> tuple[float, float]:
    """Tokens a second, and milliseconds of processor time a token."""
    before_s = processor_s(child)
    done = run(child, [name] * 2 * streams, streams, seed)
    tokens = sum(answer.tokens for answer in done.answers)
    return done.tokens_per_s, 1000 * (processor_s(child) - before_s) / tokens


def compare(engines: dict[str, tuple[Child, str]], streams: int, rounds: int) -> dict[str, Any]:
    speed: dict[str, list[float]] = {side: [] for side in SIDES}
    spent: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in SIDES:
        one(*engines[side], streams, 0)
    for number in range(rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            per_s, ms = one(*engines[side], streams, number + 1)
            speed[side].append(per_s)
            spent[side].append(ms)
    figures = {f"tokens_per_s_{side}": report.Sample(tuple(speed[side])) for side in SIDES}
    figures |= {f"processor_ms_per_token_{s}": report.Sample(tuple(spent[s])) for s in SIDES}
    figures["tokens_per_s_ratio"] = report.paired_ratio(speed["merged"], speed["slot"])
    figures["processor_ms_ratio"] = report.paired_ratio(spent["merged"], spent["slot"])
    for name, sample in figures.items():
        print(f"{streams} streams, {name}: {sample}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 8))
    args = parser.parse_args()
    path = load_plan.resolve(f"made:{args.model}")
    figures: dict[str, Any] = {"model": args.model, "tokens": TOKENS, "slots": SLOTS}
    with tempfile.TemporaryDirectory() as name, zygote("deployments.engines.vllm.preload") as up:
        bench = Bench(up, path, Path(name))
        make_adapters(bench.folder / "in", path, 1)
        copy = {"merged": str(bench.folder / "in" / "m0"), "engine_args": ENGINE_ARGS}
        with bench.ours(SLOTS) as slot, bench.started(copy) as merged:
            engines = {"slot": (slot, "m0"), "merged": (merged, "base")}
            for streams in args.streams:
                figures[f"streams_{streams}"] = compare(engines, streams, args.rounds)
    report.write("merged", figures, label=args.model)


if __name__ == "__main__":
    main()
