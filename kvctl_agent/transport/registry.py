"""Registry of the transports by name; imports an engine only when its transport is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvctl_agent.contract.values import near
from kvctl_agent.device.base import Device
from kvctl_agent.errors import ConfigError
from kvctl_agent.memory.host_copier import CopyPool
from kvctl_agent.transport.base import Transport

MAX_NAME_CHARACTERS = 256
"""Longest agent name; the sender's name is sent with every tag."""


def _nixl(agent_name: str, params: Mapping[str, str], device: Device | None, copy_pool: CopyPool | None) -> Transport:
    from kvctl_agent.transport.nixl.transport import NixlTransport

    return NixlTransport(agent_name, params, device, copy_pool)


def _loopback(
    agent_name: str, params: Mapping[str, str], device: Device | None, copy_pool: CopyPool | None
) -> Transport:
    from kvctl_agent.transport.loopback import LoopbackTransport

    return LoopbackTransport(agent_name, params)


def _mooncake(
    agent_name: str, params: Mapping[str, str], device: Device | None, copy_pool: CopyPool | None
) -> Transport:
    from kvctl_agent.transport.mooncake.transport import MooncakeTransport

    return MooncakeTransport(agent_name, params)


TRANSPORTS: dict[str, Callable[[str, Mapping[str, str], Device | None, CopyPool | None], Transport]] = {
    "nixl": _nixl,
    "mooncake": _mooncake,
    "loopback": _loopback,
}


def open_transport(
    name: str,
    agent_name: str,
    params: Mapping[str, str] | None = None,
    device: Device | None = None,
    copy_pool: CopyPool | None = None,
) -> Transport:
    """Creates and starts the transport of an agent.

    Args:
        agent_name: Any text of up to `MAX_NAME_CHARACTERS`; peers that have not connected this agent see it as the
            sender of its tags.
        params: The engine's own settings (`transport_params`).
        device: Device of the memory to be registered, in addition to the host; None for the host only.
        copy_pool: Threads that copy and post without the GIL; started before the first write, closed after the
            transport.

    Raises:
        TransportUnavailable: the engine or a library it needs is not installed; the text says how to get it.
        ConfigError: the transport or a parameter is unknown.
        TransportError: the engine is installed but cannot start.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"transport: unknown {name!r}; allowed: {', '.join(TRANSPORTS)}{near(name, TRANSPORTS)}")
    if len(agent_name) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"agent name: {len(agent_name)} characters; allowed: up to {MAX_NAME_CHARACTERS}")
    return TRANSPORTS[name](agent_name, params or {}, device, copy_pool)


def parse_params(text: str) -> dict[str, str]:
    """Parses the value of `transport_params`: name=value pairs separated by commas.

    Raises:
        ConfigError: an element is not a name=value pair.
    """
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"transport_params: {pair!r} is not a name=value pair")
    return dict(pair.split("=", 1) for pair in pairs)
