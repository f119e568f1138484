"""Instances of agents in this process, for every test of the agent, and Mooncake's resources."""

from __future__ import annotations

import pytest

from tests.support.agents import make_fleet, model, short_directory
from tests.support.mooncake import start_mooncake

__all__ = ["make_fleet", "model", "short_directory"]


@pytest.fixture(scope="session")
def mooncake_started() -> None:
    """The resources of Mooncake's first engine belong to no test."""
    start_mooncake()
