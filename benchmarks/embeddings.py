"""Embeddings of one sentence: requests a second through the graph against the engine's own socket.

    python -m benchmarks.embeddings --streams 1 8 32 --pairs 10

Both are up at once and loaded in turn; the engine behind the graph and the one asked directly are
forks of the same program with the same model. Each client sends its next sentence when its last is
answered.
"""

import argparse
import asyncio
import copy
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks import load, report, servers
from deployments.config import load_plan
from tests.support.engine_host import zygote

ROOT = Path(__file__).resolve().parents[1]
MODEL = "all-minilm-l6-v2"
ENGINE = "deployments.engines.sentence_transformers"
STREAMS = [1, 8, 32]


def graph_config(port: int) -> dict[str, Any]:
    """The shipped configuration with its embedding alone, which stays loaded."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config = copy.deepcopy(config)
    config["http_options"]["port"] = port
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["arbiter"] |= {"pipelines": []}
    embedding = table["capabilities"]["embedding"]
    embedding["keep_warm_s"], embedding["downscale_to_zero_s"] = -1, 3600
    table["capabilities"] = {"embedding": embedding}
    return config


async def requests_per_s(url: str, streams: int, count: int, seed: int) -> float:
    """A closed loop. `url` may be `unix:PATH`, an engine's own socket. Raises aiohttp.ClientError
    and RuntimeError."""
    dice = random.Random(seed)
    waiting = [load.prompt(dice, words=12) for _ in range(count)]
    connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=streams)
    if url.startswith("unix:"):
        connector = aiohttp.UnixConnector(path=url.removeprefix("unix:"), limit=streams)
        url = "http://engine"
    async with aiohttp.ClientSession(connector=connector) as http:

        async def client() -> None:
            while waiting:
                body = {"model": MODEL, "input": waiting.pop()}
                async with http.post(f"{url}/v1/embeddings", json=body) as response:
                    if response.status != 200:
                        text = (await response.text())[:300]
                        raise RuntimeError(f"{url}: {response.status}: {text}")
                    await response.read()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(client())
        return count / (time.perf_counter() - start)


async def pairs(ours: str, engine: str, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Interleaved runs at one number of streams."""
    rates: dict[str, list[float]] = {ours: [], engine: []}
    for number in range(args.pairs + 1):
        for url in (ours, engine) if number % 2 else (engine, ours):
            count = max(args.least, args.rounds * streams)
            rate = await requests_per_s(url, streams, count, args.seed + number)
            if number:  # the first pair warms both
                rates[url].append(rate)
    return {
        "requests_per_s_ours": report.Sample(tuple(rates[ours])),
        "requests_per_s_engine": report.Sample(tuple(rates[engine])),
        "ratio": report.paired_ratio(rates[ours], rates[engine]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12, help="requests per stream and run")
    parser.add_argument("--least", type=int, default=60, help="requests of a run at least")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = graph_config(18_406)
    models = config["applications"][0]["deployments"][0]["user_config"]["capabilities"]
    path = load_plan.resolve(models["embedding"]["models"][MODEL]["source"])
    figures: dict[str, Any] = {"model": MODEL}
    with zygote(ENGINE) as running, servers.our_graph(config, "default") as ours:
        asked = {"model": path, "served_name": MODEL}
        child = running.spawn("alone", f"{ENGINE}:build", asked).hold()
        status, body = child.ready()
        assert status == 200, body
        for streams in args.streams:
            row = asyncio.run(pairs(ours, f"unix:{child.path}", args, streams))
            figures[f"streams_{streams}"] = row
            print(f"{streams:>3} streams: {row['requests_per_s_ours']} requests a second,")
            print(f"             {row['ratio']} of the engine's own socket", flush=True)
        child.let_go()
    report.write("embeddings", figures, args.seed)


if __name__ == "__main__":
    main()
