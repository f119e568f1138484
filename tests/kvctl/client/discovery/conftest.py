"""Real agents to be found."""

from __future__ import annotations

from tests.support.agents import make_fleet, model

__all__ = ["make_fleet", "model"]
