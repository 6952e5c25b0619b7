"""Who may speak to a zygote or an engine: processes of this user, by the kernel's word."""

import asyncio
import os
import socket
import struct

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def peer_uid(conn: socket.socket) -> int:
    """User of the process at the other end, as the kernel recorded it at connect."""
    packed = conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", packed)
    return int(uid)


class OwnOnly(HttpToolsProtocol):
    """uvicorn's protocol; a connection from another user ends before a byte of it is read. Asked
    once for each connection, and a replica keeps its own open."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # uvloop's own socket object cannot be asked; a duplicate of its descriptor can.
        number = os.dup(transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=number) as conn:
            if peer_uid(conn) != os.getuid():
                transport.abort()
