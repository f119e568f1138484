"""Transports, which write bytes into the memory of peers: the interface (`base`), and one implementation per engine.

Importing this package does not load an engine; `open_transport` loads the one it opens.
"""

from __future__ import annotations

from kvctl_agent.memory.region import Region
from kvctl_agent.transport.base import Arrival, Transport, Write
from kvctl_agent.transport.environment import prepare_environment
from kvctl_agent.transport.registry import TRANSPORTS, open_transport

__all__ = [
    "TRANSPORTS",
    "Arrival",
    "Region",
    "Transport",
    "Write",
    "open_transport",
    "prepare_environment",
]
