"""A fleet on four hosts, under load, whose network the tests of this folder disturb and heal again."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.demo.fleet import FleetPlan
from kvctl.lab.demo.room_accounting import Disturbance, LiveRoom
from kvctl.lab.demo.traffic import Traffic
from kvctl.lab.ranks.request import Sizes
from tests.network.fleet import NetworkFleet
from tests.network.hosts import Network, missing

PATIENCE_S = 60.0
LOST_S = 3.0
DEADLINE_S = 8.0
TIMINGS = {
    "heartbeat_s": 0.2,
    "suspect_s": 1.0,
    "lost_s": LOST_S,
    "bootstrap_timeout_s": DEADLINE_S,
    "waiting_timeout_s": DEADLINE_S,
}
PREFILL, DECODE = ("n1", "n2"), ("n3", "n4")
PLACE = {"prefill-0": "n1", "prefill-1": "n2", "decode-0": "n3", "decode-1": "n4"}
SPARE, ASKS = "n5", "n6"
# What a fault of the network may do to a room; anything else is a finding.
EXPLAINED = (
    "KV_PEER_LOST",
    "KV_ROOM_STUCK_BOOTSTRAP",
    "KV_ROOM_STUCK_WAITING",
    "KV_ROOM_STUCK_TRANSFER",
    "KV_TRANSPORT_ERROR",
)

_QUARANTINED = "kvctl_quarantined_bytes"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder where such hosts cannot be made."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    if here and (reason := missing()):
        for item in here:
            item.add_marker(pytest.mark.skip(reason=f"no network namespaces: {reason}"))


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Override: the fleet outlives a test; it must end well and leave nothing behind."""


@pytest.fixture(autouse=True, scope="module")
def socket_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCTL_SOCKET_DIR", str(directory))
        yield directory
    shutil.rmtree(directory)


class Site:
    """Hosts, a fleet on them, and its load.

    Attributes:
        network: the hosts `n1` and `n2` (prefill), `n3` and `n4` (decode), `n5` (no rank), and `n6`, where kvctl runs.
    """

    def __init__(self, network: Network, fleet: NetworkFleet) -> None:
        self.network = network
        self.fleet = fleet
        self.load = Traffic(fleet)
        self._disturbance: Disturbance | None = None

    def until(self, condition: Callable[[], bool], waited_for: str, quiet: bool = False) -> None:
        self.load.until(condition, PATIENCE_S, waited_for, quiet)

    def rate(self, seconds: float) -> float:
        """Runs the load; returns the verified bytes per second, in MB/s."""
        before, began = self.load.accounting.verified_bytes, time.monotonic()
        self.load.run(seconds)
        return (self.load.accounting.verified_bytes - before) / 1e6 / (time.monotonic() - began)

    def disturb(self) -> None:
        """Lets the network explain failures from now on, until `recover`."""
        self._disturbance = Disturbance("network", None, time.monotonic_ns(), codes=EXPLAINED)
        self.load.accounting.disturb(self._disturbance)

    def recover(self) -> float:
        """Heals the network; waits until all pairs serve and nothing is quarantined.

        Returns:
            The seconds until every decode rank had a room that was opened after the healing.
        """
        self.network.heal()
        healed_ns = time.monotonic_ns()
        self.until(lambda: self.served_since(healed_ns), "every decode rank gets a room after the healing")
        served_s = (time.monotonic_ns() - healed_ns) / 1e9
        self.until(lambda: not self.kept(), "no quarantine is left", quiet=True)
        if self._disturbance is not None:
            self._disturbance.until_ns = time.monotonic_ns()
            self._disturbance = None
        return served_s

    def served_since(self, since_ns: int) -> bool:
        rooms = [room for room in self.load.accounting.rooms.values() if room.opened_ns > since_ns and room.succeeded]
        return {room.decode_dp for room in rooms} == {0, 1}

    def kept(self) -> dict[str, int]:
        """Returns the quarantined bytes of the decode ranks that have any."""
        rows = self.fleet.kvctl("metrics", of=self.fleet.of_role("decode"))
        return {row["agent"]: int(row["value"]) for row in rows if row["name"] == _QUARANTINED and row["value"]}

    def failed_since(self, since_ns: int) -> list[LiveRoom]:
        rooms = self.load.accounting.rooms.values()
        return [room for room in rooms if room.failed and room.over and room.opened_ns >= since_ns]

    def findings(self) -> list[object]:
        """Returns wrong bytes, hanging rooms, and failures and deaths that nothing explains."""
        books = self.load.accounting
        failed = [f"room {room.number}: {room.first_cause}" for room in books.unexpected]
        return [*books.corrupt, *books.hung, *failed, *self.load.crashes]

    def states(self) -> dict[tuple[str, str], str]:
        """Returns the state of each peer as each agent sees it, by (agent, peer)."""
        return {(row["agent"], row["peer"]): row["state"] for row in self.fleet.kvctl("peers")}

    def doctor(self, code: str) -> list[dict[str, Any]]:
        """Returns the findings of `kvctl doctor` with this code."""
        return [row for row in self.fleet.kvctl("doctor") if row.get("code") == code]


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Site]:
    """A fleet over the named transport; it must end without wrong bytes, stray writes and unexplained failures."""
    transport, _, options = request.param.partition(" ")
    plan = FleetPlan(
        prefill=(Sizes(tp=2),),
        decode=Sizes(dp=2),
        transport=transport,
        seed=17,
        concurrency=4,
        tokens=(16, 512),
        config=TIMINGS,
    )
    with Network(6) as network, NetworkFleet(plan, network, PLACE, ASKS, ipv6="ipv6" in options) as fleet:
        fleet.start()
        found = Site(network, fleet)
        found.until(lambda: found.served_since(0), "every decode rank gets a first room")
        yield found
        found.load.drain(PATIENCE_S)
        found.until(lambda: not found.kept(), "no quarantine is left", quiet=True)
        usage = fleet.usage(PATIENCE_S, sweep=True)
        assert {name: each["strays"] for name, each in usage.items() if each["strays"]} == {}
        assert found.findings() == []
        assert found.load.accounting.verified_bytes > 0
        assert fleet.close() == {}


@pytest.fixture
def as_before(site: Site) -> Iterator[None]:
    """Heals the network after a test, and checks that the fleet then serves as before and nothing went wrong."""
    found = site.findings()
    site.disturb()
    yield
    served_s = site.recover()
    print(f"served again {served_s:.1f} s after the healing")
    assert [each for each in site.findings() if each not in found] == []
