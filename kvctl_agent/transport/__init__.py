"""Moves bytes between processes: one interface (`base`), one module per engine, chosen by name.

Importing this package loads no engine; `open_transport` does.
"""

from __future__ import annotations

from kvctl_agent.transport.base import Arrival, Prepared, Region, Transport, Write
from kvctl_agent.transport.environment import prepare_environment
from kvctl_agent.transport.registry import TRANSPORTS, open_transport

__all__ = [
    "TRANSPORTS",
    "Arrival",
    "Prepared",
    "Region",
    "Transport",
    "Write",
    "open_transport",
    "prepare_environment",
]
