"""Limits of processes: memory that may be locked, file descriptors, ephemeral ports, shared memory, processors."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator

from kvctl.health.finding import Severity
from kvctl.health.host.devices import rdma_devices
from kvctl.health.host.fact import Fact
from kvctl.health.host.view import HostView
from kvctl.render import units

_FEW_DESCRIPTORS = 1024
_FEW_PORTS = 0.8
_SMALL_SHM_BYTES = 64 << 20
_LOCKED = re.compile(r"^Max locked memory\s+(\S+)", re.MULTILINE)
_DESCRIPTORS = re.compile(r"^Max open files\s+(\S+)", re.MULTILINE)
_UNLIMITED = "unlimited"


def facts(host: HostView) -> Iterator[Fact]:
    yield _memlock(host)
    yield _descriptors(host)
    yield from _ports(host)
    yield from _shared_memory(host)
    yield _processors(host)


def _least(host: HostView, which: re.Pattern[str], resource_id: int) -> tuple[int | None, str]:
    """The smallest limit of the agents here, else that of this shell, which agents started from it would get.

    Returns:
        The limit, None for none; and whose it is.
    """
    found: list[tuple[int, str]] = []
    told = False
    for agent in host.agents:
        line = which.search((agent.pid and host.text(f"/proc/{agent.pid}/limits")) or "")
        if line is not None:
            told = True
            if line[1] != _UNLIMITED:
                found.append((int(line[1]), agent.name))
    if told and len({limit for limit, _ in found}) == 1 and len(found) == len(host.agents):
        return found[0][0], "every agent"
    if told:
        return min(found, default=(None, "every agent"))
    soft = host.limit(resource_id)[0]
    return (None if soft == resource.RLIM_INFINITY else soft), "this shell"


def _memlock(host: HostView) -> Fact:
    limit, whose = _least(host, _LOCKED, resource.RLIMIT_MEMLOCK)
    found = f"{_UNLIMITED if limit is None else units.size(limit)} ({whose})"
    if limit is None:
        return Fact("locked memory", found, "RDMA devices may register as much memory as there is")
    if not rdma_devices(host):
        return Fact("locked memory", found, "enough: only RDMA devices lock what they register")
    return Fact(
        "locked memory",
        found,
        "registering the KV pool with the RDMA device fails with errno 12 or 11 beyond this limit",
        Severity.WARNING,
        "start workers with `ulimit -l unlimited` (LimitMEMLOCK=infinity in a unit, memlock=-1 in a container)",
        "KV_REGISTER_FAILED",
    )


def _descriptors(host: HostView) -> Fact:
    limit, whose = _least(host, _DESCRIPTORS, resource.RLIMIT_NOFILE)
    found = f"{_UNLIMITED if limit is None else units.count(limit)} ({whose})"
    if limit is None or limit >= _FEW_DESCRIPTORS:
        return Fact("file descriptors", found, "enough for some hundred peers and clients")
    return Fact(
        "file descriptors",
        found,
        "each peer and each client takes several, and the engine takes its own",
        Severity.WARNING,
        "start workers with `ulimit -n 65536` (LimitNOFILE=65536 in a unit)",
        "KV_FDS_LOW",
    )


def _ports(host: HostView) -> Iterator[Fact]:
    bounds = (host.text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(bounds) != 2 or not all(bound.isdecimal() for bound in bounds):
        return
    low, high = map(int, bounds)
    used = len({port for port in _local_ports(host) if low <= port <= high})
    total = high - low + 1
    found = f"{used:,} of {total:,} in use ({low} to {high})"
    if used < _FEW_PORTS * total:
        yield Fact("ephemeral ports", found, "enough for new connections between hosts")
        return
    yield Fact(
        "ephemeral ports",
        found,
        'new connections fail with "cannot assign requested address" when they are used up',
        Severity.WARNING,
        "`ss -s` tells what holds them; `sysctl -w net.ipv4.ip_local_port_range='15000 65000'` widens the range",
        "KV_PORTS_LOW",
    )


def _local_ports(host: HostView) -> Iterator[int]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (host.text(table) or "").splitlines()[1:]:
            yield int(line.split()[1].rpartition(":")[2], 16)


def _shared_memory(host: HostView) -> Iterator[Fact]:
    try:
        use = os.statvfs(host.path("/dev/shm"))
    except OSError:
        yield Fact(
            "/dev/shm",
            "missing",
            "lanes over shared memory cannot be made, and workers of one host talk TCP",
            Severity.WARNING,
            "mount it: `mount -t tmpfs -o size=1g shm /dev/shm`",
        )
        return
    size, free = use.f_frsize * use.f_blocks, use.f_frsize * use.f_bavail
    found = f"{units.size(free)} free of {units.size(size)}"
    if free > _SMALL_SHM_BYTES:
        yield Fact("/dev/shm", found, "room for engines' shared memory")
        return
    yield Fact(
        "/dev/shm",
        found,
        "engines that share memory, and PyTorch workers, fail in odd ways when it is full; 64 MiB is Docker's default",
        Severity.WARNING,
        "start the container with --shm-size=1g, or remove what is left in /dev/shm",
    )


def _processors(host: HostView) -> Fact:
    cores, agents = host.cores(), len(host.agents)
    found = f"{cores} for {agents} agent{'s' * (agents != 1)}" if agents else str(cores)
    if not agents:
        return Fact("processors", found, "each agent wants one for its transfers")
    if agents > cores:
        return Fact("processors", found, "agents take turns: rates and latencies here are not those of a real fleet")
    return Fact("processors", found, "each agent has one for its transfers")
