"""What kept KV blocks save, and what keeping them costs (G7).

    python -m benchmarks.restore --model mid-chat --parts first store hits

`first`: seconds to the first token of a prompt that was never seen (cold), that the device still
has (warm), that the next engine process finds in the slab after a SIGKILL (restored), and that one
finds in the slab's file alone, which is not in the page cache (read). `store`:
tokens a second of an engine that keeps its blocks beside an engine that does not, in pairs, and
beside that two engines of which neither does: two processes of one model differ by some per cent,
so that each pair of processes is one sample (benchmarks.slab_share has the steady figure). `hits`:
of the tokens in whole blocks that were seen before, the share that is not computed again, in one
conversation of 50 turns and in 100 of 10, by an engine of 16 MiB of KV cache (two long contexts of
tiny-chat). Engine processes alone, no graph around them; this process holds the slab, as a node
agent would.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from arbiter.pool import SlabView, slab_file
from arbiter.units import GIB, MIB, Bytes
from benchmarks import report
from benchmarks.start_latency import ENTRY
from deployments.config import load_plan
from tests.support.engine_host import Child, ZygoteUnderTest, kill, until, zygote
from tests.support.slabs import lent_slab, path_of

BLOCK = 128  # tokens; what the CPU build has by default
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 8, 384, 64
TURN_TOKENS, ANSWER_TOKENS = 48, 16
PARTS = ("first", "store", "hits")


SLAB_BYTES = GIB


class Engines:
    """Engine processes of one model."""

    def __init__(self, zygote: ZygoteUnderTest, model: str, seed: int) -> None:
        self._zygote, self._model, self._count = zygote, model, 0
        self._path = load_plan.resolve(f"made:{model}")
        self._random = Random(seed)

    def start(self, slab: int | None, kv_mib: int = 512, file: Path | None = None) -> Child:
        """Loaded, and warmed by a short prompt. `file`: what an earlier slab held."""
        args = {
            "max_model_len": 4096,
            "kv_cache_memory_bytes": kv_mib * MIB,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2048,
            "enable_prompt_tokens_details": True,
            "block_size": BLOCK,
            "enforce_eager": True,
        }
        config: dict[str, Any] = {"model": self._path, "served_name": "m", "engine_args": args}
        if slab is not None:
            rows = {"file": str(file)} if file else {}
            config["slabs"] = {"kv": {"path": path_of(slab), **rows}}
        self._count += 1
        child = self._zygote.spawn(f"restore-{self._count}", ENTRY, config).hold()
        status, said = child.ready()
        if status != 200:
            raise RuntimeError(f"{self._model}: {said}")
        ask(child, self.prompt(BLOCK // 2))
        return child

    def prompt(self, tokens: int) -> list[int]:
        """Of the tiny models' vocabulary, never seen before."""
        return [self._random.randrange(10, 2000) for _ in range(tokens)]


def ask(child: Child, tokens: list[int], most: int = 1) -> tuple[float, list[int], int]:
    """Seconds, the answer's tokens, and how many tokens of the prompt were known."""
    body = {"model": "m", "prompt": tokens, "max_tokens": most, "temperature": 0}
    start_s = time.perf_counter()
    more = {"ignore_eos": True, "return_token_ids": True}
    status, said = child.call("POST", "/v1/completions", {**body, **more})
    took_s = time.perf_counter() - start_s
    if status != 200:
        raise RuntimeError(json.dumps(said))
    known = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return took_s, said["choices"][0]["token_ids"], known


def stored(child: Child, rows: int) -> None:
    """Waits until so many blocks are in the slab."""
    until(lambda: child.call("GET", "/slab")[1]["kv"]["ready"] >= rows, 30)


# -- the first token ------------------------------------------------------------------------------


@contextlib.contextmanager
def saved(slab: int) -> Iterator[Path]:
    """The file of an idle slab, as its agent writes it, and none of it in the page cache. It lies
    in the folder of the process, because that of temporary files may be RAM."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        file = Path(folder) / f"kv{slab_file.SUFFIX}"
        with contextlib.closing(SlabView(slab)) as view:
            most, wanted = Bytes(SLAB_BYTES), lambda: True
            slab_file.save(view, file, now_s=time.time(), most_bytes=most, is_wanted=wanted)
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield file


def first_round(engines: Engines, tokens: int) -> dict[str, float]:
    """Seconds of the four, with an engine each for before the kill, after it, and with the file."""
    prompt, whole = engines.prompt(tokens), (tokens - 1) // BLOCK * BLOCK
    with lent_slab(SLAB_BYTES) as fd:
        child = engines.start(fd)
        cold_s, _, known = ask(child, prompt)
        warm_s, _, known_warm = ask(child, prompt)
        stored(child, whole // BLOCK)
        kill(child)
        child = engines.start(fd)
        restored_s, _, known_restored = ask(child, prompt)
        kill(child)
        with saved(fd) as file, lent_slab(SLAB_BYTES) as empty:
            child = engines.start(empty, file=file)
            read_s, _, known_read = ask(child, prompt)
            kill(child)
    if (known, known_warm, known_restored, known_read) != (0, whole, whole, whole):
        found = f"{known}, {known_warm}, {known_restored}, {known_read}"
        raise RuntimeError(f"known: {found} of {whole} tokens")
    seconds = {"cold": cold_s, "warm": warm_s, "restored": restored_s, "read": read_s}
    print(", ".join(f"{name} {took_s:.3f} s" for name, took_s in seconds.items()), flush=True)
    return seconds


def first(engines: Engines, tokens: int, rounds: int) -> dict[str, Any]:
    rows = [first_round(engines, tokens) for _ in range(rounds)]
    sides = {name: [row[name] for row in rows] for name in rows[0]}
    figures: dict[str, Any] = {f"{name}_s": report.Sample(tuple(s)) for name, s in sides.items()}
    for name in ("warm", "restored", "read"):
        figures[f"{name}_ratio"] = report.paired_ratio(sides[name], sides["cold"])
    return {"tokens": tokens, **figures}


# -- what storing costs ---------------------------------------------------------------------------


def tokens_per_s(child: Child, prompts: list[list[int]]) -> float:
    start_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(child, prompt, STREAM_TOKENS), prompts))
    return sum(len(said) for _, said, _ in answers) / (time.perf_counter() - start_s)


def speeds_ratio(engines: Engines, slabs: tuple[int | None, int | None], pairs: int) -> float:
    """Of the first of two new engines by the second, the median of some pairs. The same prompts to
    both sides of a pair, whose order alternates."""
    sides = [engines.start(slab) for slab in slabs]
    ratios = []
    for number in range(pairs):
        prompts = [engines.prompt(STREAM_PROMPT) for _ in range(STREAMS)]
        order = sorted((0, 1), reverse=bool(number % 2))
        speeds = {side: tokens_per_s(sides[side], prompts) for side in order}
        ratios.append(speeds[0] / speeds[1])
    for child in sides:
        kill(child)
    return statistics.median(ratios)


def store(engines: Engines, starts: int, pairs: int) -> dict[str, Any]:
    """One sample a start. Which engine starts first alternates too."""
    ratios: dict[str, list[float]] = {"with_by_without": [], "without_by_without": []}
    for number in range(starts):
        with lent_slab(SLAB_BYTES) as fd:
            if number % 2:
                ratios["with_by_without"].append(1 / speeds_ratio(engines, (None, fd), pairs))
            else:
                ratios["with_by_without"].append(speeds_ratio(engines, (fd, None), pairs))
        ratios["without_by_without"].append(speeds_ratio(engines, (None, None), pairs))
        print({name: round(values[-1], 3) for name, values in ratios.items()}, flush=True)
    return {name: report.Sample(tuple(values)) for name, values in ratios.items()}


# -- hits -----------------------------------------------------------------------------------------


def talk(engines: Engines, child: Child, conversations: int, turns: int) -> float:
    """All conversations a turn each, in turn. The share of the tokens in whole blocks that were
    sent before and not computed again."""
    seen = [list[int]() for _ in range(conversations)]
    known = could = 0
    for _ in range(turns):
        for history in seen:
            before = len(history)
            history.extend(engines.prompt(TURN_TOKENS))
            _, said, cached = ask(child, history, ANSWER_TOKENS)
            known += cached
            could += max(0, before - 1) // BLOCK * BLOCK  # the last token of an answer has no KV
            history.extend(said)
    return known / could


def hits(engines: Engines) -> dict[str, Any]:
    talks = {}
    for name, conversations, turns in (("one_of_50", 1, 50), ("hundred_of_10", 100, 10)):
        with lent_slab(SLAB_BYTES) as fd:
            child = engines.start(fd, kv_mib=16)
            talks[name] = talk(engines, child, conversations, turns)
            kill(child)
        print(f"{name}: {talks[name]:.4f}", flush=True)
    return talks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=3_600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    figures: dict[str, Any] = {"model": args.model}
    with zygote("deployments.engines.vllm.preload") as running:
        engines = Engines(running, args.model, args.seed)
        if "first" in args.parts:
            figures["first"] = first(engines, args.tokens, args.rounds)
        if "store" in args.parts:
            figures["store"] = store(engines, args.starts, args.pairs)
        if "hits" in args.parts:
            figures["hits"] = hits(engines)
    for part in args.parts:
        for name, sample in figures[part].items():
            print(f"{part}: {name} {sample}")
    report.write("restore", figures, seed=args.seed, label=f"{args.model}_{'_'.join(args.parts)}")


if __name__ == "__main__":
    main()
