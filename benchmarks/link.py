"""How fast a sleeping module's weights come back to a GPU, beside a plain pinned copy (D3).

    python -m benchmarks.link --gib 4 --rounds 5

Both copy as many bytes in turn: a pinned tensor's `to("cuda")`, and the copy with which
engines put modules to sleep and wake them. Both write memory of the GPU that is allocated in the
same measured time.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from arbiter.units import GIB
from benchmarks import report
from deployments.engines import host_copy

LAYERS = 64


def seconds(act: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def big_module(size_bytes: int) -> torch.nn.Module:
    """Layers on the GPU with so many bytes of random weights in all."""
    torch.manual_seed(1)
    each = size_bytes // LAYERS // 2
    parts = [torch.randn(each, dtype=torch.float16, device="cuda") for _ in range(LAYERS)]
    return torch.nn.ParameterList(parts)


def digest(module: torch.nn.Module) -> list[float]:
    return [float(p.double().sum()) for p in module.parameters()]


def measured(size_bytes: int, rounds: int) -> dict[str, Any]:
    module = big_module(size_bytes)
    before = digest(module)
    pinned = torch.randint(0, 99, (size_bytes,), dtype=torch.uint8).pin_memory()
    plain: list[float] = []
    woken: list[float] = []
    asleep: list[float] = []
    parked: list[host_copy.HostCopy] = []
    for number in range(rounds + 1):
        slept_s = seconds(lambda: parked.append(host_copy.offload(module, "link", {})))
        torch.cuda.empty_cache()
        plain_s = seconds(lambda: pinned.to("cuda", non_blocking=True))
        torch.cuda.empty_cache()
        woken_s = seconds(lambda: host_copy.restore(parked.pop()))
        if number:  # the first round warms both
            plain.append(plain_s)
            woken.append(woken_s)
            asleep.append(slept_s)
    assert digest(module) == before, "the weights are others"

    def speed(seconds: list[float]) -> report.Sample:
        return report.Sample(tuple(size_bytes / s / 1e9 for s in seconds))

    return {
        "bytes": size_bytes,
        "gpu": torch.cuda.get_device_name(),
        "plain_gb_per_s": speed(plain),
        "wake_gb_per_s": speed(woken),
        "wake_of_plain": report.paired_ratio(plain, woken),
        "sleep_s": report.Sample(tuple(asleep)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    figures = measured(int(args.gib * GIB), args.rounds)
    print(figures["wake_of_plain"], "of a plain pinned copy's speed")
    report.write("link", figures, seed=1)


if __name__ == "__main__":
    main()
