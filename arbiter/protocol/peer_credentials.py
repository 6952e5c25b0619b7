"""Who is at the other end of a unix socket, by the kernel's word (L4)."""

import socket
import struct


def peer_uid(connected: socket.socket) -> int:
    """User of the process at the other end, as the kernel recorded it at connect."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", packed)
    return int(uid)
