"""Settings of the tests of replays."""

from __future__ import annotations

import pytest

from kvctl_agent.protocol import recording


@pytest.fixture(autouse=True)
def _time_for_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine even an empty state may take longer to copy than an agent may spend on it."""
    monkeypatch.setattr(recording, "BUDGET_NS", 10**9)
