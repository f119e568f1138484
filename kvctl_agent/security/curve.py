"""CURVE on the sockets of one fleet: every agent has the same key pair, and only its owners are let in.

One key for the fleet, because that is what can be handed out with the rest of a job's configuration: a rank knows its
peers only once the registry has told it, and the registry is behind the same lock.
"""

from __future__ import annotations

from pathlib import Path

import zmq
from zmq.utils import z85

from kvctl_agent.contract.keys import KeyFileError, KeyPair, read_pair
from kvctl_agent.errors import ConfigError

DOMAIN = b"kvctl"


def load_fleet_key(path: str) -> KeyPair | None:
    """The fleet's key, or None where there is none.

    Raises:
        ConfigError: `fleet_key` names a file that cannot be used, or this libzmq was built without CURVE.
    """
    if not path:
        return None
    if not zmq.has("curve"):
        raise ConfigError("fleet_key needs libzmq with CURVE, and this one was built without: pip install pyzmq")
    try:
        pair = read_pair(Path(path).expanduser())
    except KeyFileError as error:
        raise ConfigError(f"fleet_key: {error}") from None
    if _public_of(pair) != pair.public:
        raise ConfigError(f"fleet_key: the two keys in {path} do not belong together; make new ones: kvctl key new")
    return pair


def guard(socket: zmq.Socket[bytes], pair: KeyPair | None) -> None:
    """Before a bind: let in only whom the context's gatekeeper knows."""
    if pair is None:
        return
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)


def introduce(socket: zmq.Socket[bytes], pair: KeyPair | None) -> None:
    """Before a connect: talk only to an owner of the fleet's key, and show that we are one."""
    if pair is None:
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, pair.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


def _public_of(pair: KeyPair) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(pair.secret)))
