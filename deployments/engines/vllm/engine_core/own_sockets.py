"""The sockets of vLLM's own, between the processes of one engine: only they may connect (L4)."""

import os
from pathlib import Path
from typing import Any

import zmq


def make_private(engine: str) -> None:
    """Has those that this process and its forks make from now on lie in the folder of the engine's
    own, which only this user may enter, and end a connection of another user before a byte of it is
    read. Called once in a process. `engine`: path of its socket, without suffix."""
    os.environ["VLLM_RPC_BASE_PATH"] = str(Path(engine).parent)
    bind = zmq.Socket.bind

    def checked(socket: Any, address: str) -> Any:
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())  # asks the kernel, by SO_PEERCRED
        return bind(socket, address)

    zmq.Socket.bind = checked  # type: ignore[method-assign, assignment]
