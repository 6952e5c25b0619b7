"""Ways to run one text model of vLLM on a GPU: what each takes to start, how fast it is, what it
holds, and whether it says the same after it slept. No Ray.

    python -m benchmarks.engine_modes --model gpu-one

Eager, with graphs of CUDA but nothing compiled, and as vLLM does by default (compiled, with
graphs); each starts twice, because the second finds what the first compiled. Then a model with
adapters and a model for pictures sleep and wake, and a sleeping copy is spoiled: its wake must
notice, and say that only a new engine helps. benchmarks.gpu_models makes `gpu-one`.
"""

import argparse
import asyncio
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pynvml

from arbiter.units import MIB
from benchmarks import load, report
from benchmarks.calls import HELLO, LOOK
from benchmarks.gpu_models import make_all
from benchmarks.start_latency import ENTRY, first_token
from deployments.config import load_plan
from models.train_chat_adapters import ADAPTERS
from tests.support.engine_host import Child, ZygoteUnderTest, tree, zygote

SIZES: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_seqs": 128,
    "kv_cache_memory_bytes": 10 << 30,
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "default": {},
}
STREAMS = (1, 8, 32, 128)
TOKENS, ROUNDS = 64, 2
LONG = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}


def held_mib(child: Child) -> int:
    """Of the first GPU, by the processes of an engine, as NVML counts them."""
    handle, mine = pynvml.nvmlDeviceGetHandleByIndex(0), set(tree(child.pid))
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(int(p.usedGpuMemory or 0) for p in listed if p.pid in mine) // MIB


@contextmanager
def engine(running: ZygoteUnderTest, ticket: str, config: dict[str, Any]) -> Iterator[Child]:
    child = running.spawn(ticket, ENTRY, config).hold()
    status, said = child.ready()
    if status != 200:
        raise RuntimeError(f"{ticket}: {said} {child.log[-1500:]}")
    yield child
    child.let_go()


def text(child: Child, model: str, messages: Any = HELLO) -> str:
    body = {"model": model, "messages": messages, **LONG}
    status, said = child.call("POST", "/v1/chat/completions", body)
    if status != 200:
        raise RuntimeError(f"{model}: {status} {said}")
    return str(said["choices"][0]["message"]["content"])


def slept(child: Child, ask: Callable[[], list[str]]) -> dict[str, Any]:
    """Sleeps and wakes twice: answers, seconds and bytes before, meanwhile and after."""
    before, awake = ask(), held_mib(child)
    naps = []
    for _ in range(2):
        sleep_s = child.call("POST", "/control/sleep", within_s=120)[1]["seconds"]
        asleep = held_mib(child)
        woken = child.call("POST", "/control/wake", within_s=120)[1]
        naps.append(
            {
                "sleep_s": sleep_s,
                "asleep_mib": asleep,
                "wake_s": woken["seconds"],
                "verified": woken["verified"],
                "same_answers": ask() == before,
                "awake_mib": held_mib(child),
            }
        )
    return {"awake_mib": awake, "different_texts": len(set(before)), "naps": naps}


def speed(child: Child, model: str, streams: int) -> dict[str, float]:
    """Tokens a second, and seconds to a first token, at the engine's own socket."""
    sizes = {"streams": streams, "requests": streams * ROUNDS, "tokens": TOKENS}
    url = f"unix:{child.path}"
    asyncio.run(load.closed_loop(url, [model], **sizes, seed=0))
    run = asyncio.run(load.closed_loop(url, [model], **sizes, seed=1))
    return {"tokens_per_s": run.tokens_per_s, "ttft_s": run.ttft_s}


def mode(running: ZygoteUnderTest, model: str, name: str) -> dict[str, Any]:
    """Two starts of one mode; speed and sleep are those of the second."""
    path = load_plan.resolve(f"made:{model}")
    config = {"model": path, "served_name": model, "engine_args": SIZES | MODES[name]}
    figures: dict[str, Any] = {"first_token_s": []}
    for start in ("first", "second"):
        begun_s = time.perf_counter()
        with engine(running, f"{name}-{start}", config) as child:
            first_token(child, model)
            figures["first_token_s"].append(time.perf_counter() - begun_s)
            if start == "second":
                figures["streams"] = {n: speed(child, model, n) for n in STREAMS}
                figures |= slept(child, lambda c=child: [text(c, model)])  # type: ignore[misc]
    return figures


def with_adapters(running: ZygoteUnderTest) -> dict[str, Any]:
    folder = load_plan.resolve("made:small-chat")
    loras = {name: f"{folder}-adapters/{name}" for name in ADAPTERS}
    more = {"enable_lora": True, "max_loras": len(loras), "max_lora_rank": 8, "lora_modules": loras}
    sizes = {"max_model_len": 1024, "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 30}
    config = {"model": folder, "served_name": "base", "engine_args": {**sizes, **more}}
    with engine(running, "adapters", config) as child:
        return slept(child, lambda: [text(child, name) for name in ("base", *ADAPTERS)])


def seeing(running: ZygoteUnderTest) -> dict[str, Any]:
    sizes = {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 30}
    more = {"limit_mm_per_prompt": {"image": 2}, **sizes}
    path = load_plan.resolve("made:tiny-describe")
    config = {"model": path, "served_name": "sees", "engine_args": more, "slabs": {"picture": {}}}
    with engine(running, "seeing", config) as child:
        return slept(child, lambda: [text(child, "sees", LOOK)])


def damaged(running: ZygoteUnderTest, model: str) -> dict[str, Any]:
    """What its wake says."""
    worker = {"worker_cls": "benchmarks.damaged_worker.DamagedGpuWorker"}
    path = load_plan.resolve(f"made:{model}")
    config = {"model": path, "served_name": model, "engine_args": SIZES | MODES["eager"] | worker}
    with engine(running, "damaged", config) as child:
        text(child, model)
        child.call("POST", "/control/sleep", within_s=120)
        return dict(child.call("POST", "/control/wake", within_s=120)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpu-one")
    args = parser.parse_args()
    pynvml.nvmlInit()
    make_all()
    figures: dict[str, Any] = {"model": args.model}
    with zygote("deployments.engines.vllm.preload") as running:
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "damaged": lambda: damaged(running, args.model),
            **{name: partial(mode, running, args.model, name) for name in MODES},
            "adapters": lambda: with_adapters(running),
            "seeing": lambda: seeing(running),
        }
        for name, step in steps.items():
            try:
                figures[name] = step()
            except (RuntimeError, OSError, LookupError, TypeError) as error:
                traceback.print_exc()
                figures[name] = {"failed": repr(error)[:2000]}
            print(f"{name}: {figures[name]}", flush=True)
            report.write("engine_modes", figures, seed=0, label=args.model)


if __name__ == "__main__":
    main()
