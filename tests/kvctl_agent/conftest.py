"""Instances of agents in this process, for every test of the agent."""

from __future__ import annotations

from tests.support.agents import make_fleet, model, short_directory

__all__ = ["make_fleet", "model", "short_directory"]
