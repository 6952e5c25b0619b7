"""The sockets of vLLM's own, between the processes of one engine: only they may connect (L4)."""

import os
from pathlib import Path
from typing import Any

import zmq


def make_private(engine: str) -> None:
    """Makes the sockets private that this process and its forks bind from now on. They lie in the
    folder of the engine's own socket, which only this user may enter, and a connection of another
    user ends before a byte of it is read. Called once in a process. `engine`: the path of the
    engine's socket, without suffix."""
    os.environ["VLLM_RPC_BASE_PATH"] = str(Path(engine).parent)
    bind = zmq.Socket.bind

    def checked(socket: Any, address: str) -> Any:
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())  # asks the kernel, by SO_PEERCRED
        return bind(socket, address)

    zmq.Socket.bind = checked  # type: ignore[method-assign, assignment]
