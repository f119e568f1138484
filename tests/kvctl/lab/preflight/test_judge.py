"""What a preflight makes of its results: slow pairs, lanes, and the health codes about devices."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.clock import ClockOffset
from kvctl.health.lanes import carried_by
from kvctl.lab.preflight.judge import findings, pair_rows
from kvctl.lab.preflight.run import Options, PlannedRank, Results
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.choices import HOST
from kvctl_agent.host.nics import HostNics
from tests.support import host_tree
from tests.support.host_tree import HostTree

GIB = 1 << 30
OPTIONS = Options("nixl", {}, {}, (), ("ssh",), ("python3",), 5.0)
PLACES = {"prefill-0": "n1", "prefill-1": "n2", "decode-0": "n3", "decode-1": "n4"}
RANKS = [
    PlannedRank(name, "prefill" if name.startswith("prefill") else "decode", host, HOST, True)
    for name, host in PLACES.items()
]
PAIRS = [(prefill, decode) for prefill in ("prefill-0", "prefill-1") for decode in ("decode-0", "decode-1")]


class Fleet:
    """Results of four ranks on four hosts, whose /sys are trees of the test.

    Attributes:
        results: those of a fleet in which every pair has moved a GiB through the first rail of its host.
    """

    def __init__(self, root: Path) -> None:
        self.trees: dict[str, HostTree] = {host: host_tree.eight_rails(root / host) for host in PLACES.values()}
        self.results = Results()
        for name, host in PLACES.items():
            self.results.begun[name] = self.begun(host)
            self.results.clocks[name] = ClockOffset(20_000, 100_000)
        for ends in ((one, other) for one in PLACES.values() for other in PLACES.values() if one != other):
            self.results.links[ends] = [{"port": 7000, "state": "ok", "error": "", "rtt_ns": 50_000, "mtu": 9000}]
        for pair in PAIRS:
            self.write(pair, "mlx5_0")
        self.finish()

    def begun(self, host: str) -> dict[str, Any]:
        return {
            **{"version": VERSION, "host": host, "pid": 1, "processes": host, "address": host},
            **{"ports": [7000], "ports_refused": {}, "facts": [], "devices": self.devices(host)},
            "transport": {"backend": "UCX", "environment": []},
        }

    def devices(self, host: str) -> dict[str, Any]:
        reader = HostNics(self.trees[host].root)
        lane = {"devices": ["mlx5_0:1"], "source": "settings", "protocol": ""}
        return {
            **{"host": host, "network": "net:[1]", "nics": reader.read(), "left_out": 0, "cpu_nodes": [0]},
            **{"segments_sent_total": 0, "segments_retransmitted_total": 0, "segments_duplicate_total": 0},
            **{"gpu": None, "lane": lane, "gid_index": None},
        }

    def write(self, pair: tuple[str, str], device: str, gb_per_s: float = 20.0, **more: Any) -> None:
        before = HostNics(self.trees[PLACES[pair[0]]].root).read()
        for name in pair:
            self.trees[PLACES[name]].carry(device, GIB)
        self.results.writes[pair] = {
            **{"error": "", "wrong_bytes": False, "gb_per_s": gb_per_s, "latency_ns": 5_000},
            **{"first_ns": 1_000_000, "moved_bytes": GIB, "before": before},
            **{"after": HostNics(self.trees[PLACES[pair[0]]].root).read(), **more},
        }

    def finish(self) -> None:
        self.results.devices = {name: self.devices(host) for name, host in PLACES.items()}

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(row["prefill"], row["decode"]): row for row in pair_rows(RANKS, PAIRS, self.results)}

    def found(self) -> list[tuple[str, str]]:
        return [
            (each.code, each.subject) for each in findings(RANKS, list(self.rows().values()), self.results, OPTIONS)
        ]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def fleet(measured: Fleet) -> Fleet:
    """A fleet with results of its own; its counters only grow, and results have their differences."""
    own = copy.copy(measured)
    own.results = copy.deepcopy(measured.results)
    return own


def test_equal_pairs_are_ok_and_their_rail_is_known_from_its_counters(fleet: Fleet) -> None:
    assert fleet.found() == []
    for row in fleet.rows().values():
        assert (row["verdict"], row["lane"], row["lane_source"]) == ("ok", "rdma", "counters")
        assert row["carried"] == {"mlx5_0:1": GIB}
        assert row["mtu"] == 9000


def test_a_slow_pair_is_compared_with_the_others(fleet: Fleet) -> None:
    fleet.write(("prefill-0", "decode-1"), "mlx5_0", gb_per_s=2.0)
    assert ("KV_LANE_SLOW", "n1 → n4") in fleet.found()
    for pair in PAIRS:  # all are as slow
        fleet.write(pair, "mlx5_0", gb_per_s=1.5)
    assert {row["verdict"] for row in fleet.rows().values()} == {"ok"}


def test_pairs_with_a_slow_host_are_one_finding(fleet: Fleet) -> None:
    for prefill in ("prefill-0", "prefill-1"):
        fleet.write((prefill, "decode-1"), "mlx5_0", gb_per_s=1.0)
    assert fleet.found() == [("KV_LANE_SLOW", "n1 and n2 → n4")] or ("KV_LANE_SLOW", "n1, n2 → n4") in fleet.found()


def test_a_late_pair_is_odd_however_fast_it_is(fleet: Fleet) -> None:
    fleet.write(("prefill-0", "decode-0"), "mlx5_0", latency_ns=50_000_000)
    row = fleet.rows()["prefill-0", "decode-0"]
    assert (row["verdict"], row["problem"]) == ("warning", "a small write takes 50 ms, elsewhere 5 µs")


def test_wrong_bytes_and_writes_that_do_not_end_are_critical(fleet: Fleet) -> None:
    fleet.write(("prefill-0", "decode-0"), "mlx5_0", wrong_bytes=True)
    fleet.write(("prefill-1", "decode-1"), "mlx5_0", error="a write of 64 bytes to decode-1 was not complete after 5 s")
    assert fleet.found() == [("KV_DATA_BLOCKED", "n2 → n4"), ("KV_CHECKSUM_MISMATCH", "prefill-0 → decode-0")]
    assert [fleet.rows()[pair]["verdict"] for pair in PAIRS] == ["critical", "ok", "ok", "critical"]


def test_a_writer_that_hangs_is_named_with_its_pair_only(fleet: Fleet) -> None:
    text = "prefill-0: it has not finished writing to its peer within 30 s"
    fleet.results.failed["prefill-0"] = text
    fleet.results.writes["prefill-0", "decode-0"] = {"error": text, "overdue": True, "wrong_bytes": False}
    del fleet.results.writes["prefill-0", "decode-1"]
    assert fleet.found() == [("KV_DATA_BLOCKED", "n1 → n3")]
    assert fleet.rows()["prefill-0", "decode-1"]["verdict"] == "critical"


@pytest.mark.parametrize(
    ("device", "code", "lane", "carried"),
    [("eth0", "KV_LANE_NOT_RDMA", "tcp", "eth0"), ("mlx5_3", "KV_RAIL_IDLE", "rdma", "mlx5_3:1")],
)
def test_bytes_that_take_another_device_than_the_rail_are_named(
    tmp_path: Path, device: str, code: str, lane: str, carried: str
) -> None:
    fleet = Fleet(tmp_path)
    for name, host in PLACES.items():
        fleet.results.begun[name] = fleet.begun(host)
    for pair in PAIRS:
        fleet.write(pair, device)
    fleet.finish()
    assert {each for each, _ in fleet.found()} == {code}
    row = fleet.rows()[PAIRS[0]]
    assert (row["lane"], row["carried"]) == (lane, {carried: GIB})


def test_a_clock_that_is_off_is_named(fleet: Fleet) -> None:
    fleet.results.clocks["decode-1"] = ClockOffset(10_000_000_000, 100_000)
    (found,) = fleet.found()
    assert found[0] == "KV_CLOCK_SKEW"
    assert "n4" in found[1]


def test_a_rank_that_did_not_start_and_an_older_kvctl_are_named_with_the_host(fleet: Fleet) -> None:
    fleet.results.failed["prefill-0"] = "its process has ended with exit code 255: Permission denied (publickey)."
    del fleet.results.writes["prefill-0", "decode-0"], fleet.results.writes["prefill-0", "decode-1"]
    fleet.results.begun["decode-0"]["version"] = "0.0.1"
    assert fleet.found() == [("KV_NOT_READY", "n1"), ("KV_COMPAT_MISMATCH", "n3")]
    assert fleet.rows()["prefill-0", "decode-0"]["problem"].endswith("Permission denied (publickey).")


@pytest.mark.parametrize(
    ("state", "code", "subject"),
    [
        ("no answer", "KV_PEER_LOST", "n1 → n3"),
        ("refused", "KV_PEER_LOST", "n1 → n3"),
        ("unresolved", "KV_PEER_LOST", "n1 → n3"),
        ("large lost", "KV_DATA_BLOCKED", "n1 → n3"),
    ],
)
def test_links_that_fail_are_named_with_their_direction(fleet: Fleet, state: str, code: str, subject: str) -> None:
    fleet.results.links["n1", "n3"] = [{"port": 7000, "state": state, "error": "it fails", "rtt_ns": None, "mtu": 1500}]
    assert fleet.found() == [(code, subject)]


@pytest.mark.parametrize("ports", [(), (7000,)])
@pytest.mark.parametrize("back", ["ok", "refused", "no answer"])
def test_both_directions_of_a_link_are_judged(fleet: Fleet, ports: tuple[int, ...], back: str) -> None:
    for ends, state, port in ((("n1", "n3"), "no answer", 7000), (("n3", "n1"), back, 7000 if ports else 40001)):
        link = {"port": port, "state": state, "error": "it fails" if state != "ok" else "", "rtt_ns": None, "mtu": None}
        fleet.results.links[ends] = [link]
    found = findings(RANKS, list(fleet.rows().values()), fleet.results, replace(OPTIONS, ports=ports))
    subjects = {"ok": {"n1 → n3"}, "refused": {"n1 → n3", "n3 → n1"}, "no answer": {"n3 ↔ n1"}}[back]
    assert {each.subject for each in found} == subjects
    assert len(found) == len(subjects)
    for each in found:
        assert each.remedy.startswith("`ssh n")


def test_the_remedy_for_a_rank_tries_its_login(fleet: Fleet) -> None:
    fleet.results.failed["prefill-0"] = "its process has ended"
    options = replace(OPTIONS, ssh=("ssh", "-o", "ProxyCommand=nc %h"), python=("/venv/bin/python",))
    (found, *_) = findings(RANKS, list(fleet.rows().values()), fleet.results, options)
    assert "`ssh -o 'ProxyCommand=nc %h' n1 /venv/bin/python -m kvctl doctor --host-only`" in found.remedy


def test_a_host_that_nobody_reaches_is_one_finding(fleet: Fleet) -> None:
    for ends in fleet.results.links:
        if "n3" in ends:
            lost = {"port": 7000, "state": "no answer", "error": "it fails", "rtt_ns": None, "mtu": None}
            fleet.results.links[ends] = [lost]
    assert fleet.found() == [("KV_PEER_LOST", "n3 ↔ n1, n2 and n4")]


def test_devices_that_carried_little_are_not_the_lane(fleet: Fleet) -> None:
    nics = HostNics(fleet.trees["n1"].root)
    before = nics.read()
    fleet.trees["n1"].carry("mlx5_1", GIB // 4)
    assert carried_by(before, HostNics(fleet.trees["n1"].root).read(), GIB) == ("", {})


def test_a_check_that_fails_names_its_hosts(fleet: Fleet) -> None:
    fact = {"topic": "locked memory", "found": "64 KiB", "means": "RDMA fails", "code": ""}
    for name in ("decode-0", "decode-1"):
        fleet.results.begun[name]["facts"] = [{**fact, "severity": 2, "remedy": "start with `ulimit -l unlimited`"}]
    (found,) = findings(RANKS, list(fleet.rows().values()), fleet.results, OPTIONS)
    assert (found.subject, found.evidence) == ("n3 and n4: locked memory", {"hosts": "n3 and n4"})
