"""Real agents to be found, and admin servers with keys on TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.host.keys import read_pair
from kvctl_agent.observer.endpoints import RemoteEndpoint
from kvctl_agent.observer.server import SERVED_HERE
from tests.support.admin_server import AdminServer
from tests.support.agents import make_fleet, model

__all__ = ["make_fleet", "model"]


@pytest.fixture
def keys(kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("default", "fleet"):
        assert kvctl("key", "new", name).code == 0
    return tmp_path / "config" / "kvctl" / "keys"


@pytest.fixture
def agents(keys: Path, canned: Any, socket_directory: Path) -> Iterator[Callable[[str], AdminServer]]:
    """Starts admin servers with keys on TCP, as those of agents in pods."""
    clients = keys / "clients"
    clients.write_text(f"read {(keys / 'default.pub').read_text()}")
    clients.chmod(0o600)
    servers: list[AdminServer] = []

    def make(name: str) -> AdminServer:
        handlers = {
            command.name: lambda _: canned.status(name) for command in COMMANDS if command.name not in SERVED_HERE
        }
        remote = RemoteEndpoint("tcp://127.0.0.1:*", read_pair(keys / "fleet.key"), str(clients))
        server = AdminServer(name, handlers, lambda: canned.hello(name), socket_directory, remote=remote)
        servers.append(server.start())
        return server

    yield make
    for server in servers:
        server.close()
