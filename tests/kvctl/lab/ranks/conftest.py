"""Fleets of ranks in this process, and scripted rank processes."""

from __future__ import annotations

from tests.support.rank_fleet import fleet, group, start

__all__ = ["fleet", "group", "start"]
