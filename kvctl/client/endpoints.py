"""Which agents are there: the socket directory, or what `-e` names, with dead sockets told from living ones.

Connecting a ZMQ socket to an absent peer never fails, it waits for ever. A plain Unix connect does fail, at once and
without side effects, when no process listens any more, so that is how a crashed agent's socket is recognised. Agents on
other machines are not knocked at: how their connection goes is seen when they are asked (`handshake`).
"""

from __future__ import annotations

import difflib
import errno
import fnmatch
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvctl.client.faults import Fault, FaultCode, stopped
from kvctl.client.processes import stopped_pid
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.admin import MAX_SOCKET_PATH_BYTES, SOCKET_DIR_VARIABLE, SOCKET_SUFFIX, socket_dir

_IPC = "ipc://"
_GLOB = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The admin socket of one agent.

    Attributes:
        path: of its Unix socket; None where it is asked over TCP.
        named: the user asked for exactly this one.
        remote: its tcp:// address; "" where it has a path.
    """

    name: str
    path: Path | None
    named: bool = False
    remote: str = ""

    @property
    def address(self) -> str:
        return self.remote or f"{_IPC}{self.path}"


@dataclass(slots=True)
class Discovery:
    """Outcome of one look around.

    Attributes:
        live: a process listens there.
        stale: socket files of processes that are gone.
        faults: endpoints the user named that are missing, dead or closed to us, and those whose process is stopped.
        directory: where sockets were looked for.
        stopped: their process is; nobody connects to them.
    """

    directory: Path
    live: list[Endpoint] = field(default_factory=list)
    stale: list[Endpoint] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    stopped: list[Endpoint] = field(default_factory=list)


def discover(wanted: Sequence[str] = ()) -> Discovery:
    """Looks for agents.

    Args:
        wanted: names, globs, `ipc://` or `tcp://` addresses or socket paths; empty means every agent of the socket
            directory.

    Raises:
        CliError: an address of a kind that is not served, or a socket directory that may not be read.
    """
    found = Discovery(socket_dir())
    for endpoint in _select(wanted, found):
        if endpoint.path is None:
            found.live.append(endpoint)
            continue
        if (pid := stopped_pid(endpoint.path)) is not None:
            found.stopped.append(endpoint)
            found.faults.append(stopped(endpoint.name, pid))
            continue
        match probe(endpoint.path):
            case 0:
                found.live.append(endpoint)
            case errno.ECONNREFUSED if not endpoint.named:
                found.stale.append(endpoint)
            case errno.ECONNREFUSED:
                found.stale.append(endpoint)
                text = f"nobody listens on {endpoint.path}: the agent is gone and left its socket"
                found.faults.append(Fault(endpoint.name, FaultCode.UNREACHABLE, text))
            case errno.ENOENT if not endpoint.named:
                pass  # it left between our listing and our knock
            case errno.ENOENT:
                text = f"there is no socket {endpoint.path}"
                found.faults.append(Fault(endpoint.name, FaultCode.UNREACHABLE, text))
            case errno.EACCES | errno.EPERM:
                text = f"{endpoint.path} belongs to another user: run kvctl as the user who runs the agent"
                found.faults.append(Fault(endpoint.name, FaultCode.NOT_PERMITTED, text))
            case other:
                text = f"cannot connect to {endpoint.path}: {os.strerror(other)}"
                found.faults.append(Fault(endpoint.name, FaultCode.UNREACHABLE, text))
    return found


def _select(wanted: Sequence[str], found: Discovery) -> list[Endpoint]:
    """Endpoints the user asked for, each once, in the order of the request."""
    directory = found.directory
    names = _listed(directory) if not wanted or any(not _is_address(each) for each in wanted) else []
    chosen: dict[str, Endpoint] = {}
    for each in wanted:
        if _is_address(each):
            endpoint = _from_address(each)
            chosen.setdefault(endpoint.address, endpoint)
            continue
        matches = fnmatch.filter(names, each) if _GLOB & set(each) else [each] if each in names else []
        if not matches:
            found.faults.append(Fault(each, FaultCode.UNREACHABLE, _unknown(each, names, directory)))
        for name in matches:
            endpoint = Endpoint(name, directory / f"{name}{SOCKET_SUFFIX}", named=name == each)
            chosen.setdefault(endpoint.address, endpoint)
    if not wanted:
        return [Endpoint(name, directory / f"{name}{SOCKET_SUFFIX}") for name in names]
    return list(chosen.values())


def _is_address(text: str) -> bool:
    return "/" in text


def _from_address(text: str) -> Endpoint:
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise CliError(f"{text}: write tcp://host:port, as in the agent's admin_endpoint", ExitCode.USAGE)
        return Endpoint(rest, None, named=True, remote=text)
    if separator and scheme != "ipc":
        raise CliError(
            f"{text}: kvctl speaks ipc:// and tcp://, {scheme}:// is not an address of an agent", ExitCode.USAGE
        )
    path = Path(rest if separator else text)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise CliError(f"{path}: a Unix socket path takes at most {MAX_SOCKET_PATH_BYTES} bytes", ExitCode.USAGE)
    return Endpoint(path.name.removesuffix(SOCKET_SUFFIX), path, named=True)


def _listed(directory: Path) -> list[str]:
    try:
        return sorted(p.name.removesuffix(SOCKET_SUFFIX) for p in directory.iterdir() if p.name.endswith(SOCKET_SUFFIX))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise CliError(
            f"{directory} belongs to another user: run kvctl as the user who runs the agents, "
            "or point KVCTL_SOCKET_DIR at their directory",
            ExitCode.NOT_PERMITTED,
        ) from error


def _unknown(name: str, names: Sequence[str], directory: Path) -> str:
    if _GLOB & set(name):
        return missing(directory) or f"no agent in {directory} matches {name}"
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return missing(directory) or f"no agent named {name} in {directory}{hint}"


def missing(directory: Path) -> str:
    """Says that the socket directory which the user has named is not there; "" where it is, or is the usual one."""
    if not os.environ.get(SOCKET_DIR_VARIABLE) or directory.is_dir():
        return ""
    wrong = "is no directory" if directory.exists() else "does not exist"
    return f"{SOCKET_DIR_VARIABLE} names {directory}, which {wrong}"


def probe(path: Path) -> int:
    """Knocks: 0 when a process listens, else the errno."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as knock:
        code = knock.connect_ex(os.fspath(path))
    # A full backlog means a listener that is busy, which is alive.
    return 0 if code in {0, errno.EAGAIN, errno.EINPROGRESS} else code
