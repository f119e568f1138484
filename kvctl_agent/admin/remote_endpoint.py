"""The admin endpoint for people on other machines: TCP, CURVE, and a level for each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from kvctl_agent.admin.endpoints import CurveEndpoint
from kvctl_agent.contract.keys import KeyFileError, KeyPair
from kvctl_agent.errors import AdminError, ConfigError
from kvctl_agent.security import curve
from kvctl_agent.security.clients import Clients
from kvctl_agent.security.zap_authenticator import ZapAuthenticator


class RemoteEndpoint(NamedTuple):
    """Where an agent can be asked over the network, and by whom."""

    endpoint: str
    keys: KeyPair
    clients: Path


def remote_endpoint(settings: Mapping[str, Any], keys: KeyPair | None) -> RemoteEndpoint | None:
    """What the configuration says; None where there is no such endpoint.

    Raises:
        ConfigError: it is not tcp://, or keys or clients are missing: `insecure` does not replace them here, since a
            client of this socket may stop the service.
    """
    endpoint: str = settings["admin_endpoint"]
    if not endpoint:
        return None
    if not endpoint.startswith("tcp://"):
        raise ConfigError(f"admin_endpoint = {endpoint!r}: write tcp://address:port; a Unix socket is there anyway")
    if keys is None:
        raise ConfigError(f"admin_endpoint = {endpoint} needs fleet_key: make one with kvctl key new")
    if not settings["admin_clients"]:
        raise ConfigError(
            f"admin_endpoint = {endpoint} needs admin_clients, a file with the keys of those who may use it"
        )
    return RemoteEndpoint(endpoint, keys, Path(settings["admin_clients"]).expanduser())


def open_remote_endpoint(
    context: zmq.Context[zmq.Socket[bytes]],
    remote: RemoteEndpoint,
    name: str,
    refused: Callable[[str], None],
    complain: Callable[[str], None],
) -> tuple[CurveEndpoint, ZapAuthenticator]:
    """Binds the endpoint; whoever calls closes the gatekeeper and ends the context.

    Raises:
        AdminError: the address cannot be bound, or the file of clients cannot be used.
    """
    try:
        clients = Clients(remote.clients, complain)
    except KeyFileError as error:
        raise AdminError(f"admin_clients: {error}") from None
    gatekeeper = ZapAuthenticator(
        context, f"kvctl-admin-keys-{name}", lambda key: clients.level(key) is not None, refused
    )
    try:
        door = CurveEndpoint(context.socket(zmq.ROUTER), clients.level)
        door.socket.ipv6 = "[" in remote.endpoint
        curve.configure_server(door.socket, remote.keys)
        door.socket.bind(remote.endpoint)
    except zmq.ZMQError as error:
        gatekeeper.close()
        raise AdminError(f"cannot bind admin_endpoint {remote.endpoint}: {error.strerror}") from None
    except BaseException:
        gatekeeper.close()
        raise
    return door, gatekeeper
