"""Answers the admin command `nics`: the network devices of the host, and those through which this rank's bytes go."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from kvctl_agent.contract.addresses import host_of
from kvctl_agent.contract.snapshots import Lane, Nic, Nics, PeerRow
from kvctl_agent.host.nics import HostNics, ReadFiles, read_files
from kvctl_agent.observer.documents import Identity
from kvctl_agent.observer.process_facts import ProcessFacts
from kvctl_agent.telemetry.region import Header

_KEPT_NS = 1_000_000_000
_FRESH_NS = 50_000_000
_SLOW_NS = 60_000_000_000
_MOST_ROUTES = 64
GID_SETTINGS = ("UCX_IB_GID_INDEX", "MC_GID_INDEX")
NIC_SETTINGS = ("UCX_NET_DEVICES", *GID_SETTINGS)
"""Environment variables of a worker that choose its network devices."""


class HostReading:
    """Reads the network devices and TCP counters of this host; a reading is kept for a second, for all ranks.

    It is kept for 50 ms for who asks for a fresh one, to compare counters around a transfer.

    Args:
        root: directory that contains `sys` and `proc`.
        read: reads files.

    Attributes:
        devices: the devices.
    """

    def __init__(self, root: Path = Path("/"), read: ReadFiles = read_files) -> None:
        self.devices = HostNics(root, read)
        self._tcp_files = [str(root / "proc/net" / name) for name in ("snmp", "netstat")]
        self._read = read
        self._known: tuple[list[Nic], dict[str, int], int] | None = None

    def __call__(self, fresh: bool = False) -> tuple[list[Nic], dict[str, int], int]:
        """Returns the devices, the counters of TCP, and the monotonic time of the reading."""
        now = time.monotonic_ns()
        if self._known is None or now - self._known[2] >= (_FRESH_NS if fresh else _KEPT_NS):
            self._known = self.devices.read(), _tcp_counters(self._read(self._tcp_files)), now
        return self._known


_this_host = cache(HostReading)


class NicQuery:
    """Tells the network devices of this host and those of one rank, only when asked.

    An answer is kept as long as the reading of the host. Open devices and routes, which seldom change and need a system
    call for each descriptor and each peer, are kept for a minute.

    Args:
        header: of the rank's region.
        identity, peers, facts: return what is known of the rank, of its peers, and of its process.
        reading: reading of the host; None: that of this process.
    """

    def __init__(
        self,
        header: Header,
        identity: Callable[[], Identity],
        peers: Callable[[], Sequence[PeerRow]],
        facts: Callable[[], ProcessFacts],
        reading: HostReading | None = None,
    ) -> None:
        self._header = header
        self._identity = identity
        self._peers = peers
        self._facts = facts
        self._reading = reading or _this_host()
        self._host = self._reading.devices
        self._answer: Nics | None = None
        self._open: list[str] = []
        self._interfaces: list[str] = []
        self._slow_due_ns = 0

    def __call__(self, fresh: bool = False) -> Nics:
        nics, tcp, at_ns = self._reading(fresh)
        if self._answer is None or self._answer["at_ns"] != at_ns:
            self._answer = self._describe(nics, tcp, at_ns)
        return self._answer

    def _describe(self, nics: list[Nic], tcp: Mapping[str, int], at_ns: int) -> Nics:
        now = time.monotonic_ns()
        process = self._process()
        if now >= self._slow_due_ns:
            self._open = self._open_devices(process) if any(nic["kind"] == "rdma" for nic in nics) else []
            self._interfaces = interfaces(self._peers())
            self._slow_due_ns = now + _SLOW_NS
        identity, cores = self._identity(), set[int]()
        environment = identity.environment
        if process:
            with contextlib.suppress(OSError):
                cores = os.sched_getaffinity(self._header.pid)
        return {
            "agent": self._header.name,
            "host": identity.host,
            "network": _link(f"{process}/ns/net"),
            "at_ns": at_ns,
            "nics": nics,
            "left_out": self._host.left_out,
            "segments_sent_total": tcp.get("OutSegs"),
            "segments_retransmitted_total": tcp.get("RetransSegs"),
            "segments_duplicate_total": tcp.get("TCPDSACKRecvSegs"),
            "cpu_nodes": sorted(node for node, own in self._host.nodes().items() if own & cores),
            "gpu": identity.gpu_pci,
            "lane": lane(identity.transport, self._open, environment, self._interfaces),
            "gid_index": next(
                (int(value) for name in GID_SETTINGS if (value := environment.get(name, "")).isdecimal()), None
            ),
        }

    def _process(self) -> str:
        """Returns the directory of the rank's process in /proc; "" if that is not this one's /proc, or it has ended."""
        return f"/proc/{self._header.pid}" if self._facts().cpu_ns is not None else ""

    def _open_devices(self, process: str) -> list[str]:
        """Returns the RDMA devices that the rank's process has open, by the targets of its descriptors."""
        directory, targets = f"{process}/fd", set[str]()
        with contextlib.suppress(OSError):
            targets = {_link(f"{directory}/{name}") for name in os.listdir(directory)}  # noqa: PTH208 - names
        verbs = {Path(target).name for target in targets if target.startswith("/dev/infiniband/uverbs")}
        return sorted({device for each in verbs if (device := self._host.device_of(each))})


def lane(
    transport: Mapping[str, str | list[str]],
    opened: Sequence[str],
    environment: Mapping[str, str],
    interfaces: list[str],
) -> Lane:
    """Returns the devices of a rank's lanes, from the best of these sources: engine, open devices, settings, route.

    NIXL's binding does not tell which devices UCX uses. UCX closes those that it does not choose among, so they are
    among those that the process has open; others may have been opened by NCCL.

    Args:
        transport: description of the transport; `devices` are those that the engine reports to its peers.
        opened: RDMA devices that the process has open.
        environment: variables of the process.
        interfaces: those through which packets go to the peers, by `interfaces`.
    """
    protocol, told = str(transport.get("protocol", "")), transport.get("devices")
    if isinstance(told, list) and told:
        return {"devices": told, "source": "engine", "protocol": protocol}
    is_ucx = not protocol and transport.get("backend") != "LIBFABRIC"
    chosen = _chosen(environment.get("UCX_NET_DEVICES", "")) if is_ucx else []
    in_use = [name for name in chosen if name.partition(":")[0] in opened] if chosen else list(opened)
    if in_use and protocol != "tcp":
        return {"devices": in_use, "source": "open devices", "protocol": protocol}
    if chosen:
        return {"devices": chosen, "source": "settings", "protocol": protocol}
    return {"devices": interfaces, "source": "route" if interfaces else "", "protocol": protocol}


def _chosen(net_devices: str) -> list[str]:
    """Returns the devices that a value of UCX_NET_DEVICES names; none for "all" and exclusions."""
    names = [] if net_devices.startswith("^") else [each.strip() for each in net_devices.split(",")]
    return [name for name in names if name not in {"", "all"}]


# ---- routes ----------------------------------------------------------------------------------------------------

_GETROUTE, _NEWROUTE, _REQUEST = 26, 24, 1  # of linux/rtnetlink.h and linux/netlink.h
_DST, _OIF = 1, 4
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg
_ATTRIBUTE = struct.Struct("=HH")
_TIMEOUT_S = 0.2


def interfaces(peers: Iterable[PeerRow]) -> list[str]:
    """Returns the interfaces to the peers whose TCP address is known; to 64 of them, if there are more."""
    hosts = {host for peer in peers if (host := host_of(peer["endpoint"]))}
    found = set[str]()
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel,
    ):
        kernel.settimeout(_TIMEOUT_S)
        found.update(interface(kernel, host) for host in sorted(hosts)[:_MOST_ROUTES])
    return sorted(found - {""})


def interface(kernel: socket.socket, address: str) -> str:
    """Asks the kernel for the interface of packets to an address.

    Args:
        kernel: netlink socket of the family NETLINK_ROUTE.
        address: IPv4 or IPv6 address.

    Returns:
        Name of the interface; "" if there is no route, or `address` is a name.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        raw = socket.inet_pton(family, address.partition("%")[0])
    except OSError:
        return ""
    attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(raw), _DST) + raw
    body = _ROUTE.pack(family, 8 * len(raw), 0, 0, 0, 0, 0, 0, 0) + attribute
    kernel.send(_HEADER.pack(_HEADER.size + len(body), _GETROUTE, _REQUEST, 0, 0) + body)
    reply = kernel.recv(1 << 14)
    length, kind, *_ = _HEADER.unpack_from(reply)
    if kind != _NEWROUTE:
        return ""
    at = _HEADER.size + _ROUTE.size
    while at + _ATTRIBUTE.size <= min(length, len(reply)):
        size, name = _ATTRIBUTE.unpack_from(reply, at)
        if size < _ATTRIBUTE.size:
            break
        if name == _OIF:
            return socket.if_indextoname(int.from_bytes(reply[at + _ATTRIBUTE.size :][:4], "little"))
        at += size + -size % 4
    return ""


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
