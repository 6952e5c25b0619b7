"""Runs the four systems one after the other and compares them."""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report, servers
from benchmarks.calls import answer, calls, models_of, spoken
from benchmarks.first_token import shipped, table_of, until
from benchmarks.one_card.hour import Hour
from benchmarks.one_card.player import LONGEST_S, Player, Seen
from benchmarks.one_card.plot import draw
from deployments.config.start_variables import VARIABLES

SHARE = 0.4  # of what the models need together
KEEP_WARM_S = 60
KV_CACHE = "192 MiB"  # of chat: a conversation here is short
GOOD_S = 10.0  # an answer that begins later is no good
ROOM_BYTES = 6 << 30  # in which every model fits, to measure them
PORTS = {"ours": 18_410, "swap": 18_411, "multiplexed": 18_412}
# What a user would have instead starts a server for a model. The others fork their engines as we
# do, so that what is left of the difference is what stays in memory.
COMPARED = {
    "p95_by_best_other": ("multiplexed", "one_at_a_time fresh", "static_split fresh"),
    "p95_by_best_with_our_starts": ("one_at_a_time fork", "static_split fork"),
}


def configured(arena_bytes: int) -> dict[str, Any]:
    config = shipped(KEEP_WARM_S, KEEP_WARM_S)
    table = table_of(config)
    table["arbiter"]["arenas"] = {"cpu": arena_bytes, "host": "1 GiB"}
    row = table["capabilities"]["chat"]["models"]["small-chat"]
    row["engine_args"]["kv_cache_memory_bytes"] = KV_CACHE
    return config


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=30) as said:
        return json.load(said)


def sizes_of(models: dict[str, str]) -> tuple[dict[str, int], bytes]:
    """Bytes that each model is granted once it has been measured, and a spoken question: from our
    graph, with room for all."""
    with servers.our_graph(configured(ROOM_BYTES), "default") as url:
        heard = spoken(url, models["tts"])
        for capability, call in calls(heard).items():
            answer(url, call, models[capability])
        sizes: dict[str, int] = {
            t["model"]: t["need_bytes"] for t in get(url, "/arbiter/state")["tickets"]
        }
    missing = set(models.values()) - sizes.keys()
    if missing:
        raise RuntimeError(f"not resident at the end, so not measured: {sorted(missing)}")
    return sizes, heard


# -------------------------------------------------------------------------------------------------
# The systems. Each yields its address and a function that tells its loads.


@contextlib.contextmanager
def ours(card_bytes: int, kept: Path | None) -> Iterator[tuple[str, Any]]:
    """`kept`: a file for the arbiter's events."""

    def told() -> dict[str, Any]:
        events = get(url, "/arbiter/events/recent")["events"]
        if kept is not None:
            kept.write_text("".join(json.dumps(e) + "\n" for e in events))
        return told_by_events(events)

    with servers.our_graph(configured(card_bytes), "default") as url:
        yield url, told


def told_by_events(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Loads, wakes, and how long tickets waited beside what they were told when they joined."""
    waits: dict[str, tuple[float, float]] = {}
    over: list[tuple[float, float]] = []
    for e in events:
        if e["kind"] == "ticket_waits" and e["took_s"] is not None:
            waits.setdefault(e["ticket"], (e["unix_s"], e["took_s"]))
        elif e["kind"] in ("model_load", "model_wake") and e["ticket"] in waits:
            began_s, predicted_s = waits.pop(e["ticket"])
            over.append((e["unix_s"] - began_s, predicted_s))
    kinds = [e["kind"] for e in events]
    longest = max(over, default=(0.0, 0.0))
    told = {kind: kinds.count(kind) for kind in ("model_load", "model_wake", "eviction")}
    return {
        "loads": told["model_load"],
        "wakes": told["model_wake"],
        "evictions": told["eviction"],
        "longest_wait_s": round(longest[0], 2),
        "predicted_for_it_s": round(longest[1], 2),
        "waits": len(over),
        "waits_above_twice_predicted": sum(1 for w, p in over if w > 2 * p),
        "worst_excess_s": round(max((w - 2 * p for w, p in over), default=0.0), 2),
    }


@contextlib.contextmanager
def process(module: str, given: dict[str, Any], log: str) -> Iterator[tuple[Any, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "given.json"
        ready = Path(folder) / "ready"
        file.write_text(json.dumps(given | {"ready": str(ready)}))
        command = [sys.executable, "-m", module, str(file)]
        with servers.running(command, VARIABLES, Path(f"/tmp/{log}.log")) as running:
            yield running, ready


@contextlib.contextmanager
def swapping(
    table: dict[str, Any], partitions: list[list[str]], is_fresh: bool
) -> Iterator[tuple[str, Any]]:
    port = PORTS["swap"]
    given = {"table": table, "port": port, "partitions": partitions, "is_fresh": is_fresh}
    with process("benchmarks.one_card.swapping", given, "one-card-swap") as (running, _):
        url = f"http://127.0.0.1:{port}"
        servers.wait_for(f"{url}/health", 120, running)
        yield url, lambda: get(url, "/health")


@contextlib.contextmanager
def multiplexed(
    table: dict[str, Any], sizes: dict[str, int], card_bytes: int
) -> Iterator[tuple[str, Any]]:
    port = PORTS["multiplexed"]
    given = {"table": table, "port": port, "sizes": sizes, "card_bytes": card_bytes}
    with process("benchmarks.one_card.multiplexed", given, "one-card-mux") as (_, ready):
        until(ready.exists, 180, "Serve runs")
        yield f"http://127.0.0.1:{port}", dict


def split(sizes: dict[str, int], chat_model: str, card_bytes: int) -> list[list[str]]:
    """Chat has its part for good; the largest of the rest says whether they fit beside it."""
    rest = [model for model in sizes if model != chat_model]
    fits = [m for m in rest if sizes[m] + sizes[chat_model] <= card_bytes]
    return [[chat_model], fits]


# -------------------------------------------------------------------------------------------------
# What came of it.


def figures_of(seen: Sequence[Seen], wall_s: float) -> dict[str, Any]:
    """A failure counts as the longest wait, in every percentile."""
    live = [s for s in seen if s.kind != "batch"]
    good = [s for s in live if not s.failure and s.useful_s <= GOOD_S]
    figures: dict[str, Any] = {
        "requests": len(seen),
        "failed": sum(1 for s in seen if s.failure),
        "failed_for_memory": sum(1 for s in seen if s.is_memory),
        "goodput_per_min": round(len(good) / wall_s * 60, 2),
        "good_share": round(len(good) / len(live), 4),
        "useful_s": percentiles(live),
        "batch_done_s": round(max(s.at_s + s.took_s for s in seen if s.kind == "batch"), 1),
    }
    figures["by_kind"] = {
        kind: percentiles([s for s in seen if s.kind == kind])
        for kind in sorted({s.kind for s in seen})
    }
    return figures


def percentiles(rows: Sequence[Seen]) -> dict[str, float]:
    values = [LONGEST_S if s.failure else s.useful_s for s in rows]
    middle, high, most = np.percentile(values, [50, 95, 100])
    return {"p50": round(middle, 3), "p95": round(high, 3), "max": round(most, 3)}


def play(system: str, url: str, hour: tuple[Any, ...], chat_model: str) -> tuple[list[Seen], float]:
    items, batch = hour
    extra = {"x_priority": "batch"} if system == "ours" else {}
    player = Player(url, extra, by_name=system == "multiplexed")
    start_s = time.monotonic()
    asyncio.run(player.play(items, batch, chat_model))
    return player.seen, time.monotonic() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description="python -m benchmarks.one_card")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--systems", nargs="+", help="only these")
    parser.add_argument("--events", type=Path, help="a file for the events of our arbiter")
    args = parser.parse_args()
    table = table_of(configured(ROOM_BYTES))
    models = models_of(table)
    sizes, heard = sizes_of(models)
    card_bytes = int(SHARE * sum(sizes.values()))
    print(f"{sizes} -> a card of {card_bytes / 2**20:.0f} MiB", flush=True)
    made = Hour(args.seed, 60 * args.minutes, models, heard)
    hour = made.items(), made.batch()
    together = [list(sizes)]
    parts = split(sizes, models["chat"], card_bytes)
    systems = {
        "ours": lambda: ours(card_bytes, args.events),
        "multiplexed": lambda: multiplexed(table, sizes, card_bytes),
        "one_at_a_time fork": lambda: swapping(table, together, False),
        "one_at_a_time fresh": lambda: swapping(table, together, True),
        "static_split fork": lambda: swapping(table, parts, False),
        "static_split fresh": lambda: swapping(table, parts, True),
    }
    figures: dict[str, Any] = {"sizes_bytes": sizes, "card_bytes": card_bytes}
    figures |= {"minutes": args.minutes, "good_s": GOOD_S, "parts": parts}
    rows: dict[str, list[Seen]] = {}
    for name in args.systems or systems:
        with systems[name]() as (url, told):
            rows[name], wall_s = play(name, url, hour, models["chat"])
            figures[name] = figures_of(rows[name], wall_s) | told()
        first = next((s.failure for s in rows[name] if s.failure), "")
        print(f"{name}: {json.dumps(figures[name])} {first}", flush=True)
    for key, names in COMPARED.items():
        others = [figures[name]["useful_s"]["p95"] for name in names if name in rows]
        if "ours" in rows and others:
            figures[key] = round(figures["ours"]["useful_s"]["p95"] / min(others), 3)
            print(f"{key}: {figures[key]}")
    report.write("one_card", figures, seed=args.seed)
    draw(rows, report.FOLDER.parent / "one-card.png")


if __name__ == "__main__":
    main()
