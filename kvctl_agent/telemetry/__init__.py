"""Counters, timelines and rates of an agent, collected at negligible cost to the hot path.

Writers never wait for a reader, and wait for each other only for a few bytecodes. Readers (the admin thread) copy
without a lock and accept values that are one update old.
"""

from __future__ import annotations
