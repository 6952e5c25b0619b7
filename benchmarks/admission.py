"""What admission in front of vLLM is worth for many adapters, against plain vLLM (F5).

    python -m benchmarks.admission --model mid-chat --pairs 10

Engine processes alone, no Ray. Both sides are the same engine with the same corrected LoRA kernel
(vLLM's own mixes up adapters on the CPU build, deployments.engines.vllm.adapters.lora_cpu) and the
same adapters; plain vLLM gets each request at once (benchmarks.ungated). Pair by pair, in
alternating order, after one pair that warms both; the ratio is ours by theirs.

queued: all requests at once, on both sides.
window: all at once to ours; a window of 32 in the order of arrival before plain vLLM.
fit: as many slots as adapters, 32 clients.
slots: ours with as many slots as its ticket pays for, plain vLLM with 4; a window of 32 each.
many: our engine, 1,000 adapters by a Zipf law against 5; a window of 32 each.
cold: 48 clients on 4 hot adapters that fill the slots, each with so many requests one after the
other; seconds to the first token of one request for another adapter.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import load, report
from benchmarks.adapters import ENGINE_ARGS, ENTRY, RANK, STREAMS, make_adapters, plain_lora
from deployments.config import load_plan
from deployments.config.model_files import slot_size, weights_bytes
from deployments.config.model_section import AdaptersConfig
from tests.support.engine_host import Child, ZygoteUnderTest, zygote

PLAIN = "benchmarks.ungated:build"
FEW_SLOTS, ADAPTERS, MANY = 4, 32, 1_000
HOT_CLIENTS = 48
ZIPF = 1.1  # the skew of public traces of adapters, as in VLLM's own and S-LoRA's experiments
BARS = {"queued": 1.0, "window": 1.6, "fit": 0.98, "slots": 2.0, "many": 0.95, "cold": 0.3}

Measure = Callable[[int], float]  # of one side, by the pair's number


@dataclass(frozen=True, slots=True)
class Bench:
    """One model, its adapters, and what forks engines for it."""

    running: ZygoteUnderTest
    model: str
    folder: Path
    requests: int
    tokens: int
    rounds: int

    @property
    def ticket_slots(self) -> int:
        """What a ticket pays for: the default share of the weights' bytes."""
        share = AdaptersConfig(folder="").slot_share
        paid = int(weights_bytes(Path(self.model)) * share) // slot_size(self.model, RANK)
        return max(1, min(STREAMS, paid))

    @contextlib.contextmanager
    def engine(self, slots: int, *, gated: bool) -> Iterator[Child]:
        folder = self.folder / "in"
        if gated:
            own = {"folder": str(folder), "store": str(self.folder / "store"), "max_rank": RANK}
            more = {"adapters": {**own, "slots": slots, "wait_s": 600.0}}
            entry, args = ENTRY, ENGINE_ARGS
        else:
            more, entry = {}, PLAIN
            args = ENGINE_ARGS | plain_lora(folder, slots, ADAPTERS)
        config = {"model": self.model, "served_name": "base", "engine_args": args, **more}
        child = self.running.spawn(f"bench-{time.monotonic_ns()}", entry, config).hold()
        try:
            status, body = child.ready()
            assert status == 200, body
            yield child
        finally:
            child.let_go()

    def speed(self, child: Child, names: Sequence[str], streams: int) -> Measure:
        """Tokens a second of all requests, `streams` of them at a time."""

        def measure(pair: int) -> float:
            return asyncio.run(
                load.closed_loop(
                    f"unix:{child.path}",
                    names,
                    streams=streams,
                    requests=self.requests,
                    tokens=self.tokens,
                    seed=pair,
                )
            ).tokens_per_s

        return measure

    def names(self, count: int) -> list[str]:
        """Each adapter as often, in shuffled order."""
        order = [f"m{n % count}" for n in range(self.requests)]
        random.Random(count).shuffle(order)
        return order

    def skewed_names(self, count: int) -> list[str]:
        """By a Zipf law."""
        weights = [1 / (n + 1) ** ZIPF for n in range(count)]
        dice = random.Random(count)
        return [f"m{n}" for n in dice.choices(range(count), weights, k=self.requests)]


def interleaved(ours: Measure, theirs: Measure, pairs: int) -> tuple[list[float], list[float]]:
    sides: tuple[list[float], list[float]] = [], []
    for pair in range(pairs + 1):
        both = list(zip(sides, (ours, theirs), strict=True))
        for values, measure in both if pair % 2 else reversed(both):
            value = measure(pair)
            if pair:  # the first pair warms both
                values.append(value)
    return sides


def throughput_row(bench: Bench, row: str, pairs: int) -> dict[str, Any]:
    """Tokens a second, ours by theirs."""
    everything, few, ticket = bench.requests, FEW_SLOTS, bench.ticket_slots
    uniform = bench.names(ADAPTERS)
    own_slots, plain_slots, names, own_streams, plain_streams = {
        "queued": (few, few, uniform, everything, everything),
        "window": (few, few, uniform, everything, STREAMS),
        "fit": (8, 8, bench.names(8), STREAMS, STREAMS),
        "slots": (ticket, few, uniform, STREAMS, STREAMS),
    }[row]
    with (
        bench.engine(own_slots, gated=True) as ours,
        bench.engine(plain_slots, gated=False) as plain,
    ):
        on = bench.speed(ours, names, own_streams)
        off = bench.speed(plain, names, plain_streams)
        return compared(row, *interleaved(on, off, pairs), slots=[own_slots, plain_slots])


def many_row(bench: Bench, pairs: int) -> dict[str, Any]:
    """1,000 adapters against 5, on one engine of ours."""
    slots = bench.ticket_slots
    with bench.engine(slots, gated=True) as child:
        many = bench.speed(child, bench.skewed_names(MANY), STREAMS)
        few = bench.speed(child, bench.skewed_names(5), STREAMS)
        asked = len(set(bench.skewed_names(MANY)))
        return compared(
            "many", *interleaved(many, few, pairs), slots=[slots, slots], asked_adapters=asked
        )


def cold_row(bench: Bench, pairs: int) -> dict[str, Any]:
    """The first token of a cold adapter, seconds; the p99 of so few is the worst."""
    with (
        bench.engine(FEW_SLOTS, gated=True) as ours,
        bench.engine(FEW_SLOTS, gated=False) as plain,
    ):
        on, off = interleaved(
            lambda pair: asyncio.run(cold_first_token(ours, bench, pair)),
            lambda pair: asyncio.run(cold_first_token(plain, bench, pair)),
            pairs,
        )
    row = compared("cold", on, off, slots=[FEW_SLOTS, FEW_SLOTS])
    row["p99_ratio"] = max(on) / max(off)
    print(f"cold: p99 {max(on):.2f} s against {max(off):.2f} s: {row['p99_ratio']:.2f}")
    return row


async def cold_first_token(child: Child, bench: Bench, pair: int) -> float:
    """Asks once the flood has its first answers; returns when the flood has ended."""
    dice = random.Random(pair)
    connector = aiohttp.UnixConnector(path=child.path, limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    flooding = asyncio.Event()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def client(number: int) -> None:
            for _ in range(bench.rounds):
                hot = f"m{number % FEW_SLOTS}"
                await load.ask(http, "http://engine", hot, load.prompt(dice), bench.tokens)
                flooding.set()

        async with asyncio.TaskGroup() as group:
            for number in range(HOT_CLIENTS):
                group.create_task(client(number))
            await flooding.wait()
            cold = f"m{FEW_SLOTS + pair % (ADAPTERS - FEW_SLOTS)}"
            answer = await load.ask(http, "http://engine", cold, load.prompt(dice), bench.tokens)
        return answer.ttft_s


def compared(row: str, ours: list[float], theirs: list[float], **more: object) -> dict[str, Any]:
    ratio = report.paired_ratio(ours, theirs)
    print(f"{row}: {ratio} (bar {BARS[row]}), {more}", flush=True)
    samples = {"ours": report.Sample(tuple(ours)), "theirs": report.Sample(tuple(theirs))}
    return {"ratio": ratio, "bar": BARS[row], **samples, **more}


def make_many(folder: Path, first: int, count: int) -> None:
    """More adapters of the weights of `m0`, each of another scale and so another digest."""
    source = folder / "m0"
    fields = json.loads((source / "adapter_config.json").read_text())
    for number in range(first, count):
        made = folder / f"m{number}"
        made.mkdir()
        os.link(source / "adapter_model.safetensors", made / "adapter_model.safetensors")
        said = json.dumps(fields | {"lora_alpha": RANK + number / 100})
        (made / "adapter_config.json").write_text(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--rows", nargs="+", choices=list(BARS), default=list(BARS))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--requests", type=int, default=256, help="of a run")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--rounds", type=int, default=8, help="of each hot client, for `cold`")
    args = parser.parse_args()
    path = load_plan.resolve(f"made:{args.model}")
    with tempfile.TemporaryDirectory() as name, zygote("deployments.engines.vllm.preload") as up:
        bench = Bench(up, path, Path(name), args.requests, args.tokens, args.rounds)
        make_adapters(bench.folder / "in", path, ADAPTERS)
        for row in args.rows:  # each is written when it is known
            figures: dict[str, Any] = vars(args) | {"streams": STREAMS, "adapters": ADAPTERS}
            figures["load_average_before"] = os.getloadavg()
            if row == "cold":
                figures[row] = cold_row(bench, args.pairs)
            elif row == "many":
                make_many(bench.folder / "in", ADAPTERS, MANY)
                figures[row] = many_row(bench, args.pairs)
            else:
                figures[row] = throughput_row(bench, row, args.pairs)
            figures["load_average_after"] = os.getloadavg()
            report.write("admission", figures, label=f"{args.model}_{row}")


if __name__ == "__main__":
    main()
