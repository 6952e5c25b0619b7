"""What Ray runs in place of its own setup_worker.py: asks tests.support.worker_forks for a worker.

With the standard library only; started a thousand times.
"""

import json
import os
import socket
import sys

SOCKET, OWN = "WORKER_FORKS_SOCKET", "WORKER_FORKS_OWN"  # where the server is, and Ray's own script
RUNTIME_ENVIRONMENT, LANGUAGE = "--serialized-runtime-env-context", "--language"
FORKED = b"y"


def is_forked(arguments: list[str]) -> bool:
    """False where the worker needs more than a fork, or no server listens."""
    if any(a.startswith(RUNTIME_ENVIRONMENT) for a in arguments):
        return False
    worker = [a for a in arguments if not a.startswith(LANGUAGE)]
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(os.environ[SOCKET])
            socket.send_fds(server, [b"."], [0, 1, 2])
            server.sendall(json.dumps([worker, dict(os.environ), os.getcwd()]).encode())
            server.shutdown(socket.SHUT_WR)
            return server.recv(1) == FORKED
    except OSError:
        return False


if __name__ == "__main__" and not is_forked(sys.argv[1:]):
    os.execv(sys.executable, [sys.executable, os.environ[OWN], *sys.argv[1:]])
