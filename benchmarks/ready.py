"""The first chat after `arbiter serve` has said that it is ready, against a later cold load: what
ready means (M1).

    python -m benchmarks.ready --rounds 3

Both begin without a replica and without an engine; the second when a spare worker is at hand again.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks import first_token, report, servers
from deployments.cli.cluster.serve import RULE

PORT = 18_430
READY_S = 180.0


@contextmanager
def started(config: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Address, and the seconds until it said that it is ready. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve_config.yaml"
        file.write_text(yaml.safe_dump(config))
        env = os.environ | servers.own_state()
        command = [sys.executable, "-m", "deployments.cli", "serve", str(file)]
        with (Path(folder) / "said").open("w+b") as said:
            process = subprocess.Popen(command, env=env | _variables(), stdout=said, stderr=said)
            try:
                yield f"http://127.0.0.1:{PORT}", _ready_after(process, Path(folder) / "said")
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(60)


def _variables() -> dict[str, str]:
    """Those of `make serve`."""
    lines = (first_token.ROOT / "Makefile").read_text()
    return dict(re.findall(r"^export (\w+) \?= (.*)$", lines, re.M))


def _ready_after(process: "subprocess.Popen[bytes]", said: Path) -> float:
    start = time.monotonic()
    while said.read_text().count(RULE) < 2:
        if process.poll() is not None or time.monotonic() - start > READY_S:
            raise RuntimeError(f"not ready within {READY_S:.0f} s: {said.read_text()[-2000:]}")
        time.sleep(0.05)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small-chat")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = first_token.shipped(2, 1)
    config["http_options"]["port"] = PORT
    ready, first, second = [], [], []
    for _ in range(args.rounds):
        with started(config) as (url, ready_s):
            ready.append(ready_s)
            first.append(first_token.ask(url, args.model))
            second.append(first_token.zero_replicas(url, args.model))
            print(f"ready {ready_s:.1f} s, first {first[-1]:.2f} s, second {second[-1]:.2f} s")
    ratio = report.Sample(tuple(a / b for a, b in zip(first, second, strict=True)))
    figures = {"model": args.model, "ready_s": report.Sample(tuple(ready))}
    figures |= {"first_s": report.Sample(tuple(first)), "second_s": report.Sample(tuple(second))}
    print(f"the first chat takes {ratio} of a later cold one")
    report.write("ready", figures | {"ratio": ratio})


if __name__ == "__main__":
    main()
