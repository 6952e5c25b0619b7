"""First tokens of chat with and without a batch beside it, and the swaps of a mixed batch (J4).

    python -m benchmarks.batch_beside_chat --pairs 10 --asks 20 [--model mid-chat --words 250]

Pairs of equal stretches, in alternating order: chat alone, and chat while a batch of the same model
runs. Questions have so many words, with which no cache can help. The figure is the p95 of the
seconds to the first token, as a ratio. Then a batch whose lines name two models in turn that do not
fit together: its loads, against one for each change of model in the order as given.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp
from openai import OpenAI

from benchmarks import load, report
from benchmarks.batch_kills import ENDED
from models import make_models
from tests.graph.conftest import Graph, started, until

CHAT = "small-chat"
BATCH_TOKENS, CHAT_TOKENS = 64, 8
PAUSE_S = 0.2  # between two questions: a person is slower
WITHIN_S = 300.0


def upload(client: OpenAI, bodies: list[dict[str, Any]]) -> str:
    """Begins a batch and returns its id."""
    url = "/v1/chat/completions"
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    raw = "\n".join(json.dumps(row) for row in rows).encode()
    file = client.files.create(file=("in.jsonl", raw), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id


def body(model: str, number: int, tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": f"Line {number}"}
    return {"model": model, "messages": [message], "max_tokens": tokens, "ignore_eos": True}


@dataclass
class Chat:
    """Questions to one model, one after another."""

    url: str
    model: str
    asks: int
    words: int
    dice: random.Random = field(default_factory=lambda: random.Random(1))

    def stretch(self) -> list[float]:
        """Seconds to the first token of each."""
        return asyncio.run(self._ask_all())

    async def _ask_all(self) -> list[float]:
        seconds = []
        async with aiohttp.ClientSession() as http:
            for _ in range(self.asks):
                text = f"{self.dice.random()} {load.prompt(self.dice, self.words)}"
                answer = await load.ask(http, self.url, self.model, text, CHAT_TOKENS)
                seconds.append(answer.ttft_s)
                await asyncio.sleep(PAUSE_S)
        return seconds


def p95(values: list[float]) -> float:
    return quantiles(values, n=20)[-1]


def beside(chat: Chat, client: OpenAI) -> list[float]:
    """A stretch while a batch of more lines than it can finish runs."""
    batch = upload(client, [body(chat.model, n, BATCH_TOKENS) for n in range(4_000)])

    def runs() -> bool:
        counts = client.batches.retrieve(batch).request_counts
        return counts is not None and counts.completed > 4

    until(runs, WITHIN_S, "the batch runs")
    figures = chat.stretch()
    assert client.batches.retrieve(batch).status == "in_progress", "the batch was too short"
    client.batches.cancel(batch)
    until(lambda: client.batches.retrieve(batch).status in ENDED, WITHIN_S, "it is cancelled")
    return figures


def swaps(graph: Graph, client: OpenAI, lines: int) -> dict[str, int]:
    """Loads of a batch whose lines name two models in turn."""
    last = graph.state()["sequence"]
    models = (CHAT, "wide-chat")
    batch = upload(client, [body(models[n % 2], n, 4) for n in range(lines)])
    until(lambda: client.batches.retrieve(batch).status in ENDED, WITHIN_S, "the batch has ended")
    loads = [e for e in graph.events() if e["seq"] > last and e["kind"] == "model_load"]
    return {"lines": lines, "loads": len(loads), "as_given": lines}


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--asks", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--lines", type=int, default=40, help="of the batch of two models")
    parser.add_argument("--model", default=CHAT)
    parser.add_argument("--words", type=int, default=4, help="of a question")
    said = parser.parse_args()
    if said.model != CHAT:
        make_models.make(make_models.default_folder(), make_models.MID)

    def change(config: dict[str, Any]) -> None:
        table = config["applications"][0]["deployments"][0]["user_config"]
        table["jobs"] = {"in_flight": said.in_flight}
        engine = {"max_model_len": 2_048, "kv_cache_memory_bytes": "128 MiB", "max_num_seqs": 16}
        if said.model != CHAT:
            row = {"source": f"made:{said.model}", "engine_args": engine, "keep_warm_s": 40}
            table["capabilities"]["chat"]["models"][said.model] = row

    with tempfile.TemporaryDirectory() as folder, started(Path(folder), change) as graph:
        client = OpenAI(base_url=f"{graph.url}/v1", api_key="none", timeout=60, max_retries=4)
        chat = Chat(graph.url, said.model, said.asks, said.words)
        replace(chat, asks=5).stretch()
        alone: list[float] = []
        batched: list[float] = []
        began_s = time.monotonic()
        for pair in range(said.pairs):
            for is_batched in (False, True) if pair % 2 else (True, False):
                if is_batched:
                    batched += beside(chat, client)
                else:
                    alone += chat.stretch()
        figures = {
            "alone_p95_s": p95(alone),
            "beside_p95_s": p95(batched),
            "ratio": p95(batched) / p95(alone),
            "alone_median_s": median(alone),
            "beside_median_s": median(batched),
            "n": len(alone),
            "in_flight": said.in_flight,
            "model": said.model,
            "words": said.words,
            "load_average": os.getloadavg(),
            "took_s": time.monotonic() - began_s,
            "swaps": swaps(graph, client, said.lines),
        }
        print(json.dumps(figures, indent=1))
        report.write("batch_beside_chat", figures, label=said.model)


if __name__ == "__main__":
    main()
