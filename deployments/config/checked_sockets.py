"""Sockets for aiohttp that connect to allowed addresses only.

The check is of the address that is then connected to, whatever its name resolves to at that moment
and however it is written: a name that changes its address between a check and a use gains nothing.

    aiohttp.TCPConnector(socket_factory=public_socket)
"""

import ipaddress
import socket
from typing import Any

from deployments.config.url_allowlist import is_public

# Where AWS keeps credentials: unlike the link-local one of all clouds, it looks like a private one.
CREDENTIALS = frozenset({ipaddress.ip_address("fd00:ec2::254")})


class AddressRefused(OSError):
    """An OSError, so that aiohttp tries the next address of a name."""


def public_socket(address: Any) -> socket.socket:
    """`address`: one answer of getaddrinfo. Raises AddressRefused."""
    if not is_public(address[4][0]):
        raise AddressRefused(f"{address[4][0]} is not a public address")
    return _socket(address)


def private_socket(address: Any) -> socket.socket:
    """Public, private and loopback addresses; never link-local ones, where clouds keep credentials,
    nor what is no address of a machine. Raises AddressRefused."""
    where = address[4][0]
    if not is_public(where) and not _is_machine(where):
        raise AddressRefused(f"{where} is not an address of a machine")
    return _socket(address)


def _is_machine(where: str) -> bool:
    address = ipaddress.ip_address(where.partition("%")[0])
    inner = getattr(address, "ipv4_mapped", None) or address
    is_odd = (
        inner in CREDENTIALS or inner.is_link_local or inner.is_multicast or inner.is_unspecified
    )
    return inner.is_private and not is_odd and (inner.is_loopback or not inner.is_reserved)


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    return socket.socket(family, kind, protocol)
