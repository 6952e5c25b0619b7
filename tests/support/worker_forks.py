"""Ray's workers as forks of one process that has done their imports.

A worker of Ray imports Ray and then what its actor is made of: a second of a core, and most tests
with Ray start two. `forking_workers` has the raylets that start meanwhile ask this module's server
for each: Ray runs `bin/fork_worker.py` in place of its own `setup_worker.py`. A fork has the
environment, folder, standard files and group of processes that the worker would have had. A worker
with a runtime environment of its own, as for code that is not imported yet, is no fork; nor is any
worker while the server does not answer.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.bin.fork_worker import FORKED, SOCKET

# Ray's own configuration has them once for a process; so the workers of one job are forked.
READ_AT_IMPORT, ANY_JOB = ("RAY_JOB_ID", "RAY_RAYLET_PID"), "ffffffff"
# None has an actor's class or a remote function at hand: Ray gives each a random id, and all forks
# would draw the same ids, those of tasks too, from then on.
IMPORTED = (
    "ray._private.workers.default_worker",
    "arbiter.node.agent",
    "arbiter.server.actor",
    "deployments.replica.residency",
)
LAUNCHER = Path(__file__).parent / "bin" / "fork_worker.py"
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def forking_workers(path: Path) -> Iterator[None]:
    """`path`: of the server's socket."""
    from ray._private import ray_constants

    script = ray_constants.SETUP_WORKER_FILENAME
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,  # the server ends when it does: with this process
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline()  # it listens
        os.environ[SOCKET] = str(path)
        ray_constants.SETUP_WORKER_FILENAME = str(LAUNCHER)
        try:
            yield
        finally:
            ray_constants.SETUP_WORKER_FILENAME = script
            del os.environ[SOCKET]
            server.stdin.close()


class Request(NamedTuple):
    """A worker, and where and with what it is to start."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


def serve(path: str) -> Request:
    """Forks for those that ask, and returns in the fork, which has their standard files."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork stays a zombie
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("listens", flush=True)
    served: tuple[str, ...] = ()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        asker, _ = listener.accept()
        # An asker that is killed meanwhile, with its cluster, wants no worker any more.
        with asker, contextlib.suppress(OSError, ValueError), request_of(asker) as request:
            of = tuple(request.environment[name] for name in READ_AT_IMPORT)
            if not served and ANY_JOB not in of:
                served = of
                import_as(request.environment)
            if of == served:
                if os.fork() == 0:
                    listener.close()
                    for number, file in enumerate(request.files):
                        os.dup2(file, number)
                    return request
                asker.sendall(FORKED)


@contextlib.contextmanager
def request_of(asker: socket.socket) -> Iterator[Request]:
    """Raises ValueError where the asker ended in the middle of it."""
    _, files, _, _ = socket.recv_fds(asker, 1, 3)
    try:
        text = b"".join(iter(lambda: asker.recv(1 << 16), b""))
        arguments, environment, folder = json.loads(text)
        yield Request(arguments, environment, folder, files)
    finally:
        for file in files:
            os.close(file)


def import_as(environment: dict[str, str]) -> None:
    """Imports what the workers of that environment do."""
    os.environ.clear()
    os.environ.update(environment)
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def become(request: Request) -> None:
    """This process as the one that asked for it would have become."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)


if __name__ == "__main__":
    request = serve(sys.argv[1])
    become(request)
    sys.argv = request.arguments
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
