"""CURVE encryption of the sockets between the agents of a fleet, which all share one key pair.

One key pair can be distributed with the rest of a job's configuration. With a key pair per rank, a rank would need its
peers' public keys, but it learns of its peers only from the registry, whose socket is encrypted with the same key.
"""

from __future__ import annotations

from pathlib import Path

import zmq
from zmq.utils import z85

from kvctl_agent.contract.keys import KeyFileError, KeyPair, read_pair
from kvctl_agent.errors import ConfigError

DOMAIN = b"kvctl"


def load_fleet_key(path: str) -> KeyPair | None:
    """Loads the fleet's key pair from a file; returns None if `path` is empty.

    Raises:
        ConfigError: the file named by `fleet_key` cannot be used, or libzmq was built without CURVE.
    """
    if not path:
        return None
    if not zmq.has("curve"):
        raise ConfigError("fleet_key needs libzmq with CURVE, but the installed one lacks it: pip install pyzmq")
    try:
        pair = read_pair(Path(path).expanduser())
    except KeyFileError as error:
        raise ConfigError(f"fleet_key: {error}") from None
    if _public_of(pair) != pair.public:
        raise ConfigError(f"fleet_key: the two keys in {path} are not a pair: create a new one with kvctl key new")
    return pair


def configure_server(socket: zmq.Socket[bytes], pair: KeyPair | None) -> None:
    """Makes a socket, before it is bound, accept only clients that the context's ZAP authenticator admits."""
    if pair is None:
        return
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


def configure_client(socket: zmq.Socket[bytes], pair: KeyPair | None) -> None:
    """Makes a socket, before it connects, authenticate with the fleet's key and require the same key of the server."""
    if pair is None:
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, pair.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


def _public_of(pair: KeyPair) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(pair.secret)))
