"""A region in memory, for tests of what writes to one and is not about it."""

from __future__ import annotations

from kvctl_agent.telemetry.region import Header, RegionWriter

REGION = RegionWriter(Header.of_this_process("prefill", "region"))
