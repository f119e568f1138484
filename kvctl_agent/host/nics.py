"""Reads the network devices of a host from /sys: RDMA ports and network interfaces, their counters, GPUs near them."""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvctl_agent.contract.snapshots import Gid, Nic

ReadFiles = Callable[[Sequence[str]], list[bytes | None]]
"""Reads the starts of files; None for a file that cannot be read."""

ERRORS = frozenset(
    {
        "symbol_error",
        "link_error_recovery",
        "link_downed",
        "port_rcv_errors",
        "port_rcv_remote_physical_errors",
        "port_xmit_discards",
        "local_link_integrity_errors",
        "excessive_buffer_overrun_errors",
        "rx_icrc_encapsulated",
        "unresponsive_remote_events",  # EFA
        "rx_errors",
        "tx_errors",
    }
)
"""Counters that grow only with a fault of a cable, a port or a device. Not among them: those that also grow when a
connection is closed, such as req_cqe_error."""
RETRANSMITS = frozenset(
    {
        "out_of_sequence",
        "packet_seq_err",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "rnr_nak_retry_err",
        "roce_adp_retrans",
        "tcpRetransSegs",  # irdma, which counts RoCE under this name, too
        "to_retransmits",  # bnxt_re
        "seq_err_naks_rcvd",
        "retrans_pkts",  # EFA
        "retrans_timeout_events",
    }
)
"""Counters of packets that were lost and sent again."""
CONGESTION = frozenset(
    {
        "np_cnp_sent",
        "np_ecn_marked_roce_packets",
        "rp_cnp_handled",
        "port_xmit_wait",
        "cnpSent",
        "cnpHandled",
        "RxECNMrkd",
        "rx_dropped",
        "tx_dropped",
        "rx_missed_errors",
    }
)
"""Counters that grow in a busy network without a fault."""

PORT_XMIT_BYTES = 4  # InfiniBand counts data in words
_SENT = {"port_xmit_data": PORT_XMIT_BYTES, "tx_bytes": 1, "ip4OutOctets": 1, "ip6OutOctets": 1}
_RECEIVED = {"port_rcv_data": PORT_XMIT_BYTES, "rx_bytes": 1, "ip4InOctets": 1, "ip6InOctets": 1}
_PACKETS = {"port_xmit_packets": 1, "tx_pkts": 1, "tx_packets": 1, "ip4OutPkts": 1, "ip6OutPkts": 1}
_COUNTERS = frozenset({*ERRORS, *RETRANSMITS, *CONGESTION, *_SENT, *_RECEIVED, *_PACKETS})

_FIND_NS = 60_000_000_000
_LONGEST_NS = 1_000_000_000
_MOST = 64
_MOST_GIDS = 32
_FILE_BYTES = 16384  # /proc/net/netstat is longer than a page
_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GPU_DRIVERS = ("nvidia", "amdgpu")


def read_files(paths: Sequence[str]) -> list[bytes | None]:
    """Reads the first 16 KiB of each file; after a second none of those that are left.

    The 244 files of a host with eight cards take 2.2 ms of CPU time, and as long beside a thread that runs Python: the
    kernel answers before that thread takes the GIL. Of counters that a driver asks its device for (100 µs), each read
    loses the GIL to such a thread for 5 ms: 80 of them take 0.5 s. A faulty device takes seconds for one.
    """
    until = time.monotonic_ns() + _LONGEST_NS
    found: list[bytes | None] = []
    for path in paths:
        if time.monotonic_ns() > until:
            found.append(None)
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            found.append(None)
            continue
        try:
            found.append(os.read(fd, _FILE_BYTES))
        except OSError:  # counters of a port that is down, GIDs that are not set
            found.append(None)
        finally:
            os.close(fd)
    return found


@dataclass(frozen=True, slots=True)
class _Found:
    """A device: the row without what changes, and the files of what does, by name."""

    row: Nic
    files: Mapping[str, str]


class HostNics:
    """The network devices of a host. Looks for devices at most once a minute, and reads state and counters each time.

    Args:
        root: directory that contains `sys`.
        read: reads files.
    """

    def __init__(self, root: Path = Path("/"), read: ReadFiles = read_files) -> None:
        self._sys = os.path.join(root, "sys")  # noqa: PTH118 - hundreds of paths, which Path makes slowly
        self._read_files = read
        self._found: list[_Found] = []
        self._due_ns = 0
        self.left_out = 0
        """Devices that the last `read` did not return, because there are more than 64."""

    def read(self) -> list[Nic]:
        """Returns the RDMA ports, then the network interfaces, both by name."""
        now = time.monotonic_ns()
        if now >= self._due_ns:
            self._found, self._due_ns = self._find(), now + _FIND_NS
        paths = [path for device in self._found for path in device.files.values()]
        values = iter(self._texts(paths))
        return [_filled(device, {name: next(values) for name in device.files}) for device in self._found]

    def nodes(self) -> dict[int, frozenset[int]]:
        """Returns the cores of each NUMA node; {} if the kernel does not tell."""
        folder = f"{self._sys}/devices/system/node"
        names = [name for name in _names(folder) if name.startswith("node") and name[4:].isdecimal()]
        lists = self._texts([f"{folder}/{name}/cpulist" for name in names])
        return {int(name[4:]): _cores(text) for name, text in zip(names, lists, strict=True)}

    def device_of(self, verbs: str) -> str:
        """Returns the RDMA device of a file of /dev/infiniband, such as `uverbs0`; "" if there is none."""
        return self._texts([f"{self._sys}/class/infiniband_verbs/{verbs}/ibdev"])[0]

    # ---- devices ----------------------------------------------------------------------------------------------

    def _find(self) -> list[_Found]:
        gpus = {
            name: path
            for driver in _GPU_DRIVERS
            for name in _names(f"{self._sys}/bus/pci/drivers/{driver}")
            if _PCI.fullmatch(name) and (path := self._device(f"{self._sys}/bus/pci/devices/{name}"))
        }
        nodes = dict(zip(gpus, map(_node, self._texts([f"{path}/numa_node" for path in gpus.values()])), strict=True))
        ports = [
            (device, port)
            for device in _names(f"{self._sys}/class/infiniband")
            for port in _names(f"{self._sys}/class/infiniband/{device}/ports")
        ]
        # Virtual interfaces without traffic, such as those of container runtimes, would only hide the others.
        interfaces = sorted(
            _names(f"{self._sys}/class/net"),
            key=lambda name: not self._device(f"{self._sys}/class/net/{name}/device"),
        )
        self.left_out = max(0, len(ports) - _MOST) + max(0, len(interfaces) - _MOST)
        found = [self._port(device, port) for device, port in ports[:_MOST]]
        found += sorted(map(self._interface, interfaces[:_MOST]), key=lambda each: each.row["name"])
        for each in found:
            own = self._device(f"{self._sys}/bus/pci/devices/{each.row['pci']}") if each.row["pci"] else ""
            if own and each.row["kind"] == "rdma":
                each.row["gpus"] = {
                    gpu: distance(own, path, each.row["numa_node"] is not None and each.row["numa_node"] == nodes[gpu])
                    for gpu, path in gpus.items()
                }
        return found

    def _port(self, device: str, port: str) -> _Found:
        base = f"{self._sys}/class/infiniband/{device}"
        own = f"{base}/ports/{port}"
        model, driver, layer, node = self._texts(
            [f"{base}/hca_type", f"{base}/device/uevent", f"{own}/link_layer", f"{base}/device/numa_node"]
        )
        gids = self._gids(own)
        listed = [*_names(f"{base}/device/net"), *(gid["interface"] for gid in gids)]
        row = _row(
            f"{device}:{port}",
            "rdma",
            {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}.get(layer, "EFA" if _driver(driver) == "efa" else "RDMA"),
            model or _driver(driver),
            self._device(f"{base}/device"),
            _node(node),
        )
        row["gids"], row["interfaces"] = gids, sorted({name for name in listed if name})
        counters = {
            name: f"{own}/{folder}/{name}"
            for folder in ("counters", "hw_counters")
            for name in _names(f"{own}/{folder}")
            if name in _COUNTERS
        }
        return _Found(row, {"state": f"{own}/state", "rate": f"{own}/rate", **counters})

    def _gids(self, port: str) -> list[Gid]:
        indices = range(min(_MOST_GIDS, len(_names(f"{port}/gids"))))
        texts = self._texts(
            [f"{port}/{file}/{index}" for index in indices for file in ("gids", "gid_attrs/types", "gid_attrs/ndevs")]
        )
        found: list[Gid] = []
        for index in indices:
            gid, kind, interface = texts[3 * index : 3 * index + 3]
            address = _address(gid)
            if address:
                kind = {"IB/RoCE v1": "RoCE v1" if interface else "InfiniBand"}.get(kind, kind)
                found.append({"index": index, "gid": address, "kind": kind, "interface": interface})
        return found

    def _interface(self, name: str) -> _Found:
        base = f"{self._sys}/class/net/{name}"
        kind, driver, node = self._texts([f"{base}/type", f"{base}/device/uevent", f"{base}/device/numa_node"])
        link = {"32": "InfiniBand", "772": "loopback"}.get(kind, "Ethernet")
        members = self._texts([f"{base}/bonding/slaves"])[0].split()
        row = _row(
            name, "interface", link, "bond" if members else _driver(driver), self._device(f"{base}/device"), _node(node)
        )
        row["interfaces"] = sorted(members)
        counters = {each: f"{base}/statistics/{each}" for each in _names(f"{base}/statistics") if each in _COUNTERS}
        return _Found(row, {"state": f"{base}/operstate", "speed": f"{base}/speed", "mtu": f"{base}/mtu", **counters})

    def _device(self, link: str) -> str:
        """Returns the path of a device below /sys/devices; "" if there is none."""
        path = os.path.realpath(link)
        return path if path != link and path.startswith(f"{os.path.realpath(self._sys)}/devices/") else ""

    def _texts(self, paths: Sequence[str]) -> list[str]:
        return ["" if raw is None else raw.decode(errors="replace").strip() for raw in self._read_files(paths)]


def distance(nic: str, gpu: str, same_node: bool) -> str:
    """Returns what lies between two PCI devices, in the words of `nvidia-smi topo -m`.

    Args:
        nic, gpu: paths of the devices below /sys/devices.
        same_node: whether both are on one NUMA node.

    Returns:
        PIX: at most one PCIe switch; PXB: several; PHB: the host bridge; NODE: several host bridges of one NUMA node;
        SYS: the interconnect between NUMA nodes, also if these are unknown.
    """
    one, other = (
        [part for part in path.split("/") if _PCI.fullmatch(part) or part.startswith("pci")] for path in (nic, gpu)
    )
    common = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if common == 0:
        return "NODE" if same_node else "SYS"
    if common == 1:
        return "PHB"
    # Below a switch, a device has its downstream port before it.
    return "PIX" if max(len(one), len(other)) - common <= 2 else "PXB"


def _row(name: str, kind: Literal["rdma", "interface"], link: str, model: str, device: str, node: int | None) -> Nic:
    addresses = _PCI.findall(device)
    return {
        "name": name,
        "kind": kind,
        "link": link,
        "model": model,
        "state": "",
        "bits_per_s": None,
        "mtu": None,
        "pci": addresses[-1] if addresses else None,
        "numa_node": node,
        "interfaces": [],
        "gids": [],
        "gpus": {},
        "sent_bytes_total": None,
        "received_bytes_total": None,
        "sent_packets_total": None,
        "errors": {},
        "retransmits": {},
        "congestion": {},
    }


def _filled(device: _Found, texts: Mapping[str, str]) -> Nic:
    counters = {name: int(text) for name, text in texts.items() if name in _COUNTERS and text.isdecimal()}
    return {
        **device.row,
        "state": texts["state"].rpartition(" ")[2].lower(),
        "bits_per_s": _gigabits(texts["rate"]) if "rate" in texts else _megabits(texts["speed"]),
        "mtu": _positive(texts.get("mtu", "")),
        "sent_bytes_total": _sum(counters, _SENT),
        "received_bytes_total": _sum(counters, _RECEIVED),
        "sent_packets_total": _sum(counters, _PACKETS),
        "errors": _chosen(counters, ERRORS),
        "retransmits": _chosen(counters, RETRANSMITS),
        "congestion": _chosen(counters, CONGESTION),
    }


def _chosen(counters: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    return {name: counters[name] for name in sorted(names) if counters.get(name)}


def _sum(counters: Mapping[str, int], factors: Mapping[str, int]) -> int | None:
    """Returns the first of these counters; the sum of those of IPv4 and IPv6; None if the device has none of them."""
    present = [name for name in factors if name in counters]
    used = [name for name in present if name.startswith("ip")] or present[:1]
    return sum(counters[name] * factors[name] for name in used) if used else None


def _gigabits(text: str) -> int | None:
    """Converts the rate of an RDMA port, such as `400 Gb/sec (4X NDR)`, to bits per second."""
    found = re.match(r"\d+(?:\.\d+)?", text)
    return round(float(found[0]) * 1e9) if found else None


def _megabits(text: str) -> int | None:
    """Converts the speed of an interface to bits per second; None for -1, which drivers use for unknown."""
    value = _positive(text)
    return None if value is None else value * 1_000_000


def _positive(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) else None


def _node(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # -1: the machine has one node, or its firmware does not tell


def _driver(uevent: str) -> str:
    return next((line.partition("=")[2] for line in uevent.splitlines() if line.startswith("DRIVER=")), "")


def _address(gid: str) -> str:
    """Returns a GID in the short form of IPv6 addresses, with the IPv4 address that it may contain; "" if not set."""
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return ""
    # The table of InfiniBand and RoCE has entries that are not in use: all zeros, or a prefix without an interface.
    if not int(address) & (1 << 64) - 1:
        return ""
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def _cores(text: str) -> frozenset[int]:
    """Returns the numbers in a list such as `0-3,8`."""
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdecimal() and (high or low).isdecimal():
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths
    except OSError:
        return []
