"""Transports by name: the one place that knows which engines there are, importing only the one asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from kvctl_agent.device.base import Device
from kvctl_agent.errors import ConfigError
from kvctl_agent.transport.base import Transport

MAX_NAME_CHARACTERS = 256
"""The sender's name travels with every tag."""


def _nixl(agent_name: str, params: Mapping[str, str], device: Device | None) -> Transport:
    from kvctl_agent.transport.nixl.transport import NixlTransport

    return NixlTransport(agent_name, params, device)


def _loopback(agent_name: str, params: Mapping[str, str], device: Device | None) -> Transport:
    from kvctl_agent.transport.loopback.transport import LoopbackTransport

    return LoopbackTransport(agent_name, params)


def _mooncake(agent_name: str, params: Mapping[str, str], device: Device | None) -> Transport:
    from kvctl_agent.transport.mooncake.transport import MooncakeTransport

    return MooncakeTransport(agent_name, params)


TRANSPORTS: dict[str, Callable[[str, Mapping[str, str], Device | None], Transport]] = {
    "nixl": _nixl,
    "mooncake": _mooncake,
    "loopback": _loopback,
}


def open_transport(
    name: str, agent_name: str, params: Mapping[str, str] | None = None, device: Device | None = None
) -> Transport:
    """Starts the transport `name` for an agent of any name.

    Args:
        name: a key of `TRANSPORTS`.
        agent_name: any text up to `MAX_NAME_CHARACTERS`; what peers see as the sender where they have not
            connected us under a name of theirs.
        params: the engine's own settings (`transport_params`).
        device: where the memory to be registered is, besides the host's.

    Raises:
        TransportUnavailable: the engine or a library it needs is not installed; the text says how to get it.
        ConfigError: no such transport or parameter.
        TransportError: the engine is there but cannot start.
    """
    if name not in TRANSPORTS:
        near = difflib.get_close_matches(name, TRANSPORTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"transport: unknown {name!r}; allowed: {', '.join(TRANSPORTS)}{hint}")
    if len(agent_name) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"agent name: {len(agent_name)} characters; allowed: up to {MAX_NAME_CHARACTERS}")
    return TRANSPORTS[name](agent_name, params or {}, device)


def parse_params(text: str) -> dict[str, str]:
    """The engine's own settings as `transport_params` has them: name=value pairs joined by commas.

    Raises:
        ConfigError: something is no such pair.
    """
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"transport_params: {pair!r} is no name=value pair")
    return dict(pair.split("=", 1) for pair in pairs)
