"""Discovers agents, queries many of them at once, and reads and writes recordings of their answers."""

from __future__ import annotations
