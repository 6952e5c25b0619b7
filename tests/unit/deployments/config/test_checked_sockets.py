"""Addresses that a private remote may have, and those where clouds keep credentials."""

import socket

import pytest

from deployments.config.checked_sockets import AddressRefused, private_socket


@pytest.mark.spec("J5")
@pytest.mark.parametrize("where", ["169.254.169.254", "fe80::1", "fd00:ec2::254", "0.0.0.0"])
def test_no_credentials_of_a_cloud_are_asked(where: str) -> None:
    with pytest.raises(AddressRefused):
        private_socket((_family(where), socket.SOCK_STREAM, 0, "", (where, 80)))


def test_a_machine_of_the_own_network_is_asked() -> None:
    private_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.1", 80))).close()


def _family(where: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in where else socket.AF_INET
