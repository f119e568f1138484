"""Checks process limits, namespaces, kernel settings, the socket directory and fixed ports."""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvctl.health.finding import Severity
from kvctl.health.host.engines import rdma_devices
from kvctl.health.host.view import Fact, HostView
from kvctl.render import units
from kvctl_agent.contract.admin import MAX_SOCKET_PATH_BYTES, SOCKET_SUFFIX

_MIN_DESCRIPTORS = 1024
_PORTS_LOW = 0.8
_MIN_SHM_BYTES = 64 << 20
_LOCKED = re.compile(r"^Max locked memory\s+(\S+)", re.MULTILINE)
_DESCRIPTORS = re.compile(r"^Max open files\s+(\S+)", re.MULTILINE)
_UNLIMITED = "unlimited"
_CONTAINERS = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman"}
_LISTENING = "0A"
_MIN_NAME_BYTES = 24


# ---- limits ----------------------------------------------------------------------------------------------------


def limit_facts(host: HostView) -> Iterator[Fact]:
    yield _memlock(host)
    yield _descriptors(host)
    yield from _ephemeral_ports(host)
    yield _shared_memory(host)
    yield _processors(host)


def _smallest_limit(host: HostView, pattern: re.Pattern[str], resource_id: int) -> tuple[int | None, str]:
    """Returns the smallest limit of the agents on this host; without agents, the limit of this process.

    Args:
        pattern: Matches the limit in /proc/PID/limits; its group is the value.
        resource_id: The limit as a constant of `resource`.

    Returns:
        The limit, None for unlimited, and a description of its owner.
    """
    found: list[tuple[int, str]] = []
    known = False
    for agent in host.agents:
        line = pattern.search((agent.pid and host.text(f"/proc/{agent.pid}/limits")) or "")
        if line is not None:
            known = True
            if line[1] != _UNLIMITED:
                found.append((int(line[1]), agent.name))
    if known and len({limit for limit, _ in found}) == 1 and len(found) == len(host.agents):
        return found[0][0], "every agent"
    if known:
        return min(found, default=(None, "every agent"))
    soft = host.limit(resource_id)[0]
    return (None if soft == resource.RLIM_INFINITY else soft), "this shell"


def _memlock(host: HostView) -> Fact:
    limit, owner = _smallest_limit(host, _LOCKED, resource.RLIMIT_MEMLOCK)
    found = f"{_UNLIMITED if limit is None else units.size(limit)} ({owner})"
    if limit is None:
        return Fact("locked memory", found, "RDMA devices may register all memory")
    if not rdma_devices(host):
        return Fact("locked memory", found, "enough: only RDMA devices lock the memory they register")
    return Fact(
        "locked memory",
        found,
        "registering the KV pool with the RDMA device fails with errno 12 or 11 beyond this limit",
        Severity.WARNING,
        "start workers with `ulimit -l unlimited` (LimitMEMLOCK=infinity in a unit, memlock=-1 in a container)",
        "KV_REGISTER_FAILED",
    )


def _descriptors(host: HostView) -> Fact:
    limit, owner = _smallest_limit(host, _DESCRIPTORS, resource.RLIMIT_NOFILE)
    found = f"{_UNLIMITED if limit is None else units.count(limit)} ({owner})"
    if limit is None or limit >= _MIN_DESCRIPTORS:
        return Fact("file descriptors", found, "enough for some hundred peers and clients")
    return Fact(
        "file descriptors",
        found,
        "each peer and each client uses several, and the engine uses its own",
        Severity.WARNING,
        "start workers with `ulimit -n 65536` (LimitNOFILE=65536 in a unit)",
        "KV_FDS_LOW",
    )


def _ephemeral_ports(host: HostView) -> Iterator[Fact]:
    bounds = (host.text("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(bounds) != 2 or not all(bound.isdecimal() for bound in bounds):
        return
    low, high = map(int, bounds)
    used = len({port for port, _, _ in host.tcp_sockets() if low <= port <= high})
    total = high - low + 1
    found = f"{used:,} of {total:,} in use ({low} to {high})"
    if used < _PORTS_LOW * total:
        yield Fact("ephemeral ports", found, "enough for new connections between hosts")
        return
    yield Fact(
        "ephemeral ports",
        found,
        'new connections fail with "cannot assign requested address" when all are in use',
        Severity.WARNING,
        "`ss -s` shows what uses them; `sysctl -w net.ipv4.ip_local_port_range='15000 65000'` widens the range",
        "KV_PORTS_LOW",
    )


def _shared_memory(host: HostView) -> Fact:
    try:
        use = os.statvfs(host.path("/dev/shm"))
    except OSError:
        return Fact(
            "/dev/shm",
            "missing",
            "lanes over shared memory are not possible, and workers of one host use TCP",
            Severity.WARNING,
            "mount it: `mount -t tmpfs -o size=1g shm /dev/shm`",
        )
    size, free = use.f_frsize * use.f_blocks, use.f_frsize * use.f_bavail
    found = f"{units.size(free)} free of {units.size(size)}"
    if free > _MIN_SHM_BYTES:
        return Fact("/dev/shm", found, "enough for the engines' shared memory")
    return Fact(
        "/dev/shm",
        found,
        "engines that share memory, and PyTorch workers, fail in odd ways when it is full; 64 MiB is Docker's default",
        Severity.WARNING,
        "start the container with --shm-size=1g, or remove old files in /dev/shm",
    )


def _processors(host: HostView) -> Fact:
    cores, agents = host.cores(), len(host.agents)
    found = f"{cores} for {agents} agent{'s' * (agents != 1)}" if agents else str(cores)
    if not agents:
        return Fact("processors", found, "each agent needs one for its transfers")
    if agents > cores:
        return Fact("processors", found, "agents take turns: rates and latencies here are not those of a real fleet")
    return Fact("processors", found, "each agent has one for its transfers")


# ---- namespaces, kernel settings, sockets, ports ---------------------------------------------------------------


def environment_facts(host: HostView, directory: Path, ports: Mapping[str, int]) -> Iterator[Fact]:
    """Checks namespaces, kernel settings, the socket directory and fixed ports.

    Args:
        ports: fixed ports that agents started from here would bind, by the name of the setting.
    """
    yield _namespaces(host)
    yield from _ptrace(host)
    yield from _huge_pages(host)
    yield _socket_directory(directory)
    yield from _port_clashes(host, ports)


def _namespaces(host: HostView) -> Fact:
    topic = "PID namespace"
    container = next((name for path, name in _CONTAINERS.items() if host.path(path).exists()), None)
    place = f"inside a container ({container})" if container else "no visible container"
    own = host.target("/proc/self/ns/pid")
    apart = [agent.name for agent in host.agents if agent.pid is None or agent.pid != agent.own_pid]
    namespaces = {host.target(f"/proc/{agent.pid}/ns/pid") or own for agent in host.agents if agent.name not in apart}
    if apart and (namespaces or len(apart) > 1):
        return Fact(
            topic,
            f"{place}; {', '.join(apart)} in another",
            "processes in different PID namespaces can neither copy each other's memory (cma) nor share GPU memory "
            "(cuda_ipc), so their lanes fall back to TCP",
            Severity.WARNING,
            "start workers of one host with --pid=host --ipc=host, or in one pod with shareProcessNamespace",
            "KV_LANE_SLOW",
        )
    if apart:
        return Fact(
            topic, f"{place}; {apart[0]} in another", "kvctl does not see its process; transfers are unaffected"
        )
    if host.agents:
        return Fact(topic, f"{place}; one for kvctl and all agents here", "they can share memory")
    return Fact(topic, place, "workers of one host need one PID namespace to share memory")


def _ptrace(host: HostView) -> Iterator[Fact]:
    scope = host.text("/proc/sys/kernel/yama/ptrace_scope")
    if scope in {None, "0", "1"}:  # with 1, UCX permits its peers by itself
        return
    yield Fact(
        "ptrace",
        f"kernel.yama.ptrace_scope={scope}",
        "processes may not copy each other's memory: NIXL's first write between processes of this host disconnects",
        Severity.WARNING,
        "`sysctl -w kernel.yama.ptrace_scope=1`, or set UCX_TLS=tcp,self",
        "KV_TRANSPORT",
    )


def _huge_pages(host: HostView) -> Iterator[Fact]:
    if "[never]" in (host.text("/sys/kernel/mm/transparent_hugepage/enabled") or ""):
        yield Fact(
            "huge pages",
            "never",
            "copies between processes run at less than half the speed",
            remedy="`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
        )


def _socket_directory(directory: Path) -> Fact:
    topic = "socket directory"
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
    except FileNotFoundError:
        return Fact(
            topic, f"{directory} does not exist", "no agent of this user has run here; the first one creates it"
        )
    except OSError as error:
        return Fact(
            topic,
            f"{directory}: {error.strerror}",
            "kvctl cannot see agents that run there",
            Severity.WARNING,
            f"run kvctl as the owner, or see `namei -l {directory}`",
        )
    if mode & 0o022:
        return Fact(
            topic,
            f"{directory}, mode {mode:04o}",
            "other users can create sockets there and answer in place of your agents",
            Severity.WARNING,
            f"`chmod 700 {directory}`",
        )
    left = MAX_SOCKET_PATH_BYTES - len(os.fsencode(directory)) - len(SOCKET_SUFFIX) - 1
    if left < _MIN_NAME_BYTES:
        return Fact(
            topic,
            f"{directory}, {left} bytes left for names",
            f"a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes: agents with longer names cannot start",
            Severity.WARNING,
            "set KVCTL_SOCKET_DIR to a shorter path",
        )
    return Fact(topic, f"{directory}, mode {mode:04o}", "kvctl finds agents there")


def _port_clashes(host: HostView, ports: Mapping[str, int]) -> Iterator[Fact]:
    if not ports:
        return
    inodes = {port: inode for port, state, inode in host.tcp_sockets() if state == _LISTENING}
    agents = {pid for agent in host.agents for pid in (agent.pid, agent.listener)}
    for setting, port in ports.items():
        holder = _socket_owner(host, inodes[port]) if port in inodes else None
        if port not in inodes or holder in agents:
            continue  # free, or bound by the agent that is to have it
        owner = "another process" if holder is None else f"process {holder} ({_command(host, holder)})"
        yield Fact(
            "ports",
            f"{setting}: port {port} is held by {owner}",
            "an agent started with this setting fails to start",
            Severity.WARNING,
            f"`ss -ltnp sport = :{port}` shows the process; give each rank a port of its own, or 0 for any",
            "KV_PORT_CLASH",
        )


def _socket_owner(host: HostView, inode: str) -> int | None:
    for pid in filter(str.isdecimal, host.names("/proc")):
        for descriptor in host.names(f"/proc/{pid}/fd"):
            if host.target(f"/proc/{pid}/fd/{descriptor}") == f"socket:[{inode}]":
                return int(pid)
    return None


def _command(host: HostView, pid: int) -> str:
    words = (host.text(f"/proc/{pid}/cmdline") or "").split("\0")
    return " ".join(word for word in words if word)[:60] or "unknown"
