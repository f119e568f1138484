"""TCP ports for servers whose endpoint has to be known before they bind it."""

from __future__ import annotations

import socket
from random import SystemRandom

# Below the range from which Linux, by default, takes the ports of connections.
_PORTS = range(20000, 32000)
_ATTEMPTS = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port of this host that nothing has bound, and that no connection takes before a server binds it.

    Raises:
        OSError: the last one, if none of a hundred ports could be bound.
    """
    failed = OSError()
    for port in SystemRandom().sample(_PORTS, _ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                failed = error
            else:
                return port
    raise failed
