"""Seconds from "start this model" to its first token: our zygote's child against bare vLLM.

    python -m benchmarks.start_latency --model tiny-chat --rounds 5

Ours: the spawn message to the first non-empty token of a stream, the zygote being up. Theirs: exec
of vLLM's own server to the first token of its first answer. Both with a warm page cache and vLLM's
record of the model class, in turn, so that each pair sees the same machine. No Ray on either side;
benchmarks.first_token measures through the whole graph. Also: bytes and seconds of sleep and wake.
"""

import argparse
import json
import time
from typing import Any

from benchmarks import report, servers
from benchmarks.first_token import ask
from deployments.config import load_plan
from tests.support.engine_host import Child, Connection, ZygoteUnderTest, device_bytes, zygote

ENTRY = "deployments.engines.vllm.engine:build"
# Equal on both sides. Eager and with explicit KV bytes: vLLM's own fastest start on this build.
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 128 << 20,
    "dtype": "bfloat16",
    "enforce_eager": True,
}
PORT = 18_420


def first_token(child: Child, model: str) -> None:
    """Returns at the first non-empty token of a streamed answer."""
    message = {"role": "user", "content": "who holds the memory"}
    body = {"model": model, "messages": [message], "max_tokens": 4, "stream": True}
    conn = Connection(child.path)
    conn.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = conn.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
            "content"
        ):
            break
    response.read()


def ours(running: ZygoteUnderTest, path: str, model: str, number: int) -> dict[str, float]:
    config = {"model": path, "served_name": model, "engine_args": ENGINE_ARGS}
    start = time.perf_counter()
    child = running.spawn(f"start-{number}", ENTRY, config).hold()
    status, body = child.ready()
    assert status == 200, body
    figures = {"ready_s": time.perf_counter() - start}
    first_token(child, model)
    figures["first_token_s"] = time.perf_counter() - start
    figures["awake_mib"] = device_bytes(child.pid) / 2**20
    figures["sleep_s"] = child.call("POST", "/control/sleep")[1]["seconds"]
    figures["asleep_mib"] = device_bytes(child.pid) / 2**20
    figures["wake_s"] = child.call("POST", "/control/wake")[1]["seconds"]
    child.let_go()
    return figures


def bare(path: str, model: str) -> float:
    start = time.perf_counter()
    with servers.bare_vllm(path, model, ENGINE_ARGS, PORT) as url:
        ready_s = time.perf_counter() - start
        return ready_s + ask(url, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    path = load_plan.resolve(f"made:{args.model}")
    mine: list[dict[str, float]] = []
    theirs: list[float] = []
    with zygote("deployments.engines.vllm.preload") as running:
        running.ask({"op": "ping"})
        ours(running, path, args.model, 0)  # vLLM learns the model class: once per machine
        for number in range(1, args.rounds + 1):
            mine.append(ours(running, path, args.model, number))
            theirs.append(bare(path, args.model))
    figures: dict[str, Any] = {
        name: report.Sample(tuple(one[name] for one in mine)) for name in mine[0]
    }
    figures["bare_vllm_s"] = report.Sample(tuple(theirs))
    figures["ratio"] = report.paired_ratio([one["first_token_s"] for one in mine], theirs)
    for name, sample in figures.items():
        print(f"{name}: {sample}")
    report.write("start_latency", {"model": args.model, **figures}, label=args.model)


if __name__ == "__main__":
    main()
