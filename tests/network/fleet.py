"""A live fleet with one rank on each host of a network, which kvctl asks from a host of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import zmq
from zmq.utils import z85

from kvctl.lab.demo.fleet import FleetPlan, LiveFleet, LiveRank
from kvctl.lab.ranks.messages import Start
from kvctl.lab.ranks.process import PROGRAM, RankProcess
from kvctl_agent.contract.admin import SOCKET_DIR_VARIABLE
from kvctl_agent.host.keys import KeyPair, public_text, secret_text
from tests.network.hosts import Network

REGISTRY_PORT = 7000
CONTROL_PORT = 7001
ADMIN_PORT = 7311


class NetworkFleet(LiveFleet):
    """A live fleet whose agents talk TCP with keys, each on the host that `place` names.

    Attributes:
        network: the hosts.
        place: name of the host of each rank's next process, by rank.
        ipv6: whether the agents use IPv6 addresses.
    """

    def __init__(
        self, plan: FleetPlan, network: Network, place: Mapping[str, str], asks: str, *, ipv6: bool = False
    ) -> None:
        """Plans the fleet and creates its keys; `asks` is the host on which kvctl runs."""
        super().__init__(plan)
        self.network = network
        self.place = dict(place)
        self.ipv6 = ipv6
        self._asks = asks
        self._keys = self.directory / "keys"
        self._keys.mkdir()
        fleet, client = _write_keys(self._keys / "fleet.key"), _write_keys(self._keys / "client.key")
        del fleet
        clients = self._keys / "clients"
        clients.write_text(f"admin {client.public.hex()} the test\n")
        clients.chmod(0o600)

    def address(self, host: str) -> str:
        """Returns the address of a host, as it is written in an endpoint."""
        return f"[{self.network[host].ipv6}]" if self.ipv6 else self.network[host].ipv4

    def admin(self, name: str) -> str:
        """Returns the admin endpoint of a rank."""
        return f"tcp://{self.address(self.place[name])}:{ADMIN_PORT}"

    def host_pid(self, name: str) -> int:
        """Returns the pid of a rank's agent outside its host; the process that this fleet knows is its parent."""
        pid = self.ranks[name].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def kill(self, name: str) -> None:
        """Kills a rank's agent; the process that this fleet knows is only its parent outside the host."""
        os.kill(self.host_pid(name), SIGKILL)

    def pause(self, name: str) -> None:
        """Takes a rank for silent whose host the network cuts off; its process runs on."""
        self.ranks[name].paused = True

    def resume_replaced(self, name: str) -> None:
        """Does nothing: the replaced process runs, and its host is heard again when the network heals."""

    def _launch(self, rank: LiveRank, start: Start) -> RankProcess:
        host = self.network[self.place[rank.name]]
        sockets = self.directory / host.name
        sockets.mkdir(mode=0o700, exist_ok=True)
        address = self.address(host.name)
        config = {
            **start.config,
            "fleet_key": str(self._keys / "fleet.key"),
            "admin_clients": str(self._keys / "clients"),
            "admin_endpoint": f"tcp://{address}:{ADMIN_PORT}",
        }
        if start.role == "prefill":
            config["listen"] = f"{address}:{CONTROL_PORT}"
        registry = f"tcp://{self.address(self.place['prefill-0'])}:{REGISTRY_PORT}"
        process = self.launch(rank.name, {SOCKET_DIR_VARIABLE: str(sockets)}, program=host.program(PROGRAM))
        process.send(replace(start, bootstraps=(registry,), config=config))
        return process

    def kvctl(self, *arguments: str, of: Sequence[str] = ()) -> Any:
        """Runs kvctl on the host that asks; returns the data of its answer.

        Args:
            of: the ranks to ask; all by default.
        """
        done = self.run_kvctl([self.admin(name) for name in of or self.ranks], *arguments)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)["data"]

    def run_kvctl(self, endpoints: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs kvctl with these values of `-e` and JSON output on the host that asks."""
        named = [part for endpoint in endpoints for part in ("-e", endpoint)]
        keys = ["--key", str(self._keys / "client.key"), "--server-key", str(self._keys / "fleet.pub")]
        command = [sys.executable, "-m", "kvctl", *named, *keys, *arguments, "--timeout", "2", "-o", "json"]
        environment = {
            **os.environ,
            SOCKET_DIR_VARIABLE: str(self._keys),
            "KVCTL_CONFIG": "/dev/null",
            "XDG_CACHE_HOME": str(self.directory),
        }
        return self.network[self._asks].run(*command, check=False, environment=environment)


def _write_keys(path: Path) -> KeyPair:
    pair = KeyPair(*(z85.decode(half) for half in zmq.curve_keypair()))
    path.write_text(secret_text(path.stem, pair))
    path.chmod(0o600)
    path.with_suffix(".pub").write_text(public_text(path.stem, pair))
    return pair
