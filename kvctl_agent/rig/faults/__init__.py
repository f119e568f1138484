"""Faults inside a running agent: what it sends and hears, what its engine does, what its clock says.

A `FaultyAgent` is an `Agent` whose control channel and engine can be made to misbehave while it runs; the agent itself
is the shipped one. The kinds and how they are written are in `kvctl_agent.contract.faults`.
"""

from kvctl_agent.rig.faults.agent import FaultyAgent
from kvctl_agent.rig.faults.force import Faults

__all__ = ["Faults", "FaultyAgent"]
