"""Implements bench, tune, demo and preflight, which run agents, or parts of agents, on this machine.

No other part of kvctl may import more of `kvctl_agent` than its contract.
"""

from __future__ import annotations
