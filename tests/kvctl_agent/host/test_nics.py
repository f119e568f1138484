"""Network devices, read from trees of /sys (rails with GPUs, a bond, InfiniBand, EFA) and from this host."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from kvctl_agent.contract.snapshots import Nic
from kvctl_agent.host import nics
from kvctl_agent.host.nics import HostNics, distance, read_files
from tests.support import host_tree


def read(root: Path) -> dict[str, Nic]:
    return {nic["name"]: nic for nic in HostNics(root).read()}


def test_a_rail_has_its_speed_its_interface_its_addresses_and_the_gpu_below_its_switch(tmp_path: Path) -> None:
    tree = host_tree.eight_rails(tmp_path)
    tree.set("mlx5_5", port_xmit_data=1_000, port_rcv_data=7, port_xmit_packets=3)
    found = read(tmp_path)
    assert len([nic for nic in found.values() if nic["kind"] == "rdma"]) == 8
    fifth = found["mlx5_5:1"]
    assert (fifth["state"], fifth["link"], fifth["model"], fifth["bits_per_s"]) == (
        "active",
        "RoCE",
        "MT4129",
        400 * 10**9,
    )
    assert (fifth["pci"], fifth["numa_node"], fifth["interfaces"]) == ("0000:63:00.0", 1, ["rail5"])
    assert fifth["sent_bytes_total"] == 4_000, "the kernel counts words of four bytes"
    assert (fifth["received_bytes_total"], fifth["sent_packets_total"]) == (28, 3)
    assert fifth["gpus"]["0000:64:00.0"] == "PIX"
    assert {fifth["gpus"][f"0000:{number}4:00.0"] for number in (5, 7, 8)} == {"NODE"}
    assert {fifth["gpus"][f"0000:{number}4:00.0"] for number in (1, 2, 3, 4)} == {"SYS"}
    assert [(gid["index"], gid["gid"], gid["kind"], gid["interface"]) for gid in fifth["gids"]] == [
        (0, "fe80::a288:c2ff:fe00:6", "RoCE v1", "rail5"),
        (1, "fe80::a288:c2ff:fe00:6", "RoCE v2", "rail5"),
        (2, "::ffff:10.5.1.3", "RoCE v1", "rail5"),
        (3, "::ffff:10.5.1.3", "RoCE v2", "rail5"),
    ]
    assert found["eth0"]["kind"] == "interface"
    assert found["eth0"]["bits_per_s"] == 25 * 10**9


def test_a_rail_that_is_down_keeps_its_row_and_tells_its_faults(tmp_path: Path) -> None:
    tree = host_tree.eight_rails(tmp_path)
    reader = HostNics(tmp_path)
    assert {nic["state"] for nic in reader.read() if nic["kind"] == "rdma"} == {"active"}
    tree.set("mlx5_2", state="1: DOWN", rate="10 Gb/sec (4X SDR)", link_downed=1, out_of_sequence=7, np_cnp_sent=9)
    tree.set("mlx5_2", req_cqe_error=3)  # also counts the ends of connections
    down = next(nic for nic in reader.read() if nic["name"] == "mlx5_2:1")
    assert (down["state"], down["bits_per_s"]) == ("down", 10 * 10**9)
    assert (down["errors"], down["retransmits"], down["congestion"]) == (
        {"link_downed": 1},
        {"out_of_sequence": 7},
        {"np_cnp_sent": 9},
    )


def test_a_bond_has_its_members_and_its_rdma_port_the_bond_as_interface(tmp_path: Path) -> None:
    host_tree.bonded_roce(tmp_path)
    found = read(tmp_path)
    assert (found["bond0"]["model"], found["bond0"]["interfaces"]) == ("bond", ["ens1f0np0", "ens1f1np1"])
    assert found["mlx5_bond_0:1"]["interfaces"] == ["bond0", "ens1f0np0"]
    assert found["mlx5_bond_0:1"]["numa_node"] is None, "firmware that does not tell says -1"
    assert (found["ens1f1np1"]["model"], found["bond0"]["pci"]) == ("mlx5_core", None)


def test_infiniband_beside_ethernet_has_no_roce_addresses(tmp_path: Path) -> None:
    tree = host_tree.infiniband_and_ethernet(tmp_path)
    tree.set("irdma0", ip4OutOctets=100, ip6OutOctets=20, tcpRetransSegs=4)
    found = read(tmp_path)
    assert [found[name]["link"] for name in ("mlx5_0:1", "ib0", "irdma0:1", "eno1")] == [
        "InfiniBand",
        "InfiniBand",
        "RoCE",
        "Ethernet",
    ]
    assert [gid["kind"] for gid in found["mlx5_0:1"]["gids"]] == ["InfiniBand"]
    assert found["irdma0:1"]["gids"] == []
    assert found["irdma0:1"]["model"] == "ice"
    assert found["irdma0:1"]["sent_bytes_total"] == 120
    assert found["irdma0:1"]["retransmits"] == {"tcpRetransSegs": 4}


def test_efa_counts_bytes_under_other_names(tmp_path: Path) -> None:
    tree = host_tree.efa(tmp_path)
    tree.set("rdmap52s0", tx_bytes=11, rx_bytes=22, retrans_pkts=1, rx_drops=5)
    found = read(tmp_path)
    first, second = found["rdmap52s0:1"], found["rdmap62s0:1"]
    assert (first["link"], first["model"], first["bits_per_s"]) == ("EFA", "efa", 100 * 10**9)
    assert (first["sent_bytes_total"], first["received_bytes_total"], first["retransmits"]) == (
        11,
        22,
        {"retrans_pkts": 1},
    )
    assert (first["gpus"], second["gpus"]) == ({"0000:51:00.0": "PHB"}, {"0000:51:00.0": "NODE"})


@pytest.mark.parametrize(
    ("gpu", "same_node", "expected"),
    [
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0", True, "PIX"),
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:15:00.0/0000:16:00.0/0000:17:00.0", True, "PXB"),
        ("pci0000:10/0000:10:02.0/0000:18:00.0", True, "PHB"),
        ("pci0000:20/0000:20:01.0/0000:21:00.0", True, "NODE"),
        ("pci0000:20/0000:20:01.0/0000:21:00.0", False, "SYS"),
    ],
)
def test_distance_in_the_words_of_nvidia_smi(gpu: str, same_node: bool, expected: str) -> None:
    nic = "/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0"
    assert distance(nic, f"/sys/devices/{gpu}", same_node) == expected


def test_a_host_without_sysfs_has_no_devices(tmp_path: Path) -> None:
    reader = HostNics(tmp_path)
    assert (reader.read(), reader.nodes(), reader.left_out) == ([], {}, 0)


def test_too_many_interfaces_are_left_out_virtual_ones_first(tmp_path: Path) -> None:
    tree = host_tree.bonded_roce(tmp_path)
    for number in range(100):
        tree.interface(f"cali{number:03}", mbits=10_000)
    reader = HostNics(tmp_path)
    names = [nic["name"] for nic in reader.read()]
    assert len(names) == 65
    assert reader.left_out == 103 - 64
    assert {"ens1f0np0", "ens1f1np1", "mlx5_bond_0:1"} <= set(names)


def test_a_device_that_is_added_appears_when_devices_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = host_tree.bonded_roce(tmp_path)
    reader = HostNics(tmp_path)
    count = len(reader.read())
    tree.interface("eth9")
    assert len(reader.read()) == count
    later = time.monotonic_ns() + nics._FIND_NS
    monkeypatch.setattr(time, "monotonic_ns", lambda: later)
    assert len(reader.read()) == count + 1


def test_files_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("1\n")
    (tmp_path / "long").write_text("x" * 20_000)
    found = read_files([str(tmp_path / name) for name in ("here", "absent", ".", "long")])
    assert found[:3] == [b"1\n", None, None]
    assert found[3] is not None
    assert len(found[3]) == 16_384


def test_bytes_through_an_interface_of_this_host_are_counted() -> None:
    reader = HostNics()

    def sent() -> int:
        total = next(nic for nic in reader.read() if nic["link"] == "loopback")["sent_bytes_total"]
        assert total is not None
        return total

    before = sent()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), 60)
        peer, _ = server.accept()
        with client, peer:
            for _ in range(16):
                client.sendall(bytes(1 << 16))
                assert peer.recv(1 << 16, socket.MSG_WAITALL)
    assert sent() - before >= 16 << 16


def test_a_device_that_answers_slowly_does_not_keep_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    real = os.read

    def slow(fd: int, size: int) -> bytes:
        clock[0] += 800_000_000
        return real(fd, size)

    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    monkeypatch.setattr(os, "read", slow)
    (tmp_path / "counter").write_text("7")
    assert read_files([str(tmp_path / "counter")] * 5) == [b"7", b"7", None, None, None]
