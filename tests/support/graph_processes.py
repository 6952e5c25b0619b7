"""The processes of a running graph, and whether its books are true."""

import os
from pathlib import Path

from tests.graph.conftest import Graph, command_of, name_of, pids
from tests.support.engine_host import device_bytes
from tests.support.open_files import open_files

# Part of the command line of each victim. Ray names its workers after their actor.
VICTIMS = {
    "replica": "ray::ServeReplica:chat:chat",
    "engine": "engine",
    "arbiter": "ray::ArbiterActor",
    "node agent": "ray::NodeAgent",
    "zygote": "deployments.engines.zygote",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
}


def victims(graph: Graph, kind: str) -> list[int]:
    """Pids of that kind in this graph and no other."""
    if kind == "engine":
        return graph.engines()
    if kind == "zygote":  # its forks keep its command line, but not its name
        return [p for p in pids() if name_of(p) == "zygote" and graph.node in command_of(p)]
    return [p for p in graph.workers() if VICTIMS[kind] in command_of(p)]


def replicas(graph: Graph, deployment: str) -> list[int]:
    """Pids of its replicas in this graph."""
    return [pid for pid in graph.workers() if f"ServeReplica:{deployment}:" in command_of(pid)]


def books_are_true(graph: Graph) -> bool:
    """The books equal what the kernel says now, nothing is overcommitted, and there is an engine
    for each ticket that holds bytes and none besides."""
    state = graph.state()
    holding = [t for t in state["tickets"] if t["state"] not in ("queued", "closed")]
    if not state["devices"] or any(t["state"] == "reclaiming" for t in holding):
        return False  # a new epoch has not heard of its node, or bytes are on their way back
    try:
        roots = {os.getpgid(pid) for pid in graph.engines()}
        kernel_bytes = sum(device_bytes(root) for root in roots)
    except (ProcessLookupError, FileNotFoundError):
        return False  # an engine has ended between two looks
    if len(roots) != len(holding):
        return False
    cpu = next(d for d in state["devices"] if d["kind"] == "cpu")
    close = abs(cpu["measured_bytes"] - kernel_bytes) <= 0.05 * kernel_bytes  # B1
    is_charged = cpu["charged_bytes"] >= cpu["measured_bytes"]
    return bool(close and is_charged and cpu["free_bytes"] >= 0)


def logs_naming(graph: Graph, *words: str) -> dict[str, list[Path]]:
    """Of each word the logs that have it: those of Ray, Serve and their processes, and what `serve
    run` printed."""
    front = log_of(graph, "front")
    files = [graph.folder / "serve.log", *(front.parents[1].rglob("*.*") if front else ())]
    files_by_word: dict[str, list[Path]] = {}
    for file in filter(Path.is_file, files):
        text = file.read_text(errors="replace")
        for word in (word for word in words if word in text):
            files_by_word.setdefault(word, []).append(file)
    return files_by_word


def log_of(graph: Graph, replica: str) -> Path | None:
    """The file that Serve gave a replica, as the kernel knows it."""
    for pid in graph.workers():
        if f"ServeReplica:{replica}:" not in command_of(pid):
            continue
        for file in open_files(pid).values():
            if f"/logs/serve/replica_{replica}" in file:
                return Path(file)
    return None
