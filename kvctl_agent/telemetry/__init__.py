"""Telemetry of one agent: writes counters, current values and a log of events to its region.

Writers never wait for a reader, and wait for each other only for a few bytecodes. `kvctl_agent.observer` folds the log
into rooms, rates and histograms.
"""

from __future__ import annotations
