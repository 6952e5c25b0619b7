"""Private bytes of every process of the graph, in each state of rest, capability by capability.

    python -m benchmarks.private_bytes

As the kernel counts them: what each process alone has mapped, and what its end would give back.
States of the first model of each capability, in the order a machine sees them: awake (it has
answered), asleep (where it can: the embedding model was asked, and has left), idle (engine gone,
replica up), zero replicas. One model is awake at a time, whatever the sizes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arbiter.node import procfs
from arbiter.units import KIB, MIB
from benchmarks import owned, report, servers
from benchmarks.calls import Call, answer, calls, models_of, spoken
from benchmarks.evictions import exclusive
from benchmarks.first_token import (
    embed,
    no_engine_left,
    no_replica_left,
    shipped,
    state,
    table_of,
    until,
)

# The next state comes after a look at this one. An asleep model stays until the model that took
# its device has left.
KEEP_WARM_S, ASLEEP_S, DOWNSCALE_S = 3, 20, 8


def look(url: str) -> dict[str, dict[str, float]]:
    """MiB by role, over all processes of it. What an asleep model keeps in a memfd is apart."""
    node = state(url)["devices"][0]["device"].split("/")[0]
    rows = {}
    for role, pids in sorted(owned.by_role(node).items()):
        rows[role] = {
            "processes": len(pids),
            "private_mib": sum(private_bytes(pid) for pid in pids) / MIB,
            "host_copy_mib": procfs.memory(pids).host_bytes / MIB,
        }
    return rows


def private_bytes(pid: int) -> int:
    """Without shared memory: Ray's object store is mapped by all of its processes. 0 for a process
    that has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith("Private_"))


def asleep(url: str, model: str) -> None:
    """Alone, so that every engine that is seen is a part of it."""
    embed(url)

    def is_alone() -> bool:
        return [(t["model"], t["state"]) for t in state(url)["tickets"]] == [(model, "asleep")]

    until(is_alone, ASLEEP_S, f"{model} is asleep and the embedding model has left")


def models_that_sleep(table: dict[str, Any]) -> set[str]:
    """Of the first models of the capabilities: those that fall asleep when they make room. They are
    given the time for it."""
    models = set()
    for capability, model in models_of(table).items():
        row = table["capabilities"][capability]["models"][model]
        if row.get("can_sleep", True):
            row["keep_warm_s"] = ASLEEP_S
            models.add(model)
    return models


def states(url: str, model: str, call: Call, can_sleep: bool) -> dict[str, Any]:
    """What is seen in each state of one model."""
    steps: dict[str, Callable[[], object]] = {
        "awake": lambda: answer(url, call, model),
        "asleep": lambda: asleep(url, model),
        "idle": lambda: no_engine_left(url),
        "zero_replicas": lambda: no_replica_left(url),
    }
    if not can_sleep:
        del steps["asleep"]
    no_replica_left(url)
    by_state = {}
    for name, reach in steps.items():
        reach()
        by_state[name] = rows = look(url)
        seen = ", ".join(f"{role} {row['private_mib']:.0f}" for role, row in rows.items())
        print(f"{model}, {name}: {seen} MiB", flush=True)
    return by_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    config = shipped(KEEP_WARM_S, DOWNSCALE_S)
    exclusive(config)
    models = models_of(table_of(config))
    parser.add_argument("--capabilities", nargs="+", choices=list(models), default=list(models))
    asked = parser.parse_args().capabilities
    can_sleep = models_that_sleep(table_of(config))
    figures: dict[str, Any] = {}
    with servers.our_graph(config, "default") as url:
        until(lambda: len(state(url)["devices"]) > 0, 60, "the node has been seen")
        requests = calls(spoken(url, models["tts"]))
        for capability in asked:
            model = models[capability]
            figures[capability] = states(url, model, requests[capability], model in can_sleep)
    report.write("private_bytes", figures)


if __name__ == "__main__":
    main()
