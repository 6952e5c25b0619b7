"""Private bytes of every process of the graph, in each state of rest.

    python -m benchmarks.private_bytes

As the kernel counts them: what each process alone has mapped, and what its end would give back.
States, in the order a machine sees them: awake (small-chat answered), asleep (the embedding model
took the device), idle (engines gone, replicas up), zero replicas.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from arbiter.node import procfs
from arbiter.units import KIB, MIB
from benchmarks import owned, report, servers
from benchmarks.first_token import ask, chat_states, embed, no_replica_left, shipped, state, until

MODEL = "small-chat"
KEEP_WARM_S, DOWNSCALE_S = 45, 15  # the next state comes after a look at this one


def look(url: str) -> dict[str, dict[str, float]]:
    """MiB by role, over all processes of it. What a sleeper keeps in a memfd is apart."""
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
    """Without shared memory: Ray's object store is mapped by all of its processes. 0 for one that
    has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith("Private_"))


def awake(url: str) -> None:
    ask(url, MODEL)


def asleep(url: str) -> None:
    embed(url)
    until(lambda: chat_states(url) == ["asleep"], 30, f"{MODEL} is asleep")


def idle(url: str) -> None:
    until(lambda: not state(url)["tickets"], 120, "the engines are gone")


def main() -> None:
    figures: dict[str, Any] = {"model": MODEL}
    steps: list[Callable[[str], None]] = [awake, asleep, idle, no_replica_left]
    with servers.our_graph(shipped(KEEP_WARM_S, DOWNSCALE_S), "default") as url:
        until(lambda: len(state(url)["devices"]) > 0, 60, "the node has been seen")
        for reach in steps:
            reach(url)
            figures[reach.__name__] = rows = look(url)
            seen = ", ".join(f"{role} {row['private_mib']:.0f}" for role, row in rows.items())
            print(f"{reach.__name__}: {seen} MiB", flush=True)
    report.write("private_bytes", figures)


if __name__ == "__main__":
    main()
