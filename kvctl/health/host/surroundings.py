"""Where processes live: containers and namespaces, who may touch whose memory, the socket directory, fixed ports."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvctl.health.finding import Severity
from kvctl.health.host.fact import Fact
from kvctl.health.host.view import HostView
from kvctl_agent.contract.admin import MAX_SOCKET_PATH_BYTES, SOCKET_SUFFIX

_CONTAINERS = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman"}
_LISTENING = "0A"
_ROOM_FOR_NAMES = 24


def facts(host: HostView, directory: Path, ports: Mapping[str, int]) -> Iterator[Fact]:
    """
    Args:
        directory: where agents' sockets are.
        ports: fixed ports that agents started from here are told to bind, by the setting that says so.
    """
    yield _namespaces(host)
    yield from _ptrace(host)
    yield from _huge_pages(host)
    yield _sockets(directory)
    yield from _clashes(host, ports)


def _namespaces(host: HostView) -> Fact:
    container = next((name for path, name in _CONTAINERS.items() if host.path(path).exists()), None)
    where = f"inside a container ({container})" if container else "no container that one can see"
    own = host.target("/proc/self/ns/pid")
    apart = [agent.name for agent in host.agents if agent.pid is None or agent.pid != agent.own_pid]
    seen = {host.target(f"/proc/{agent.pid}/ns/pid") or own for agent in host.agents if agent.name not in apart}
    if apart and (seen or len(apart) > 1):
        return Fact(
            "PID namespace",
            f"{where}; {', '.join(apart)} in another",
            "processes in different PID namespaces can neither copy each other's memory (cma) nor share GPU memory "
            "(cuda_ipc), so their lanes fall back to TCP",
            Severity.WARNING,
            "start workers of one host with --pid=host --ipc=host, or in one pod with shareProcessNamespace",
            "KV_LANE_SLOW",
        )
    if apart:
        return Fact("PID namespace", f"{where}; {apart[0]} in another", "kvctl does not see its process, which is all")
    if host.agents:
        return Fact("PID namespace", f"{where}; one for kvctl and all agents here", "they can share memory")
    return Fact("PID namespace", where, "workers of one host need one PID namespace to share memory")


def _ptrace(host: HostView) -> Iterator[Fact]:
    scope = host.text("/proc/sys/kernel/yama/ptrace_scope")
    if scope in {None, "0", "1"}:  # with 1 UCX allows its peers by itself
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


def _sockets(directory: Path) -> Fact:
    topic = "socket directory"
    try:
        found = directory.stat()
    except FileNotFoundError:
        return Fact(topic, f"{directory} is not there", "no agent of this user has run here; the first one makes it")
    except OSError as error:
        return Fact(
            topic,
            f"{directory}: {error.strerror}",
            "kvctl cannot see agents that run there",
            Severity.WARNING,
            f"run kvctl as the owner, or see `namei -l {directory}`",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        return Fact(
            topic,
            f"{directory}, mode {mode:04o}",
            "others may put sockets of their own there and answer as your agents",
            Severity.WARNING,
            f"`chmod 700 {directory}`",
        )
    left = MAX_SOCKET_PATH_BYTES - len(os.fsencode(directory)) - len(SOCKET_SUFFIX) - 1
    if left < _ROOM_FOR_NAMES:
        return Fact(
            topic,
            f"{directory}, {left} bytes left for names",
            f"a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes: agents with longer names cannot start",
            Severity.WARNING,
            "set KVCTL_SOCKET_DIR to a shorter path",
        )
    return Fact(topic, f"{directory}, mode {mode:04o}", "agents are found there")


def _clashes(host: HostView, ports: Mapping[str, int]) -> Iterator[Fact]:
    held = _listening(host) if ports else {}
    agents = {agent.pid: agent.name for agent in host.agents}
    for setting, port in ports.items():
        if port not in held:
            continue
        holder = _holder(host, held[port])
        if holder in agents:
            continue  # told to one agent, and it has it
        who = "another process" if holder is None else f"process {holder} ({_command(host, holder)})"
        yield Fact(
            "ports",
            f"{setting}: port {port} is held by {who}",
            "an agent started with this setting does not come up",
            Severity.WARNING,
            f"`ss -ltnp sport = :{port}` shows the holder; give each rank a port of its own, or 0 for any",
            "KV_PORT_CLASH",
        )


def _listening(host: HostView) -> dict[int, str]:
    """Inode of the socket that listens, by port."""
    found: dict[int, str] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (host.text(table) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == _LISTENING:
                found[int(words[1].rpartition(":")[2], 16)] = words[9]
    return found


def _holder(host: HostView, inode: str) -> int | None:
    for pid in filter(str.isdecimal, host.names("/proc")):
        for descriptor in host.names(f"/proc/{pid}/fd"):
            if host.target(f"/proc/{pid}/fd/{descriptor}") == f"socket:[{inode}]":
                return int(pid)
    return None


def _command(host: HostView, pid: int) -> str:
    words = (host.text(f"/proc/{pid}/cmdline") or "").split("\0")
    return " ".join(word for word in words if word)[:60] or "unknown"
