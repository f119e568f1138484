"""Telemetry and a short private socket directory for tests of the runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl_agent.telemetry.hub import Telemetry


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("here", "prefill")


@pytest.fixture
def directory(socket_dir: Path) -> Path:
    """A directory that does not exist yet."""
    return socket_dir / "run"
