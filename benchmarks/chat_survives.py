"""What a long chat loses when a picture takes the device in the middle of it (G4).

    python -m benchmarks.chat_survives --model mid-chat --tokens 3600 --pairs 10

The graph with chat and pictures as one exclusion group, so that a picture has the chat's engine
leave, whatever the sizes. Two models of the same weights take turns: `kept`, whose KV outlives its
engine, and `lost` with `keep_kv: false`. Each pair: a conversation, a picture, the next turn of the
conversation. Seconds are those until the next turn's first token, with the wait for the engine in
them; beside it the same turn with no picture before it, and the share of the tokens seen before
that was not computed again. Waking and loading take the same with both models.
"""

import argparse
import json
import time
import urllib.request
from random import Random
from typing import Any

from benchmarks import report, servers
from benchmarks.calls import Call, answer, models_of
from benchmarks.first_token import shipped, state, table_of, until
from models import shapes

KEPT, LOST = "kept", "lost"
GROUP = "one-at-a-time"
STAYS_S = 600
TURN_TOKENS, ANSWER_TOKENS = 48, 16
BLOCK = 128  # tokens, of the CPU build
WITHIN_S = 60
PICTURE = Call("/v1/images/generations", {"prompt": shapes.Fact("red", "circle", "blue").caption})


def configuration(model: str) -> dict[str, Any]:
    """Returns the shipped graph with the two models in the place of its chat."""
    config = shipped(STAYS_S, STAYS_S)
    table = table_of(config)
    args = {
        "max_model_len": 4096,
        "kv_cache_memory_bytes": "512 MiB",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
    }
    chat = {"source": f"made:{model}", "engine_args": args}
    role = {"rank": 50, "act": "the next request waits for a load", "keep_warm_s": STAYS_S}
    table["arbiter"] |= {
        "roles": {GROUP: role},
        "one_resident_roles": [GROUP],
        "arenas": {"cpu": "5 GiB", "host": "3 GiB"},
    }
    table["capabilities"]["chat"]["models"] = {KEPT: chat, LOST: chat | {"keep_kv": False}}
    for name in ("chat", "image"):
        table["capabilities"][name]["role"] = GROUP
    return config


def ask(url: str, model: str, prompt: list[int], most: int) -> tuple[float, list[int], int]:
    """Returns seconds, the answer's tokens, and how many tokens of the prompt were known."""
    more = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": most, **more}).encode()
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, head)
    start_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=180) as said:
        reply = json.load(said)
    took_s = time.perf_counter() - start_s
    known = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return took_s, reply["choices"][0]["token_ids"], known


class Chats:
    """The two models of one running graph."""

    def __init__(self, url: str, painter: str, seed: int) -> None:
        self.url, self._painter, self._random = url, painter, Random(seed)

    def tokens(self, count: int) -> list[int]:
        """Returns tokens of the made models' vocabulary, which were never seen before."""
        return [self._random.randrange(10, 2000) for _ in range(count)]

    def paint(self) -> None:
        """The chat that was asked last leaves."""
        answer(self.url, PICTURE, self._painter)

    def turn(self, model: str, tokens: int, *, is_interrupted: bool) -> dict[str, float]:
        """Returns seconds of the first turn and of the next one, and what the next one knew."""
        prompt = self.tokens(tokens)
        first_s, said, _ = ask(self.url, model, prompt, ANSWER_TOKENS)
        if is_interrupted:
            until(lambda: self._is_idle(model), WITHIN_S, f"{model} is idle")
            self.paint()
        seen = [*prompt, *said]
        next_s, _, known = ask(self.url, model, [*seen, *self.tokens(TURN_TOKENS)], 1)
        whole = (len(seen) - 1) // BLOCK * BLOCK
        return {"first_s": first_s, "next_s": next_s, "known": known / whole}

    def _is_idle(self, model: str) -> bool:
        tickets = [t for t in state(self.url)["tickets"] if t["model"] == model]
        return bool(tickets) and not any(t["inflight"] for t in tickets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--tokens", type=int, default=3600)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    config = configuration(args.model)
    rows: dict[str, list[dict[str, float]]] = {}
    with servers.our_graph(config, "default") as url:
        chats = Chats(url, models_of(table_of(config))["image"], args.seed)
        for model in (KEPT, LOST):  # imports, replicas and the first loads
            chats.turn(model, BLOCK, is_interrupted=True)
        for _ in range(args.pairs):
            for model in (KEPT, LOST):
                turn = chats.turn(model, args.tokens, is_interrupted=True)
                rows.setdefault(model, []).append(turn)
                print(model, turn, flush=True)
            turn = chats.turn(LOST, args.tokens, is_interrupted=False)
            rows.setdefault("no picture", []).append(turn)
    figures: dict[str, Any] = {
        f"{name}, {field}": report.Sample(tuple(row[field] for row in turns))
        for name, turns in rows.items()
        for field in ("next_s", "known")
    }
    seconds = {name: [row["next_s"] for row in turns] for name, turns in rows.items()}
    figures["kept / lost"] = report.paired_ratio(seconds[KEPT], seconds[LOST])
    for name, value in figures.items():
        print(f"{name}: {value}")
    report.write("chat_survives", figures)


if __name__ == "__main__":
    main()
