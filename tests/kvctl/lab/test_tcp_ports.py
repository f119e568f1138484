"""TCP ports of servers that are started later."""

from __future__ import annotations

import socket

import pytest

from kvctl.lab.tcp_ports import free_port


def test_port_can_be_bound_and_is_none_that_connections_get() -> None:
    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
    assert 1024 <= port < 32768  # from there on by Linux's default


def test_an_address_of_another_host_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")
