"""Faults inside a running agent: what it sends and hears, what its engine does, what its clock says.

A `FaultyAgent` is an `Agent` whose control channel and engine can be made to misbehave while it runs; the agent itself
is the shipped one. The kinds and how they are written are in `kvctl.lab.faults.specification`.
"""

from kvctl.lab.faults.agent import FaultyAgent
from kvctl.lab.faults.injector import FaultInjector

__all__ = ["FaultInjector", "FaultyAgent"]
