"""Commands that run agents on this machine: bench, tune, demo and replay.

No other part of kvctl may import more of `kvctl_agent` than its contract.
"""

from __future__ import annotations
