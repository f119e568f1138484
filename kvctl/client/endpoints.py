"""Selects agents by endpoint (`-e`) and label (`-l`), and determines which of their processes are alive.

Connecting a ZMQ socket to an absent peer never fails. Connecting a plain Unix socket fails at once, without side
effects, if no process listens; this identifies the sockets of agents that have ended. TCP endpoints are not probed;
connection errors appear when they are queried (`fanout`).
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvctl.client.discovery import KINDS, is_url
from kvctl.client.faults import Fault, FaultCode
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.addresses import AddressError, host_of, parse_endpoint
from kvctl_agent.contract.admin import MAX_SOCKET_PATH_BYTES, SOCKET_DIR_VARIABLE, SOCKET_SUFFIX, lock_path, socket_dir
from kvctl_agent.contract.values import near, shown
from kvctl_agent.host.sockets import UntrustedPathError, check_path, connect_unix

if TYPE_CHECKING:
    from kvctl.client.discovery.source import AgentSources

_IPC = "ipc://"
_HTTP = ("http://", "https://")
METRICS = "metrics://"
_GLOB = frozenset("*?[")
_STOPPED_STATES = ("T", "t")
_MAX_PID_BYTES = 32
_PROBED_SINGLY = 16
_URL = re.compile(r"[!-~]{1,1024}")

LABELS = ("role", "dp", "pp", "cp", "tp", "unique", "name", "host", "version", "device")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Admin endpoint of one agent.

    Attributes:
        path: Unix socket; None for a TCP endpoint and for an engine's metrics.
        named: whether the user gave exactly this name or address, not a glob.
        remote: tcp:// address, or http URL of an engine's metrics; "" for a Unix socket.
        host_name: name of the agent's host, if the source that named the endpoint knows it; otherwise "".
    """

    name: str
    path: Path | None
    named: bool = False
    remote: str = ""
    host_name: str = ""

    def __hash__(self) -> int:
        return hash(self.name)  # hashing the path takes longer than all else that a survey does with an endpoint

    @property
    def address(self) -> str:
        return self.remote or f"{_IPC}{self.path}"

    @property
    def shown_address(self) -> str:
        """Address for people and documents, without what may be a secret."""
        return public(self.address)

    @property
    def metrics(self) -> bool:
        """Whether it is not an agent, but the URL of an engine's metrics."""
        return self.remote.startswith(_HTTP)

    @property
    def host(self) -> str:
        """Name of the agent's host, or else the host in the address of a TCP endpoint; "" for a Unix socket."""
        return self.host_name or host_of(self.remote)


@dataclass(slots=True)
class Discovery:
    """Result of `discover`: which agents exist and which are alive.

    Attributes:
        live: endpoints with a listening process or whose agent runs, and all TCP endpoints.
        faults: named endpoints that are missing, stale or not permitted.
    """

    directory: Path
    live: list[Endpoint] = field(default_factory=list)
    stale: list[Endpoint] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def discover(
    wanted: Sequence[str] = (),
    sources: AgentSources | None = None,
    served: Callable[[Path], Set[str]] = lambda _: frozenset(),
) -> Discovery:
    """Finds the endpoints of agents and determines which are alive.

    Args:
        wanted: names, globs, `ipc://` or `tcp://` addresses, socket paths or discovery URLs; empty means every agent of
            the socket directory.
        sources: asked for the agents that discovery URLs name; required if there are such URLs.
        served: returns the names of the agents that the observer of the socket directory serves; asked if there are
            many, because they need not be probed.

    Raises:
        CliError: an address has another scheme, or the socket directory may not be read.
    """
    found = Discovery(socket_dir())
    directories: dict[Path, Set[int]] = {}
    selected = _select(wanted, found, sources)
    observed = served(found.directory) if len(selected) > _PROBED_SINGLY else frozenset()
    for endpoint in selected:
        if endpoint.path is None or (endpoint.name in observed and endpoint.path.parent == found.directory):
            found.live.append(endpoint)
            continue
        try:
            if (trusted := directories.get(endpoint.path.parent)) is None:
                trusted = directories[endpoint.path.parent] = check_path(endpoint.path.parent)
            code = probe(endpoint.path, trusted)
        except UntrustedPathError as error:
            found.faults.append(Fault(endpoint.name, FaultCode.NOT_PERMITTED, str(error)))
            continue
        except OSError as error:
            code = error.errno or errno.EIO
        match code:
            case 0:
                found.live.append(endpoint)
            case errno.ECONNREFUSED if agent_pid(endpoint.path) is not None:
                found.live.append(endpoint)  # its observer was killed, and another one will serve it
            case errno.ECONNREFUSED if not endpoint.named:
                found.stale.append(endpoint)
            case errno.ECONNREFUSED:
                found.stale.append(endpoint)
                text = (
                    f"nobody listens on {endpoint.path}: the agent has ended and left its socket: kvctl agents --prune "
                    "removes it"
                )
                found.faults.append(Fault(endpoint.name, FaultCode.UNREACHABLE, text))
            case errno.ENOENT if not endpoint.named:
                pass  # it ended after the directory was listed
            case errno.ENOENT:
                text = f"there is no socket {endpoint.path}{near(endpoint.name, _listed(endpoint.path.parent))}"
                found.faults.append(Fault(endpoint.name, FaultCode.UNREACHABLE, text))
            case errno.EACCES | errno.EPERM:
                text = f"{endpoint.path} belongs to another user: run kvctl as the user who runs the agent"
                found.faults.append(Fault(endpoint.name, FaultCode.NOT_PERMITTED, text))
            case other:
                text = f"cannot connect to {endpoint.path}: {os.strerror(other)}"
                found.faults.append(Fault(endpoint.name, FaultCode.UNREACHABLE, text))
    return found


def _select(wanted: Sequence[str], found: Discovery, sources: AgentSources | None) -> list[Endpoint]:
    """Returns the requested endpoints without duplicates, in the order of the request.

    Names that do not exist, and errors of sources, are added to `found.faults`.
    """
    directory = found.directory
    names = _listed(directory) if not wanted or any(not is_address(each) for each in wanted) else []
    urls = [each for each in wanted if is_url(each)]
    named_by = sources.find(urls) if urls and sources is not None else {}
    chosen: dict[str, Endpoint] = {}
    for each in wanted:
        if is_url(each):
            found.faults += named_by[each].faults
            for endpoint in named_by[each].endpoints:
                chosen.setdefault(endpoint.address, endpoint)
            continue
        if is_address(each):
            endpoint = endpoint_of(each)
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


def is_address(text: str) -> bool:
    """Returns whether a value of `-e` is an address or a discovery URL, not a name or a glob."""
    return "/" in text or is_url(text)


def endpoint_of(text: str) -> Endpoint:
    """Returns the endpoint at an address or the path of a socket; raises CliError if it is malformed."""
    scheme, separator, rest = text.partition("://")
    if text.startswith((METRICS, *_HTTP)):
        return _metrics_of(text)
    if separator and scheme == "tcp":
        try:
            parse_endpoint(text)
        except AddressError:
            text = f"{shown(text)}: write tcp://host:port, as in the agent's admin_endpoint"
            raise CliError(text, ExitCode.USAGE) from None
        return Endpoint(rest, None, named=True, remote=text)
    if separator and scheme != "ipc":
        known = ", ".join(kind.prefix for kind in KINDS.values())
        raise CliError(
            f"{text}: {scheme}:// is not an address of an agent; use ipc:// or tcp://, metrics:// or http:// "
            f"for an engine's metrics, or one of {known}",
            ExitCode.USAGE,
        )
    place = rest if separator else text
    if "\0" in place or len(place.encode(errors="surrogatepass")) > MAX_SOCKET_PATH_BYTES:
        text = f"{shown(place)}: a Unix socket path takes at most {MAX_SOCKET_PATH_BYTES} bytes, and no NUL"
        raise CliError(text, ExitCode.USAGE)
    path = Path(place)
    return Endpoint(path.name.removesuffix(SOCKET_SUFFIX), path, named=True)


def public(url: str) -> str:
    """Returns the URL of metrics without user, password, query and fragment, which may be secrets; others unchanged."""
    if not url.startswith((METRICS, *_HTTP)):
        return url
    before, separator, rest = url.partition("://")
    place, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{before}{separator}{place.rpartition('@')[2]}{slash}{path}"


def _metrics_of(text: str) -> Endpoint:
    """Returns the endpoint of an engine's metrics; without a path that is /metrics."""
    try:
        url = urlsplit(text)
        port = url.port  # raises ValueError
    except ValueError:
        port, url = None, urlsplit("")
    known_port = port or url.scheme != "metrics"
    if not url.hostname or not known_port or "@" in url.netloc or url.fragment or not _URL.fullmatch(text):
        text = (
            f"{shown(public(text))}: write {METRICS}host:port, or the URL of the metrics, as in "
            "http://host:port/metrics, without user and password"
        )
        raise CliError(text, ExitCode.USAGE)
    scheme = "http" if url.scheme == "metrics" else url.scheme
    path = "/metrics" if url.path in {"", "/"} else url.path
    remote = url._replace(scheme=scheme, path=path).geturl()
    return Endpoint(url.netloc, None, named=True, remote=remote, host_name=url.hostname)


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
    hint = near(name, names) or "; kvctl agents lists them"
    return missing(directory) or f"no agent named {name} in {directory}{hint}"


def missing(directory: Path) -> str:
    """Returns an error text if KVCTL_SOCKET_DIR does not name a directory; "" otherwise."""
    if not os.environ.get(SOCKET_DIR_VARIABLE) or directory.is_dir():
        return ""
    wrong = "is not a directory" if directory.exists() else "does not exist"
    return f"{SOCKET_DIR_VARIABLE} names {directory}, which {wrong}"


def probe(path: Path, trusted: Set[int] | None = None) -> int:
    """Tries to connect to a Unix socket; returns 0 if a process listens on it, else the errno.

    Args:
        trusted: `check_path` of its directory, if they are known.

    Raises:
        UntrustedPathError: as for `connect_unix`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        try:
            connect_unix(client, path, trusted)
        except BlockingIOError:
            return 0  # a full backlog means that the listener is alive and busy
        except UntrustedPathError:
            raise
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def agent_pid(socket: Path) -> int | None:
    """Returns the PID of the process of the agent with this admin socket, which an observer may serve in its place.

    Returns None if the process has ended, or is in another PID namespace.
    """
    lock = lock_path(socket)
    try:
        pid, status = _noted_pid(lock), lock.stat()
        # The number belongs to another process if the agent has ended or is in another PID namespace.
        return pid if any(os.path.samestat(status, each) for each in _open_files(pid)) else None
    except (OSError, ValueError):
        return None


def stopped_pid(socket: Path) -> int | None:
    """Returns what `agent_pid` does if that process is stopped, as by SIGSTOP; None if it is not.

    Of a process that runs, the open files are not looked at: an observer of many agents has thousands.
    """
    try:
        return agent_pid(socket) if _is_stopped(_noted_pid(lock_path(socket))) else None
    except (OSError, ValueError):
        return None


def _noted_pid(lock: Path) -> int:
    with lock.open("rb") as file:
        return int(file.readline(_MAX_PID_BYTES))


def listener_pid(path: Path) -> int | None:
    """Returns the id of the process that listens on a Unix socket.

    Returns None if there is none, it is not visible, or it cannot be asked: the path is too long for a socket, or this
    process has no file descriptor left.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
            client.connect(os.fspath(path))
            pid: int = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    except OSError:
        return None
    return pid or None


def _is_stopped(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return bool(words) and words[0] in _STOPPED_STATES


def _open_files(pid: int) -> Iterator[os.stat_result]:
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            try:
                yield entry.stat()
            except OSError:  # closed meanwhile, or not a file
                continue


def matches(labels: Mapping[str, str], status: Mapping[str, Any]) -> bool:
    """Returns whether an agent, whose answer to `status` is given, has all of these labels."""
    carried = {key: str(value) for key, value in status["rank"].items()}
    carried |= {key: str(status[key]) for key in ("name", "role", "version", "device")}
    carried["host"] = str(status.get("host", ""))  # older agents do not tell it
    return all(carried.get(key) == value for key, value in labels.items())
