"""The admin command `nics`: devices that the rank uses and where that is known from, and routes of the kernel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent.observer import nics
from kvctl_agent.observer.documents import Identity
from kvctl_agent.observer.nics import HostReading, NicQuery, interface, interfaces, lane
from kvctl_agent.observer.process_facts import process_facts
from kvctl_agent.telemetry.region import Header
from tests.network.hosts import missing
from tests.support import host_tree

AMONG_EIGHT = [f"mlx5_{number}" for number in range(8)]


def query(root: Path | None = None, gpu: str | None = None) -> NicQuery:
    identity = Identity(host="node-3", gpu_pci=gpu, transport={"engine": "nixl"})
    header = Header.of_this_process("decode", "decode-0")
    return NicQuery(header, lambda: identity, lambda: [], lambda: process_facts(header), root and HostReading(root))


@pytest.mark.parametrize(
    ("transport", "opened", "environment", "expected"),
    [
        ({"protocol": "rdma", "devices": ["mlx5_3"]}, AMONG_EIGHT, {}, (["mlx5_3"], "engine", "rdma")),
        ({}, ["mlx5_3"], {}, (["mlx5_3"], "open devices", "")),
        ({}, ["mlx5_3"], {"UCX_NET_DEVICES": "mlx5_3:1,eth0"}, (["mlx5_3:1"], "open devices", "")),
        ({}, AMONG_EIGHT, {"UCX_NET_DEVICES": "mlx5_3:1"}, (["mlx5_3:1"], "open devices", "")),  # the others: NCCL
        ({"backend": "LIBFABRIC"}, ["rdmap0s6"], {"UCX_NET_DEVICES": "mlx5_3:1"}, (["rdmap0s6"], "open devices", "")),
        ({}, AMONG_EIGHT, {"UCX_NET_DEVICES": "eth0"}, (["eth0"], "settings", "")),
        ({}, [], {"UCX_NET_DEVICES": "mlx5_3:1, eth0"}, (["mlx5_3:1", "eth0"], "settings", "")),
        ({}, [], {"UCX_NET_DEVICES": "all"}, (["eth0"], "route", "")),
        ({}, [], {"UCX_NET_DEVICES": "^mlx5_0"}, (["eth0"], "route", "")),
        ({"protocol": "tcp", "devices": []}, AMONG_EIGHT, {"UCX_NET_DEVICES": "mlx5_1:1"}, (["eth0"], "route", "tcp")),
    ],
    ids=[
        "engine",
        "open",
        "open with port",
        "open by others",
        "open, by libfabric",
        "an interface",
        "settings",
        "all",
        "exclusion",
        "the engine says tcp",
    ],
)
def test_the_best_source_tells_the_devices(
    transport: dict[str, Any], opened: list[str], environment: dict[str, str], expected: tuple[list[str], str, str]
) -> None:
    found = lane(transport, opened, environment, ["eth0"])
    assert (found["devices"], found["source"], found["protocol"]) == expected


def test_nothing_known_is_nothing() -> None:
    assert lane({}, [], {}, []) == {"devices": [], "source": "", "protocol": ""}


def test_an_open_device_is_recognised_by_its_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host_tree.eight_rails(tmp_path)
    real = os.readlink
    verbs = tmp_path / "verbs"
    verbs.touch()
    with verbs.open() as file:
        own = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        monkeypatch.setattr(os, "readlink", lambda path: "/dev/infiniband/uverbs5" if str(path) == own else real(path))
        answer = query(tmp_path, gpu="0000:64:00.0")()
    assert answer["lane"] == {"devices": ["mlx5_5"], "source": "open devices", "protocol": ""}
    assert answer["gpu"] == "0000:64:00.0"
    assert answer["cpu_nodes"] == [0], "the cores of this machine have the numbers of node 0 of the tree"


def test_a_reading_is_kept_for_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = host_tree.eight_rails(tmp_path)
    ask = query(tmp_path)
    first = ask()
    tree.set("mlx5_0", port_xmit_data=25)
    assert ask() is first
    later = time.monotonic_ns() + nics._KEPT_NS
    monkeypatch.setattr(time, "monotonic_ns", lambda: later)
    second = ask()
    assert second["at_ns"] > first["at_ns"]
    assert next(nic for nic in second["nics"] if nic["name"] == "mlx5_0:1")["sent_bytes_total"] == 100


def test_a_fresh_reading_is_50_ms_old_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = host_tree.eight_rails(tmp_path)
    ask, now = query(tmp_path), time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    first = ask()
    tree.set("mlx5_0", port_xmit_data=25)
    now += nics._FRESH_NS - 1
    assert ask(fresh=True) is first, "who asks again and again costs 20 readings a second"
    now += 1
    assert ask() is first
    second = ask(fresh=True)
    assert next(nic for nic in second["nics"] if nic["name"] == "mlx5_0:1")["sent_bytes_total"] == 100
    assert ask() is second


def test_tcp_segments_of_this_host_are_counted() -> None:
    answer = query()()
    assert answer["segments_sent_total"] is not None
    assert answer["segments_sent_total"] > 0
    assert answer["segments_retransmitted_total"] is not None
    assert answer["segments_duplicate_total"] is not None
    assert answer["network"].startswith("net:[")


def test_the_kernel_tells_the_interface_to_a_peer() -> None:
    endpoints = {"prefill-0": "tcp://127.0.0.1:5000", "prefill-1": "tcp://[::1]:5000", "prefill-2": "ipc:///tmp/x"}
    rows: Any = [{"peer": name, "endpoint": endpoint} for name, endpoint in endpoints.items()]
    assert interfaces(rows) == ["lo"]
    assert interfaces(rows[2:]) == []


def test_a_name_has_no_route() -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        assert interface(kernel, "node-3.example") == ""


NETWORK = """
import socket, subprocess
for command in (
    "link add rail0 type veth peer name far", "link set rail0 up", "link set far up",
    "addr add 10.9.0.1/24 dev rail0", "route add 10.10.0.0/16 via 10.9.0.254",
):
    subprocess.run(["ip", *command.split()], check=True)
from kvctl_agent.observer.documents import Identity
from kvctl_agent.observer.nics import interface
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
    print([interface(kernel, address) for address in ("10.9.0.7", "10.10.3.4", "192.0.2.1")])
"""


@pytest.mark.skipif(bool(missing()), reason=f"no network namespaces: {missing()}")
def test_a_peer_behind_a_router_has_the_interface_to_the_router() -> None:
    command = ["unshare", "--net", sys.executable, "-c", NETWORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "['rail0', 'rail0', '']", done.stderr
