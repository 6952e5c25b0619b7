"""A socket at which a node agent hands copies of models' files to processes of its group (D4).

A process of the group may be another user's, to which the kernel shows none of the agent's
descriptors in /proc, whatever mode their files have. It sends one line of JSON, `{"key": K}`, and
is answered with one byte and the descriptors of the copy: the index, then each file; with nothing
where there is no such copy for the group. The copy is in use until the process closes the
connection.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

from arbiter.node.lending_socket import Finds, LendingSocket, read_request
from arbiter.protocol.peer_credentials import peer_pid
from arbiter.units import NodeId, TicketId

MODE, FOLDER_MODE = 0o660, 0o710  # the group may connect, and list nothing
USERS_MOST = 64  # connections; each keeps a descriptor of the agent
FOLDERS = Path("/tmp")
_READ_BYTES = 1_024


class GroupSocket(LendingSocket):
    """Hands copies to processes of the agent's group. `find` notes the process as a user of the
    copy, under a name in the place of a ticket; `end_use` takes the copy back from it. The kernel
    lets this user and the group connect."""

    def __init__(self, node: NodeId, find: Finds, end_use: Callable[[TicketId], None]) -> None:
        """Binds the socket. Raises OSError."""
        super().__init__(_folder() / f"{node}.sock", find)
        self.path.chmod(MODE)
        self._end_use = end_use
        self._numbers = itertools.count(1)

    async def _answer(self, peer: socket.socket) -> None:
        if len(self._answering) > USERS_MOST:
            peer.close()
            return
        user = TicketId(f"process-{peer_pid(peer)}-{next(self._numbers)}")
        with peer:
            try:
                request = await read_request(peer)
                fds = self._find(user, request["key"])
                if fds:
                    socket.send_fds(peer, [b"\n"], list(fds))
                    while await asyncio.get_running_loop().sock_recv(peer, _READ_BYTES):
                        continue  # until the other end is closed
            except (OSError, TimeoutError, ValueError, KeyError, TypeError):
                return  # it has gone, or asks for nothing
            finally:
                self._end_use(user)


def _folder() -> Path:
    """Makes a folder that the group may pass through. Raises PermissionError: in a stranger's
    another socket could take the place of ours."""
    path = FOLDERS / f"arbiter-group-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or path.is_symlink():
        raise PermissionError(f"{path} belongs to user {status.st_uid}; remove it")
    path.chmod(FOLDER_MODE)
    return path
