"""Instances of agents in this process, for every test of the agent, and Mooncake's resources."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from kvctl_agent.transport.registry import open_transport
from tests.support.agents import make_fleet, model, short_directory

__all__ = ["make_fleet", "model", "short_directory"]


@pytest.fixture(scope="session")
def mooncake_started() -> None:
    """Start Mooncake once, because the resources of its first engine live until the process ends and belong to no test.

    One of its threads opens a socket, on a busy machine only after the engine has been closed again.
    """
    before = _sockets()
    open_transport("mooncake", "first").close()
    deadline = time.monotonic() + 5
    while _sockets() <= before and time.monotonic() < deadline:
        time.sleep(0.01)


def _sockets() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(link.readlink()))
    return {target for target in found if target.startswith("socket:")}
