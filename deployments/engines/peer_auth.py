"""Only processes of this user may connect to an engine; the kernel tells the user of a peer."""

import asyncio
import os
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from arbiter.protocol.peer_credentials import peer_uid


class SameUserOnly(HttpToolsProtocol):
    """uvicorn's protocol, which ends a connection from another user before it reads a byte. It
    checks each connection once, and a replica keeps its connections open."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # uvloop's own socket object cannot be asked; a duplicate of its descriptor can.
        number = os.dup(transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=number) as conn:
            if peer_uid(conn) != os.getuid():
                transport.abort()
