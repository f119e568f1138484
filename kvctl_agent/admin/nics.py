"""Answers the admin command `nics`: the network devices of the host, and those through which this rank's bytes go."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvctl_agent.admin.observed_rank import ObservedRank
from kvctl_agent.contract.addresses import host_of
from kvctl_agent.contract.nics import HostNics, ReadFiles, read_files
from kvctl_agent.contract.snapshots import Lane, Nics, PeerRow, Route

_KEPT_NS = 1_000_000_000
_SLOW_NS = 60_000_000_000
_MOST_ROUTES = 64
_GID_SETTINGS = ("UCX_IB_GID_INDEX", "MC_GID_INDEX")


class NicQuery:
    """Reads the network devices of this host for one rank, on the admin thread and only when asked.

    A reading is kept for a second, whoever asks. Open devices and routes, which seldom change and need a system call
    for each descriptor and each peer, are kept for a minute.

    Args:
        rank: the rank.
        root: directory that contains `sys` and `proc`.
        read: reads files.
    """

    def __init__(self, rank: ObservedRank, root: Path = Path("/"), read: ReadFiles = read_files) -> None:
        self._rank = rank
        self._root = root
        self._read = read
        self._host = HostNics(root, read)
        self._answer: Nics | None = None
        self._due_ns = 0
        self._open: list[str] = []
        self._routes: list[Route] = []
        self._slow_due_ns = 0

    def __call__(self) -> Nics:
        now = time.monotonic_ns()
        if self._answer is None or now >= self._due_ns:
            self._answer, self._due_ns = self._ask(now), now + _KEPT_NS
        return self._answer

    def _ask(self, now: int) -> Nics:
        nics = self._host.read()
        tcp = _tcp_counters(self._read([str(self._root / "proc/net" / name) for name in ("snmp", "netstat")]))
        if now >= self._slow_due_ns:
            self._open = self._open_devices() if any(nic["kind"] == "rdma" for nic in nics) else []
            self._routes = routes(self._rank.peers())
            self._slow_due_ns = now + _SLOW_NS
        transport = self._rank.describe()["transport"]
        nodes, gpu = self._host.nodes(), self._rank.gpu_pci
        cores = os.sched_getaffinity(os.getpid())
        return {
            "agent": self._rank.name,
            "host": self._rank.host,
            "network": _link("/proc/self/ns/net"),
            "at_ns": now,
            "read_ns": time.monotonic_ns() - now,
            "nics": nics,
            "left_out": self._host.left_out,
            "segments_sent_total": tcp.get("OutSegs"),
            "segments_retransmitted_total": tcp.get("RetransSegs"),
            "segments_duplicate_total": tcp.get("TCPDSACKRecvSegs"),
            "numa_nodes": len(nodes),
            "cpu_nodes": sorted(node for node, own in nodes.items() if own & cores),
            "gpu": gpu,
            "gpu_node": None if gpu is None else self._host.gpu_node(gpu),
            "lane": lane(transport, self._open, os.environ, self._routes),
            "gid_index": next(
                (int(value) for name in _GID_SETTINGS if (value := os.environ.get(name, "")).isdecimal()), None
            ),
            "routes": self._routes,
        }

    def _open_devices(self) -> list[str]:
        """Returns the RDMA devices that this process has open, by the targets of its descriptors."""
        targets = {_link(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}  # noqa: PTH208 - names
        verbs = {Path(target).name for target in targets if target.startswith("/dev/infiniband/uverbs")}
        return sorted({device for each in verbs if (device := self._host.device_of(each))})


def lane(
    transport: Mapping[str, str | list[str]],
    opened: Sequence[str],
    environment: Mapping[str, str],
    ways: Iterable[Route],
) -> Lane:
    """Returns the devices of a rank's lanes, from the best of these sources: engine, open devices, settings, route.

    NIXL's binding does not tell which devices UCX uses. UCX closes those that it does not choose among, so they are
    among those that the process has open; others may have been opened by NCCL.

    Args:
        transport: description of the transport; `devices` are those that the engine reports to its peers.
        opened: RDMA devices that the process has open.
        environment: variables of the process.
        ways: routes to the peers.
    """
    protocol, told = str(transport.get("protocol", "")), transport.get("devices")
    if isinstance(told, list) and told:
        return {"devices": told, "source": "engine", "protocol": protocol}
    chosen = _chosen(environment.get("UCX_NET_DEVICES", "")) if not protocol else []
    in_use = [name for name in chosen if name.partition(":")[0] in opened] if chosen else list(opened)
    if in_use and protocol != "tcp":
        return {"devices": in_use, "source": "open devices", "protocol": protocol}
    if chosen:
        return {"devices": chosen, "source": "settings", "protocol": protocol}
    interfaces = sorted({each["interface"] for each in ways})
    return {"devices": interfaces, "source": "route" if interfaces else "", "protocol": protocol}


def _chosen(net_devices: str) -> list[str]:
    """Returns the devices that a value of UCX_NET_DEVICES names; none for "all" and exclusions."""
    names = [] if net_devices.startswith("^") else [each.strip() for each in net_devices.split(",")]
    return [name for name in names if name not in {"", "all"}]


# ---- routes ----------------------------------------------------------------------------------------------------

_GETROUTE, _NEWROUTE, _REQUEST = 26, 24, 1  # of linux/rtnetlink.h and linux/netlink.h
_DST, _OIF, _GATEWAY, _VIA = 1, 4, 5, 18
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg
_ATTRIBUTE = struct.Struct("=HH")
_TIMEOUT_S = 0.2


def routes(peers: Iterable[PeerRow]) -> list[Route]:
    """Returns the routes to the peers whose TCP address is known; to 64 of them, if there are more."""
    found: list[Route] = []
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel,
    ):
        kernel.settimeout(_TIMEOUT_S)
        for peer in peers:
            host = host_of(peer["endpoint"])
            if not host or len(found) == _MOST_ROUTES:
                continue
            way = route(kernel, host)
            if way is not None:
                found.append({"peer": peer["peer"], "address": host, "interface": way[0], "gateway": way[1]})
    return found


def route(kernel: socket.socket, address: str) -> tuple[str, str] | None:
    """Asks the kernel for the interface and the next hop of packets to an address.

    Args:
        kernel: netlink socket of the family NETLINK_ROUTE.
        address: IPv4 or IPv6 address.

    Returns:
        Name of the interface, and address of the next hop or ""; None if there is no route, or `address` is a name.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        raw = socket.inet_pton(family, address.partition("%")[0])
    except OSError:
        return None
    attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(raw), _DST) + raw
    body = _ROUTE.pack(family, 8 * len(raw), 0, 0, 0, 0, 0, 0, 0) + attribute
    kernel.send(_HEADER.pack(_HEADER.size + len(body), _GETROUTE, _REQUEST, 0, 0) + body)
    reply = kernel.recv(1 << 14)
    length, kind, *_ = _HEADER.unpack_from(reply)
    if kind != _NEWROUTE:
        return None
    values: dict[int, bytes] = {}
    at = _HEADER.size + _ROUTE.size
    while at + _ATTRIBUTE.size <= min(length, len(reply)):
        size, name = _ATTRIBUTE.unpack_from(reply, at)
        if size < _ATTRIBUTE.size:
            break
        values[name] = reply[at + _ATTRIBUTE.size : at + size]
        at += size + -size % 4
    if _OIF not in values:
        return None
    via = values.get(_GATEWAY) or values.get(_VIA, b"")[2:]  # RTA_VIA: family of the next hop before its address
    families = {4: socket.AF_INET, 16: socket.AF_INET6}
    gateway = socket.inet_ntop(families[len(via)], via) if len(via) in families else ""
    return socket.if_indextoname(int.from_bytes(values[_OIF][:4], "little")), gateway


def _tcp_counters(files: Iterable[bytes | None]) -> dict[str, int]:
    """Returns the counters of TCP in /proc/net/snmp and /proc/net/netstat, pairs of lines of names and of values."""
    lines = [line.split()[1:] for text in files for line in (text or b"").decode().splitlines() if line[:3] == "Tcp"]
    pairs = zip(lines[::2], lines[1::2], strict=False)
    counters = {name: value for names, values in pairs for name, value in zip(names, values, strict=False)}
    return {name: int(value) for name, value in counters.items() if value.isdecimal()}


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - "net:[4026531840]" is no path
    except OSError:
        return ""
