"""Who may speak to an engine: processes of this user, by the kernel's word."""

import asyncio
import os
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from arbiter.protocol.peer_credentials import peer_uid


class SameUserOnly(HttpToolsProtocol):
    """uvicorn's protocol; a connection from another user ends before a byte of it is read. Asked
    once for each connection, and a replica keeps its own open."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # uvloop's own socket object cannot be asked; a duplicate of its descriptor can.
        number = os.dup(transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=number) as conn:
            if peer_uid(conn) != os.getuid():
                transport.abort()
