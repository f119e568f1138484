"""Everything that starts worker processes on this machine; the one part of kvctl that imports the agent."""

from __future__ import annotations
