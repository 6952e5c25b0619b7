"""Throughput and first token through the whole graph against bare `vllm serve` (N1).

Both servers are up at once and loaded in turn, so that each pair sees the same machine.
    python -m benchmarks.throughput --model mid-chat --streams 1 8 32 --pairs 10

With `--adapters 8` requests name the base and eight adapters in turn, on both sides. With `--gpu`
both engines share one card and run as vLLM does by default, compiled and with graphs.
"""

import argparse
import asyncio
import copy
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from benchmarks import load, report, servers
from benchmarks.adapters import RANK, make_adapters, plain_lora
from deployments.config import load_plan

ROOT = Path(__file__).resolve().parents[1]
STREAMS = [1, 8, 32]
# Equal on both sides. Threads that compute: what `vllm serve` binds on this node, and so do we.
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "dtype": "bfloat16",
    "enforce_eager": True,
}

# On a GPU. vLLM's own server does not start unless this part of the card is free.
GPU_ARGS: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_seqs": 128,
    "kv_cache_memory_bytes": 10 << 30,
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.3,
}
GPU_ARENAS = {"gpu": "30 GiB", "host": "32 GiB"}
GPU_NEED = {"weights": "2.2 GiB", "working": "13 GiB", "context": "0.8 GiB"}


def graph_config(
    model: str, port: int, engine_args: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """The shipped configuration with one chat model, and `more` of it, in a budget that holds
    it."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config = copy.deepcopy(config)
    config["http_options"]["port"] = port
    config["applications"] = [a for a in config["applications"] if a["name"] in ("front", "chat")]
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["arbiter"] |= {"arenas": {"cpu": "6 GiB", "host": "4 GiB"}, "pipelines": []}
    chat = table["capabilities"]["chat"]
    engine = {"source": f"made:{model}", "engine_args": engine_args or ENGINE_ARGS}
    chat["models"] = {model: engine | more}
    chat["keep_warm_s"], chat["downscale_to_zero_s"] = -1, 3600
    table["capabilities"] = {"chat": chat}
    return config


async def pairs(ours: str, theirs: str, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Interleaved runs at one number of streams; ratios ours / theirs."""
    runs: dict[str, list[load.Run]] = {ours: [], theirs: []}
    for number in range(args.pairs + 1):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        for url in order:
            run = await load.closed_loop(
                url,
                [args.model, *(f"m{n}" for n in range(args.adapters))],
                streams=streams,
                requests=max(streams * args.rounds, 4),
                tokens=args.tokens,
                seed=args.seed + number,
            )
            if number:  # the first pair warms both
                runs[url].append(run)
    speed = {url: [r.tokens_per_s for r in runs[url]] for url in runs}
    first = {url: [r.ttft_s for r in runs[url]] for url in runs}
    return {
        "tokens_per_s_ours": report.Sample(tuple(speed[ours])),
        "tokens_per_s_vllm": report.Sample(tuple(speed[theirs])),
        "throughput_ratio": report.paired_ratio(speed[ours], speed[theirs]),
        "ttft_s_ours": report.Sample(tuple(first[ours])),
        "ttft_s_vllm": report.Sample(tuple(first[theirs])),
        "ttft_ratio": report.paired_ratio(first[ours], first[theirs]),
    }


def our_side(args: argparse.Namespace, path: str, folder: str) -> AbstractContextManager[str]:
    more: dict[str, Any] = {} if args.threads is None else {"threads": args.threads}
    if args.transport == "alone":
        return servers.engine_alone(path, args.model, engine_args(args), **more)
    if args.adapters:
        more["adapters"] = {"folder": folder, "slots": args.adapters, "max_rank": RANK}
    if args.gpu:
        more["need"] = GPU_NEED
    config = graph_config(args.model, 18_400, engine_args(args), **more)
    if args.gpu:
        table = config["applications"][0]["deployments"][0]["user_config"]
        table["arbiter"]["arenas"] = GPU_ARENAS
    return servers.our_graph(config, args.transport)


def their_side(args: argparse.Namespace, path: str, folder: str) -> AbstractContextManager[str]:
    lora = plain_lora(Path(folder), args.adapters, args.adapters) if args.adapters else {}
    return servers.bare_vllm(path, args.model, engine_args(args) | lora, 18_401)


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    return (GPU_ARGS if args.gpu else ENGINE_ARGS) | {"dtype": args.dtype}


def compared(args: argparse.Namespace, path: str, folder: str) -> dict[str, Any]:
    figures = {}
    with our_side(args, path, folder) as ours, their_side(args, path, folder) as theirs:
        for streams in args.streams:
            row = asyncio.run(pairs(ours, theirs, args, streams))
            figures[f"streams_{streams}"] = row
            print(f"{streams:>3} streams: throughput {row['throughput_ratio']} of vllm serve,")
            print(f"             first token {row['ttft_ratio']} of vllm serve", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="requests per stream and run")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    # A processor without AVX-512 computes bfloat16 far more slowly than float32.
    parser.add_argument("--dtype", default=ENGINE_ARGS["dtype"], help="of both sides' engine")
    ways = [*sorted(servers.TRANSPORTS), "alone"]
    parser.add_argument("--transport", choices=ways, default="default", help="alone: no graph")
    parser.add_argument("--adapters", type=int, default=0, help="mixed with the base")
    parser.add_argument("--threads", type=int, help="of our engine that compute; default: its own")
    parser.add_argument("--gpu", action="store_true", help="both engines on one GPU, not eager")
    args = parser.parse_args()
    if args.transport == "alone" and args.adapters:
        parser.error("--adapters: an engine alone is started without any")
    figures: dict[str, Any] = {
        "model": args.model,
        "transport": args.transport,
        "dtype": args.dtype,
    }
    path = load_plan.resolve(f"made:{args.model}")
    with tempfile.TemporaryDirectory() as folder:
        make_adapters(Path(folder), path, args.adapters)
        figures |= compared(args, path, folder)
    label = [args.model, *([] if args.transport == "default" else [args.transport])]
    if args.streams != STREAMS:
        label.append("-".join(map(str, args.streams)))
    if args.adapters:
        label.append(f"{args.adapters}-adapters")
    if args.dtype != ENGINE_ARGS["dtype"]:
        label.append(args.dtype)
    if args.gpu:
        label.append("gpu")
    if args.threads is not None:
        label.append(f"{args.threads}-threads")
    report.write("throughput", figures, args.seed, label="_".join(label))


if __name__ == "__main__":
    main()
