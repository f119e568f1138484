"""Codes about network devices, on hosts whose /sys is a tree of the test: read, changed by traffic, and read again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvctl.health.codes import nics
from kvctl.health.finding import Finding, Severity
from kvctl_agent.host.nics import HostNics
from tests.kvctl.health.fleets import Fleet, S
from tests.support import host_tree
from tests.support.host_tree import HostTree

GIB = 1 << 30
ALL = [f"mlx5_{number}" for number in range(8)]
CODES = {"KV_NIC_DOWN", "KV_RAIL_IDLE", "KV_LANE_NOT_RDMA", "KV_NUMA_FAR", "KV_GID_UNROUTABLE", "KV_NIC_ERRORS"}
RANKS = {"prefill-0": ("node-1", 0), "prefill-1": ("node-1", 5), "decode-0": ("node-2", 1), "decode-1": ("node-2", 6)}
"""Host and GPU of each rank."""


class Hosts:
    """Two prefill ranks on one host and two decode ranks on another, with a GPU and the rail beside it each.

    Attributes:
        fleet: the answers of the ranks; `read` brings those about network devices up to date.
        trees: /sys of each host.
        changes: fields of the answers to `nics` that a test sets, by rank.
    """

    def __init__(self, root: Path, build: Callable[[Path], HostTree] = host_tree.eight_rails) -> None:
        self.trees = {host: build(root / host) for host in ("node-1", "node-2")}
        self.changes: dict[str, dict[str, Any]] = {name: {} for name in RANKS}
        self.fleet = self._last = Fleet()
        self._readings = itertools.count(1)
        for name, (host, _) in RANKS.items():
            self.fleet.status(name, host=host)
            for row in self.fleet.answers[name]["peers"]:
                row.update(same_host=False, peer_host=RANKS[row["peer"]][0])
            self.fleet.answers[name]["status"]["transport"]["environment"] = []
        self.read()

    def read(self) -> Fleet:
        """Lets all ranks read their hosts; returns the fleet of the reading before."""
        before = self._last
        at_ns = next(self._readings) * S
        readers = {host: HostNics(tree.root) for host, tree in self.trees.items()}
        found = {host: reader.read() for host, reader in readers.items()}
        for name, (host, number) in RANKS.items():
            has_gpus = (self.trees[host].sys / "bus/pci/drivers/nvidia").exists()
            self.fleet.answers[name]["nics"] = {
                "agent": name,
                "host": host,
                "network": "net:[4026531840]",
                "at_ns": at_ns,
                "nics": [{**nic} for nic in found[host]],
                "left_out": 0,
                "segments_sent_total": at_ns // 1000,
                "segments_retransmitted_total": 0,
                "segments_duplicate_total": None,
                "cpu_nodes": sorted(readers[host].nodes()),
                "gpu": host_tree.gpu(number).rpartition("/")[2] if has_gpus else None,
                "lane": {"devices": ALL, "source": "open devices", "protocol": ""},
                "gid_index": None,
                **self.changes[name],
            }
        self._last = self.fleet.copy()
        return before

    def move(self, nbytes: int, over: Mapping[str, str] | None = None) -> None:
        """Lets every rank move bytes through the rail beside its GPU, or through another device."""
        for name, (host, number) in RANKS.items():
            metric = self.fleet._family(name, "kvctl_part_bytes_total")["samples"]
            metric[0]["value"] += nbytes
            device = (over or {}).get(name, f"mlx5_{number}")
            self.trees[host].carry(device, nbytes + nbytes // 50)

    def find(self, before: Fleet | None = None) -> list[Finding]:
        """Returns the findings about network devices."""
        return [each for each in self.fleet.examine(before, 1.0) if each.code in CODES]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def only(findings: list[Finding], code: str, subject: str) -> Finding:
    assert [(each.code, each.subject) for each in findings] == [(code, subject)]
    return findings[0]


def test_busy_hosts_raise_nothing(hosts: Hosts) -> None:
    assert hosts.find() == []
    for _ in range(3):
        hosts.move(GIB)
        hosts.trees["node-1"].set(
            "mlx5_0", np_cnp_sent=12_000, rp_cnp_handled=9_000, req_cqe_error=4, out_of_sequence=90
        )
        hosts.trees["node-1"].carry("eth0", 300 << 20)
        assert hosts.find(hosts.read()) == []


def test_ranks_that_move_nothing_leave_their_rails_idle(hosts: Hosts) -> None:
    hosts.trees["node-1"].carry("mlx5_3", GIB)  # other processes
    assert hosts.find(hosts.read()) == []


def test_older_agents_without_the_answer_raise_nothing(hosts: Hosts) -> None:
    for answers in hosts.fleet.answers.values():
        del answers["nics"]
    assert hosts.find(hosts.fleet.copy()) == []


@pytest.mark.parametrize("broken", [None, [], "x", {"nics": [{"name": 7}, None]}, {"nics": {}, "lane": [], "host": 3}])
def test_answers_that_are_broken_raise_nothing(hosts: Hosts, broken: Any) -> None:
    before = hosts.fleet.copy()
    for answers in hosts.fleet.answers.values():
        answers["nics"] = broken
    assert hosts.find(before) == []


# ---- links -----------------------------------------------------------------------------------------------------


def test_one_rail_of_eight_is_down(hosts: Hosts) -> None:
    hosts.trees["node-1"].set("mlx5_2", state="1: DOWN", rate="10 Gb/sec (4X SDR)", link_downed=1)
    hosts.read()
    found = only(hosts.find(), "KV_NIC_DOWN", "node-1 mlx5_2:1")
    assert found.cause == "port mlx5_2:1 of node-1 is down"
    assert (found.severity, found.evidence["siblings_up"]) == (Severity.WARNING, 7)


def test_a_port_that_no_rank_may_use_is_only_mentioned(hosts: Hosts) -> None:
    for name, (_, number) in RANKS.items():
        hosts.changes[name]["lane"] = {"devices": [f"mlx5_{number}:1"], "source": "settings", "protocol": ""}
    hosts.trees["node-1"].set("mlx5_2", state="1: DOWN")
    hosts.read()
    assert only(hosts.find(), "KV_NIC_DOWN", "node-1 mlx5_2:1").severity is Severity.INFO


def test_a_rank_whose_only_port_is_down_is_named(hosts: Hosts) -> None:
    hosts.changes["prefill-1"]["lane"] = {"devices": ["mlx5_5:1"], "source": "settings", "protocol": ""}
    hosts.trees["node-1"].set("mlx5_5", state="1: DOWN")
    hosts.read()
    found = only(hosts.find(), "KV_NIC_DOWN", "node-1 mlx5_5:1")
    assert found.agents == ("prefill-1",)
    assert found.cause.endswith("used by prefill-1")


def test_ports_without_a_cable_are_no_finding(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    for number in (2, 3, 4, 7):
        hosts.trees["node-1"].set(f"mlx5_{number}", state="1: DOWN")
    hosts.read()
    assert hosts.find() == []


def test_a_rail_slower_than_its_siblings(hosts: Hosts) -> None:
    hosts.trees["node-2"].set("mlx5_4", rate="100 Gb/sec (1X NDR)")
    hosts.read()
    found = only(hosts.find(), "KV_NIC_DOWN", "node-2 mlx5_4:1")
    assert found.cause == "port mlx5_4:1 of node-2 runs at 100 Gbit/s, where its siblings have 400 Gbit/s"


def test_a_bond_that_lost_a_member(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, host_tree.bonded_roce)
    assert hosts.find() == []
    hosts.trees["node-2"].set("ens1f1np1", operstate="down")
    hosts.read()
    assert only(hosts.find(), "KV_NIC_DOWN", "node-2 bond0").cause.startswith("ens1f1np1 of bond0 on node-2 is down")


# ---- bytes -----------------------------------------------------------------------------------------------------


def test_a_rail_carries_nothing_while_its_siblings_do(hosts: Hosts) -> None:
    hosts.move(GIB, {"prefill-0": "mlx5_5"})  # the rail of prefill-1
    found = only(hosts.find(hosts.read()), "KV_RAIL_IDLE", "node-1 mlx5_0:1")
    assert found.agents == ("prefill-0",)
    assert found.cause == (
        "mlx5_0:1 of node-1 carried 0 B of the 1 GiB that prefill-0 moved and that it should carry; "
        "the other ports carried 2.04 GiB"
    )
    assert found.evidence["lane_source"] == ["open devices"]


def test_interfaces_of_two_namespaces_of_a_host_are_two(hosts: Hosts) -> None:
    for name in ("prefill-0", "prefill-1"):
        hosts.changes[name]["network"] = f"net:[{name}]"
    hosts.read()
    lost = hosts.fleet.answers["prefill-1"]["nics"]
    hosts.read()
    after = hosts.fleet.answers["prefill-1"]["nics"]
    next(nic for nic in after["nics"] if nic["name"] == "eth0")["errors"] = {"rx_errors": 5}
    before = hosts.fleet.copy()
    before.answers["prefill-1"]["nics"] = lost
    assert only(hosts.find(before), "KV_NIC_ERRORS", "node-1 eth0").evidence["rx_errors"] == 5


def test_bytes_of_a_rank_that_take_ethernet(hosts: Hosts) -> None:
    over = {"prefill-0": "eth0", "prefill-1": "eth0"}
    hosts.move(GIB, over)
    found = [each for each in hosts.find(hosts.read()) if each.code == "KV_LANE_NOT_RDMA"]
    assert [each.subject for each in found] == ["prefill-0", "prefill-1"]
    assert found[0].evidence["lane_source"] == "counters"
    assert found[0].evidence["rdma_bytes"] == 0
    assert found[0].cause.startswith("bytes of prefill-0 go over TCP, although node-1 has 8 active RDMA ports")


@pytest.mark.parametrize("variable", ["UCX_TLS=tcp", "UCX_TLS=^ib", "UCX_MODULES=^ib"])
def test_tcp_that_the_settings_ask_for_is_no_finding(hosts: Hosts, variable: str) -> None:
    for name in RANKS:
        hosts.fleet.answers[name]["status"]["transport"]["environment"] = [variable]
    hosts.move(GIB, dict.fromkeys(RANKS, "eth0"))
    assert hosts.find(hosts.read()) == []


def test_an_engine_that_says_tcp_where_rdma_was_asked_for(hosts: Hosts) -> None:
    hosts.fleet.answers["prefill-0"]["status"]["transport"] = {"engine": "mooncake", "backend": "rdma", "lanes": []}
    hosts.changes["prefill-0"]["lane"] = {"devices": [], "source": "", "protocol": "tcp"}
    hosts.read()
    found = only(hosts.find(), "KV_LANE_NOT_RDMA", "prefill-0")
    assert found.evidence["lane_source"] == "engine"


def test_peers_on_the_same_host_tell_nothing_about_rails(hosts: Hosts) -> None:
    for name in RANKS:
        for row in hosts.fleet.answers[name]["peers"]:
            row["same_host"] = True
    hosts.move(GIB, dict.fromkeys(RANKS, "eth0"))
    assert hosts.find(hosts.read()) == []


# ---- distance --------------------------------------------------------------------------------------------------


def test_a_gpu_whose_rank_uses_a_port_of_the_other_node(hosts: Hosts) -> None:
    hosts.changes["prefill-0"]["lane"] = {"devices": ["mlx5_7:1"], "source": "settings", "protocol": ""}
    hosts.read()
    found = only(hosts.find(), "KV_NUMA_FAR", "prefill-0")
    assert "mlx5_7:1, which carries the bytes of prefill-0, is on another NUMA node" in found.cause
    assert found.evidence["nearer"] == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"]


def test_a_rank_bound_to_cores_far_from_its_port(hosts: Hosts) -> None:
    lane = {"devices": ["mlx5_7"], "source": "open devices", "protocol": ""}
    hosts.changes["decode-1"].update(gpu=None, lane=lane)
    hosts.read()
    assert hosts.find() == [], "not bound to a node"
    hosts.changes["decode-1"]["cpu_nodes"] = [0]
    hosts.read()
    assert only(hosts.find(), "KV_NUMA_FAR", "decode-1").cause.startswith("decode-1 may run on NUMA node 0 only")
    hosts.changes["decode-1"]["cpu_nodes"] = []
    hosts.read()
    assert hosts.find() == [], "unknown"
    hosts.changes["decode-1"]["cpu_nodes"] = [1]
    hosts.read()
    assert hosts.find() == []


# ---- addresses -------------------------------------------------------------------------------------------------


def test_a_port_without_an_address_has_no_gid_that_routers_forward(hosts: Hosts) -> None:
    for index in (2, 3):
        hosts.trees["node-1"].gid("mlx5_0", index, "0000:0000:0000:0000:0000:0000:0000:0000")
    hosts.read()
    found = only(hosts.find(), "KV_GID_UNROUTABLE", "node-1 mlx5_0:1")
    assert found.agents == ("prefill-0",)
    assert "has only link-local or RoCE v1 addresses" in found.cause
    assert "give rail0 an IP address" in found.remedy


@pytest.mark.parametrize(("index", "count"), [(0, 1), (1, 1), (2, 1), (3, 0), (7, 1)])
def test_the_gid_that_the_settings_choose(hosts: Hosts, index: int, count: int) -> None:
    hosts.changes["prefill-0"]["gid_index"] = index
    hosts.read()
    assert [each.subject for each in hosts.find()] == ["node-1 mlx5_0:1"] * count


def test_a_fleet_in_one_subnet_without_addresses_is_no_finding(hosts: Hosts) -> None:
    for tree in hosts.trees.values():
        for device, index in itertools.product(ALL, (2, 3)):
            tree.gid(device, index, "0000:0000:0000:0000:0000:0000:0000:0000")
    hosts.read()
    assert hosts.find() == []


def test_infiniband_needs_no_such_gid(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, host_tree.infiniband_and_ethernet)
    for name in RANKS:
        hosts.changes[name]["lane"] = {"devices": ["mlx5_0"], "source": "open devices", "protocol": ""}
    hosts.read()
    assert hosts.find() == []


# ---- faults ----------------------------------------------------------------------------------------------------


def test_a_bad_cable(hosts: Hosts) -> None:
    hosts.trees["node-1"].set("mlx5_0", symbol_error=7)
    before = hosts.read()
    assert hosts.find(hosts.read()) == [], "old faults"
    hosts.trees["node-1"].set("mlx5_0", symbol_error=11)
    before = hosts.read()
    found = only(hosts.find(before), "KV_NIC_ERRORS", "node-1 mlx5_0:1")
    assert found.evidence["symbol_error"] == 4
    assert found.agents == ("prefill-0",)


def test_packets_that_are_sent_again_count_if_they_are_many(hosts: Hosts) -> None:
    hosts.move(GIB)
    hosts.trees["node-2"].set("mlx5_1", out_of_sequence=GIB // 4096 // 2000)
    assert hosts.find(hosts.read()) == []
    hosts.move(GIB)
    hosts.trees["node-2"].set("mlx5_1", out_of_sequence=GIB // 4096 // 100)
    found = only(hosts.find(hosts.read()), "KV_NIC_ERRORS", "node-2 mlx5_1:1")
    assert "out_of_sequence grew by" in found.cause


def test_tcp_segments_that_are_lost(hosts: Hosts) -> None:
    for name in ("decode-0", "decode-1"):
        hosts.changes[name].update(segments_sent_total=5_000_000, segments_retransmitted_total=10)
    hosts.read()
    for name in ("decode-0", "decode-1"):
        hosts.changes[name].update(segments_sent_total=5_005_000, segments_retransmitted_total=30)
    assert hosts.find(hosts.read()) == [], "a few are lost everywhere"
    for name in ("decode-0", "decode-1"):
        hosts.changes[name].update(segments_sent_total=5_015_000, segments_retransmitted_total=330)
    found = only(hosts.find(hosts.read()), "KV_NIC_ERRORS", "node-2 tcp")
    assert found.cause == "3 % of the TCP segments of node-2 were lost and sent again (300 of 10000)"
    assert found.agents == ("decode-0", "decode-1")


def test_tcp_segments_that_were_only_late(hosts: Hosts) -> None:
    def counted(sent: int, again: int, duplicate: int) -> None:
        for name in ("decode-0", "decode-1"):
            hosts.changes[name].update(
                segments_sent_total=sent, segments_retransmitted_total=again, segments_duplicate_total=duplicate
            )

    counted(5_000_000, 10, 5)
    hosts.read()
    counted(5_010_000, 310, 304)
    assert hosts.find(hosts.read()) == [], "a busy host acknowledges late, and has them twice"
    counted(5_020_000, 810, 504)
    found = only(hosts.find(hosts.read()), "KV_NIC_ERRORS", "node-2 tcp")
    assert found.evidence == {"segments": 10_000, "retransmitted": 500, "lost": 300, "lost_ratio": 0.03}


def test_tcp_segments_of_hosts_without_remote_peers_are_others(hosts: Hosts) -> None:
    for name in RANKS:
        for row in hosts.fleet.answers[name]["peers"]:
            row["same_host"] = True
    hosts.read()
    for name in RANKS:
        hosts.changes[name].update(segments_sent_total=9_000_000, segments_retransmitted_total=900_000)
    assert hosts.find(hosts.read()) == []


def test_every_code_about_devices_has_a_finding_here() -> None:
    declared = {code.name for code in vars(nics).values() if hasattr(code, "sees")}
    assert declared == CODES
