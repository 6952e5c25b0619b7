"""What Ray runs in place of its own setup_worker.py, which imports Ray, half a second of a core,
before it becomes a worker that imports it again. This one becomes the worker at once, or asks
tests.support.worker_forks for it where that serves. A worker with a runtime environment of its own
is left to Ray's script.

With the standard library only; started a thousand times.
"""

import json
import os
import socket
import sys

SOCKET = "WORKER_FORKS_SOCKET"  # where the server is; without it nothing is forked
RUNTIME_ENVIRONMENT, LANGUAGE = "--serialized-runtime-env-context", "--language"
WORKER, OWN = "default_worker.py", "setup_worker.py"  # Ray's scripts, side by side
FORKED = b"y"


def is_forked(worker: list[str]) -> bool:
    """False where no server listens, or it has no fork for this worker."""
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(os.environ[SOCKET])
            socket.send_fds(server, [b"."], [0, 1, 2])
            server.sendall(json.dumps([worker, dict(os.environ), os.getcwd()]).encode())
            server.shutdown(socket.SHUT_WR)
            return server.recv(1) == FORKED
    except OSError:
        return False


def start(arguments: list[str]) -> None:
    """`arguments`: as Ray gives them to its own script."""
    worker = [a for a in arguments if not a.startswith(LANGUAGE)]
    if any(a.startswith(RUNTIME_ENVIRONMENT) for a in arguments):
        [script] = [a for a in arguments if os.path.basename(a) == WORKER]
        worker = [os.path.join(os.path.dirname(script), OWN), *arguments]
    elif SOCKET in os.environ and is_forked(worker):
        return
    os.execv(sys.executable, [sys.executable, *worker])


if __name__ == "__main__":
    start(sys.argv[1:])
