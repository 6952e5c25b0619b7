"""Seconds to the first token about a picture: never seen, known to the engine, and known to the
engine that was killed before it (H8).

    python -m benchmarks.known_pictures --pictures 10

A vision part of the size of SigLIP base at 512 x 512 (12 layers of 768, 1,024 patches, 64
embeddings a picture) before the text part of tiny-describe; its weights are random, made here. Each
picture is asked about three times, each time with another question. Engine processes alone, no
graph around them; this process holds the slab, as a node agent would.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from arbiter.units import MIB
from benchmarks import report
from benchmarks.restore import SLAB_BYTES
from benchmarks.start_latency import ENTRY
from deployments.config import load_plan
from tests.support.drawings import uri
from tests.support.engine_host import Child, ZygoteUnderTest, kill, zygote
from tests.support.slabs import lent_slab, path_of

SIDE, PATCH = 512, 16
SCALE = 4  # of each 4 x 4 patches the model makes one embedding
EMBEDDINGS = (SIDE // PATCH // SCALE) ** 2
QUESTIONS = ("which shape?", "which colour?", "describe the picture")


def make_model(folder: Path) -> None:
    """Writes the model of the docstring."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    small = Path(load_plan.resolve("made:tiny-describe"))
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
    config = Idefics3Config.from_pretrained(small)
    config.scale_factor = SCALE
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    more = {"num_attention_heads": 12, "image_size": SIDE, "patch_size": PATCH}
    for name, value in {**sizes, **more}.items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(1)
    model: Any = Idefics3ForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "processor_config.json"
    processor = json.loads(path.read_text())
    processor["image_processor"]["max_image_size"] = {"longest_edge": SIDE}
    processor["image_processor"]["size"] = {"longest_edge": SIDE}
    processor["image_seq_len"] = EMBEDDINGS
    path.write_text(json.dumps(processor))


def start(zygote: ZygoteUnderTest, model: Path, name: str, slab: int) -> Child:
    """Loaded, and warmed by a picture."""
    args = {"max_model_len": 512, "kv_cache_memory_bytes": 32 * MIB}
    config = {
        "model": str(model),
        "served_name": "m",
        "engine_args": args,
        "slabs": {"picture": {"path": path_of(slab)}},
    }
    child = zygote.spawn(name, ENTRY, config).hold()
    status, said = child.ready()
    if status != 200:
        raise RuntimeError(f"{name}: {said}")
    ask(child, uri(Image.new("RGB", (SIDE, SIDE))), name)
    return child


def ask(child: Child, url: str, question: str) -> float:
    """Seconds of a request for one token."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    start_s = time.perf_counter()
    status, said = child.call("POST", "/v1/chat/completions", body)
    took_s = time.perf_counter() - start_s
    if status != 200:
        raise RuntimeError(json.dumps(said))
    return took_s


def encoder_runs(child: Child) -> int:
    return int(child.call("GET", "/pictures")[1]["encoder_runs"])


def noise(seed: int) -> str:
    """A picture of random pixels, which no other equals."""
    return uri(Image.frombytes("RGB", (SIDE, SIDE), Random(seed).randbytes(3 * SIDE * SIDE)))


def measure(running: ZygoteUnderTest, model: Path, urls: list[str]) -> dict[str, list[float]]:
    with lent_slab(SLAB_BYTES) as fd:
        child = start(running, model, "first", fd)
        unknown = [ask(child, url, QUESTIONS[0]) for url in urls]
        known = [ask(child, url, QUESTIONS[1]) for url in urls]
        runs = encoder_runs(child)
        kill(child)
        child = start(running, model, "next", fd)
        before = encoder_runs(child)
        inherited = [ask(child, url, QUESTIONS[2]) for url in urls]
        later = encoder_runs(child) - before
        kill(child)
    if (runs, later) != (len(urls) + 1, 0):
        raise RuntimeError(f"runs of the encoder: {runs} and {later} for {len(urls)} pictures")
    return {"unknown": unknown, "known": known, "next_engine": inherited}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    urls = [noise(args.seed * 1_000 + number) for number in range(args.pictures)]
    with tempfile.TemporaryDirectory() as folder, zygote("deployments.engines.vllm.preload") as run:
        model = Path(folder) / "eyes"
        make_model(model)
        sides = measure(run, model, urls)
    figures: dict[str, Any] = {f"{k}_s": report.Sample(tuple(v)) for k, v in sides.items()}
    for name in ("known", "next_engine"):
        figures[f"{name}_ratio"] = report.paired_ratio(sides[name], sides["unknown"])
    for name, sample in figures.items():
        print(f"{name} {sample}")
    report.write("known_pictures", figures, seed=args.seed)


if __name__ == "__main__":
    main()
