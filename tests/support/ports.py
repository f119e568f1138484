"""Ports for servers of tests whose endpoint has to be known before they bind it."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port below those that the kernel gives to sockets without one, so that none takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
