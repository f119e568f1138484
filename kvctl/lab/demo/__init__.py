"""Real fleets on this machine: one process per rank, started, heard, harmed on purpose, and always ended."""

from __future__ import annotations
