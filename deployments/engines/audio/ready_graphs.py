"""ONNX graphs as onnxruntime made them ready, kept in a folder of the node: the next start of an
engine opens such a graph in a fifth of the processor time, because nothing is left to optimise and
its weights are mapped instead of read.

What onnxruntime makes depends on its version and on the processor, and its author warns that it
runs nowhere else. So both are in the folder's name, with the file's path, times and inode: a file
that was changed is made ready again. On a GPU nothing is kept.
"""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.adapters.folder_cache import alone, make_room
from deployments.config.environment import Environment

logger = logging.getLogger("arbiter.engine")

MAX_BYTES = 4 << 30  # on disk: some 60 voices of 63 MB; the longest unused leave
UNFINISHED_S = 3_600.0  # the largest graph is written in minutes
_SCRATCH = ".making-"
_GRAPH, _WEIGHTS = "graph.onnx", "graph.data"
_LEAST_MAPPED = "1024"  # bytes; smaller weights stay in the graph's file

Settings = Callable[[], Any]  # makes a SessionOptions


def open_graph(file: Path, settings: Settings, providers: list[str]) -> Any:
    """A session of the graph in `file`. `providers`: of onnxruntime, the first preferred. Raises
    what onnxruntime raises for a file that is no graph."""
    import onnxruntime  # here: its import starts a thread, and a zygote must have none

    def opened(path: Path, options: Any) -> Any:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)

    if providers[0] != "CPUExecutionProvider":
        return opened(file, settings())
    cached = Environment().graphs / _key(file)
    if (cached / _GRAPH).is_file():
        options = settings()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session = opened(cached / _GRAPH, options)
            os.utime(cached)
        except _broken() as error:
            logger.warning("%s is made ready again: %s", file.name, error)
            shutil.rmtree(cached, ignore_errors=True)
        else:
            return session
    return _made(file, settings, opened, cached)


def _made(file: Path, settings: Settings, opened: Callable[[Path, Any], Any], cached: Path) -> Any:
    """Opens the graph and keeps it as it is then. Where it cannot be written it is only opened."""
    try:
        cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cached.parent, prefix=_SCRATCH))
    except OSError as error:
        logger.warning("%s is not kept ready: %s", file.name, error)
        return opened(file, settings())
    options = settings()
    options.optimized_model_filepath = str(scratch / _GRAPH)
    options.log_severity_level = 3  # it warns that the graph is for this machine alone
    for name, value in (("file_name", _WEIGHTS), ("min_size_in_bytes", _LEAST_MAPPED)):
        key = f"session.optimized_model_external_initializers_{name}"
        options.add_session_config_entry(key, value)
    try:
        session = opened(file, options)
        _keep(scratch, cached)
    except _broken() as error:
        logger.warning("%s is not kept ready: %s", file.name, error)
        return opened(file, settings())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return session


def _keep(scratch: Path, cached: Path) -> None:
    """Raises OSError. Another engine may have been faster."""
    size_bytes = sum(file.stat().st_size for file in scratch.iterdir())
    with alone(cached.parent):
        _remove_unfinished(cached.parent)
        if not cached.is_dir():
            make_room(cached.parent, size_bytes, MAX_BYTES)
            scratch.rename(cached)


def _remove_unfinished(folder: Path) -> None:
    """What engines that were killed have left."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - scratch.stat().st_mtime > UNFINISHED_S:
                shutil.rmtree(scratch)


def _key(file: Path) -> str:
    """Raises OSError."""
    import onnxruntime

    path = file.resolve()
    stat = path.stat()
    facts = str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    machine = onnxruntime.__version__, platform.machine(), _processor()
    return hashlib.sha256(repr((facts, machine)).encode()).hexdigest()[:32]


def _processor() -> str:
    """What Linux says of the first core: its kind and what it can do."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        return "".join(row for row in first.splitlines() if row.startswith(("model", "flags")))
    return ""


def _broken() -> tuple[type[Exception], ...]:
    """What is raised for a graph that onnxruntime cannot read or write."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
        state.RuntimeException,
        OSError,
    )
