"""Who is at the other end of a unix socket, by the kernel's word (L4)."""

import socket
import struct


def peer_uid(connected: socket.socket) -> int:
    """Returns the user of the process at the other end, as the kernel recorded it at connect."""
    return _credentials(connected)[1]


def peer_pid(connected: socket.socket) -> int:
    """Returns the number of the process at the other end; 0 where that is in a namespace beyond
    ours."""
    return _credentials(connected)[0]


def _credentials(connected: socket.socket) -> tuple[int, int, int]:
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", packed)
    return int(pid), int(uid), int(gid)
