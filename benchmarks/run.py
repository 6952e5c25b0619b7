"""`make bench`: the protocol, starts, first tokens and throughput, one after the other. The other
benchmarks are run by their names; docs/benchmarks.md has them all.
"""

import subprocess
import sys

# Shortest first, so that a mistake shows early.
SUITE: tuple[tuple[str, ...], ...] = (
    ("benchmarks.protocol",),
    ("benchmarks.start_latency",),
    ("benchmarks.first_token", "--model", "tiny-chat"),
    ("benchmarks.throughput", "--model", "tiny-chat"),
    ("benchmarks.throughput", "--model", "mid-chat", "--pairs", "10"),
)


def main() -> None:
    subprocess.run([sys.executable, "-m", "models.make_models", "--random"], check=True)
    for module, *args in SUITE:
        print(f"== {module} {' '.join(args)}", flush=True)
        subprocess.run([sys.executable, "-m", module, *args], check=True)


if __name__ == "__main__":
    main()
