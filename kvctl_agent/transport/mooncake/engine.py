"""Adapter for Mooncake's Python binding, which works around these properties of the engine:

- Most builds ignore the protocol passed to `initialize` and use RDMA if there is a device, else TCP, without an error.
  The protocol depends on environment variables and the wheel, which are both checked here.
- The engine listens on all interfaces, and any client that reaches its ports may write registered memory. For peers on
  one host, its listeners are bound to the loopback device.
- It never looks at a connection to a peer between two entries, so connections to peers that have ended stay open.
  `close_ended` lets an entry fail on each.
- Its destructor holds the GIL until the listener's `accept` times out (1 s), or the read from a silent client (5 s).
  `stop` shortens both to milliseconds.
- It prints an error on every start, also if it succeeds. The output is used only for the text of a failed start.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import ConfigError, TransportError, TransportUnavailable
from kvctl_agent.memory.region import Region
from kvctl_agent.transport.device_map import device_name
from kvctl_agent.transport.engine_errors import captured_stderr, explain_refusal, unavailable
from kvctl_agent.transport.environment import prepare_environment
from kvctl_agent.transport.fork_safety import disown_in_children

LOOPBACK_HOST = "127.0.0.1"

_INFINIBAND = Path("/sys/class/infiniband")
_FALSE_ALARMS = (b"Logging before InitGoogleLogging()", b"Local segment descriptor not found")
_STOP_S = 0.005
_KICK_S = 0.05
_EMPTY_S = 5.0
_METADATA = 1  # type of a request for the segment's description
_USE_S = 1.0
_USE_BYTES = 1 << 24
_CLOSE_WAIT = 8  # state of a TCP connection that the other end has closed
_BYTE = ctypes.create_string_buffer(1)
_starting = threading.Lock()


class Protocol(NamedTuple):
    """Requirements of one of the engine's protocols.

    Attributes:
        variable: Environment variable that selects the protocol; "" if none does.
        flag: Attribute that builds with support for the protocol set to True; "" if every build supports it.
    """

    variable: str
    flag: str


PROTOCOLS = {
    "tcp": Protocol("MC_FORCE_TCP", ""),
    "rdma": Protocol("", ""),
    "nvlink": Protocol("MC_FORCE_MNNVL", "SUPPORT_MNNVL"),
    "nvlink_intra": Protocol("MC_INTRANODE_NVLINK", "SUPPORT_INTRA_NVLINK"),
    "efa": Protocol("", "SUPPORT_EFA"),
}


class Use(NamedTuple):
    """What a running engine says of itself.

    Attributes:
        protocol: Protocol of its transfers, which need not be the one that it was started with; "" if unknown.
    """

    protocol: str
    devices: list[str]


class Engine:
    """A Mooncake engine that is ready for use.

    Attributes:
        session: "host:port", the name under which peers open a session to this engine.
        private: Whether its listeners accept only connections from this host.
        cuda: Whether it was built to access GPU memory, which it recognises by asking the driver.
        submit: (session, local address, remote address, bytes) -> number of the posted entry, 0 if it was rejected.
            Never waits for a peer whose session is open.
        check: entry -> 1 done (frees it), -1 failed (frees it), 0 or -2 still in flight.
    """

    def __init__(self, wheel: str, engine: Any, session: str, listeners: list[int], private: bool, cuda: bool) -> None:
        self.wheel = wheel
        self.session = session
        self.private = private
        self.cuda = cuda
        self.submit: Callable[[str, int, int, int], int] = engine.transfer_submit_write
        self.check: Callable[[int], int] = engine.transfer_check_status
        self._engine = engine
        self._port = int(session.rpartition(":")[2])
        self._listeners = listeners
        self._registered: list[int] = []
        self._data_addresses: dict[str, tuple[str, int]] = {}

    def register(self, regions: Sequence[Region]) -> None:
        """Registers regions with the engine. Adjacent regions must have been merged.

        Raises:
            TransportUnavailable: the memory is a GPU's, and this build would treat it as the host's.
            TransportError: a region overlaps registered memory, or the network card or the driver rejects it.
        """
        device = max((region.device for region in regions), default=HOST)
        if device != HOST and not self.cuda:
            raise TransportUnavailable(
                f"mooncake: {self.wheel} cannot reach memory of {device_name(device)}: pip uninstall -y {CPU_WHEEL} && "
                f"pip install mooncake-transfer-engine-cuda13 (mooncake-transfer-engine for CUDA 12)"
            )
        addrs = [region.addr for region in regions]
        with captured_stderr() as output:
            code = self._engine.batch_register_memory(addrs, [region.nbytes for region in regions])
        if code:
            why = explain_refusal(output.decode("utf-8", "replace"), device)
            raise TransportError(
                f"mooncake: cannot register {len(regions)} regions, {sum(region.nbytes for region in regions)} bytes "
                f"(code {code}){why or ': they must not overlap each other or registered memory'}"
            )
        self._registered += addrs

    def open(self, session: str) -> str:
        """Opens a session to a peer's engine. The call waits for that engine, so it needs a thread of its own.

        Returns:
            "" if the session is open, else the reason of the failure.
        """
        engine, submit, check = self._engine, self.submit, self.check
        # The probe takes no lock of the engine; the calls below would hold it while they wait for a stopped peer.
        code = engine.send_probe(session)
        if code:
            return f"no engine answers at {session} (code {code})"
        entry = submit(session, 0, 0, 0)
        if not entry:
            return f"{session} does not send its memory layout"
        deadline = time.monotonic() + _EMPTY_S
        while check(entry) == 0:  # an entry of no bytes is complete when it is posted
            if time.monotonic() > deadline:
                return f"{session} did not complete an entry of no bytes within {_EMPTY_S:g} s"
        described = _description(session)
        with contextlib.suppress(LookupError, TypeError, ValueError):
            self._data_addresses[session] = str(described["tcp_data_host"]), int(described["tcp_data_port"])
        return ""

    def close_ended(self, session: str) -> bool:
        """Lets the engine close its idle connections to a peer without entries in flight, if the peer has closed them.

        Each connection takes an entry, for address 0: should another engine listen at the peer's port by now, it
        rejects the entry. The engine logs two lines for each.

        Returns:
            Whether the peer has closed its end, or there are no connections.
        """
        left = self._connections(session)
        while left and all(state == _CLOSE_WAIT for state in left):
            entry = self.submit(session, ctypes.addressof(_BYTE), 0, 1)
            deadline = time.monotonic() + _EMPTY_S
            while entry and self.check(entry) == 0 and time.monotonic() < deadline:
                time.sleep(0.001)
            before, left = left, self._connections(session)
            if len(left) >= len(before):  # they belong to another engine of this process
                return True
        return not left

    def _connections(self, session: str) -> list[int]:
        """Returns the TCP state of each connection of this process to the data port of a peer's engine."""
        address = self._data_addresses.get(session)
        states = []
        for _, copy in _sockets() if address else ():
            with contextlib.suppress(OSError):  # not connected
                if copy.getpeername()[:2] == address:
                    states.append(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
        return states

    def use(self) -> Use:
        """Asks the engine for its protocol and devices, as peers do when they open a session (0.2 ms).

        The fields of the result are empty if it does not answer within a second, or not as version 0.3.13 does.
        """
        described = _description(self.session)
        with contextlib.suppress(LookupError, TypeError):
            return Use(str(described["protocol"]), [str(device["name"]) for device in described.get("devices") or ()])
        return Use("", [])

    def stop(self) -> None:
        """Unregisters all memory and stops the engine within milliseconds; entries in flight are abandoned."""
        if self._registered:
            self._engine.batch_unregister_memory(self._registered)
        for number in self._listeners:
            with contextlib.suppress(OSError), _copy(number) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_STOP_S * 1e6)))
        for _, copy in _sockets():
            with contextlib.suppress(OSError):
                if copy.getsockname()[1] == self._port and not _listens(copy):
                    copy.shutdown(socket.SHUT_RDWR)
        # The accept call in progress still has the old timeout.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self._port), timeout=_KICK_S).close()
        del self.submit, self.check, self._engine


def start(protocol: str, device: str, host: str) -> Engine:
    """Starts an engine.

    Args:
        protocol: A key of `PROTOCOLS`.
        device: RDMA devices to use, joined by "+"; "" for all.

    Raises:
        ConfigError: the protocol or a device is unknown.
        TransportUnavailable: Mooncake is missing, or this wheel or machine does not support the protocol.
        TransportError: the engine cannot start; the text ends with its output.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"transport_params: mooncake has no protocol {protocol!r}; allowed: {', '.join(PROTOCOLS)}")
    if ":" in host:
        os.environ.setdefault("MC_USE_IPV6", "1")  # read for every connection
        host = f"[{host}]"
    module, wheel = import_engine()
    _check_protocol(module, wheel, protocol, device)
    with _starting, _environment(PROTOCOLS[protocol].variable), captured_stderr(drop=_FALSE_ALARMS) as output:
        before = {_inode(copy) for _, copy in _sockets()}
        engine = module.TransferEngine()
        disown_in_children(engine)
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, device.replace("+", ","))
        port = engine.get_rpc_port() if code == 0 else 0
        fresh = [number for number, copy in _sockets() if _inode(copy) not in before and _listens(copy)]
    if code:
        text = output.decode("utf-8", "replace").strip()
        raise TransportError(f"{wheel} could not start with protocol {protocol} at {host} (code {code}): {text}")
    bound = [_bind_to_loopback(number) for number in fresh] if host == LOOPBACK_HOST else []
    return Engine(wheel, engine, f"{host}:{port}", fresh, bool(bound) and all(bound), _knows_cuda(module, wheel))


def _knows_cuda(module: ModuleType, wheel: str) -> bool:
    """Returns whether the build can access GPU memory, by its flag or, if it has none, by its wheel."""
    return bool(getattr(module, "SUPPORT_CUDA", not wheel.startswith(CPU_WHEEL)))


def _check_protocol(module: ModuleType, wheel: str, protocol: str, device: str) -> None:
    devices = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    if protocol == "rdma" and not devices:
        raise TransportUnavailable(
            f"mooncake: protocol rdma needs an RDMA device, and {_INFINIBAND} has none; "
            f"use transport_params protocol=tcp"
        )
    for name in filter(None, device.split("+")):
        if name not in devices:
            known = ", ".join(devices) or "none"
            raise ConfigError(f"transport_params: mooncake: no device {name!r}; this machine has: {known}")
    flag = PROTOCOLS[protocol].flag
    if flag and not getattr(module, flag, False):
        raise TransportUnavailable(
            f"mooncake: {wheel} was built without {protocol}; take another wheel, or transport_params protocol=tcp"
        )


@contextlib.contextmanager
def _environment(variable: str) -> Iterator[None]:
    """Sets the variable that selects the protocol, and unsets those of other protocols, within the block."""
    saved = {name: os.environ.pop(name, None) for name in {p.variable for p in PROTOCOLS.values()} - {""}}
    if variable:
        os.environ[variable] = "1"
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yields the descriptor number and a duplicate of each internet socket of this process.

    Other threads may close the socket itself at any time. The duplicate is closed as the iteration goes on.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, not paths
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            copy = _copy(int(name))
        except OSError:  # closed in the meantime
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                yield int(name), copy


def _copy(number: int) -> socket.socket:
    """Returns a duplicate of the engine's socket, which the caller must close.

    Raises:
        OSError: the engine has closed it.
    """
    duplicate = os.dup(number)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _description(session: str) -> dict[str, Any]:
    """Asks an engine for its description, as peers do; empty if it sends none within a second."""
    host, _, port = session.rpartition(":")
    with contextlib.suppress(OSError, ValueError, struct.error, RecursionError):
        with socket.create_connection((host.strip("[]"), int(port)), _USE_S) as client:
            client.sendall(struct.pack("<QB", 3, _METADATA) + b"{}")
            size, _ = struct.unpack("<QB", _exactly(client, 9))
            answer = json.loads(_exactly(client, min(size, _USE_BYTES) - 1))
        if isinstance(answer, dict):
            return answer
    return {}


def _exactly(client: socket.socket, size: int) -> bytes:
    """Receives `size` bytes.

    Raises:
        OSError: fewer arrived before the peer closed the connection, or none in time.
    """
    parts = bytearray()
    while len(parts) < size:
        received = client.recv(size - len(parts))
        if not received:
            raise ConnectionResetError("the engine closed the connection")
        parts += received
    return bytes(parts)


def _listens(copy: socket.socket) -> bool:
    return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _inode(copy: socket.socket) -> int:
    return os.fstat(copy.fileno()).st_ino


def _bind_to_loopback(number: int) -> bool:
    """Restricts a listener to connections from this host; returns whether the kernel permits that."""
    try:
        with _copy(number) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    except OSError:  # kernels before 5.7 require a capability
        return False
    return True


CPU_WHEEL = "mooncake-transfer-engine-non-cuda"
CUDA_WHEELS = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
MINIMUM = (0, 3, 13)
"""The oldest tested version. Its writes over TCP are done when the target has acknowledged their bytes; earlier
versions report them done once they are sent, so that a tag could overtake them."""

LIBRARIES = ("libibverbs1", "libnuma1", "libcurl4")

_NEEDED = (
    "initialize",
    "get_rpc_port",
    "register_memory",
    "batch_register_memory",
    "batch_unregister_memory",
    "send_probe",
    "transfer_submit_write",
    "transfer_check_status",
)

_CUDA = re.compile(r"\blib(?:cuda|cudart|nvidia-ml|cufile)\.so[\w.]*")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia")


def import_engine() -> tuple[ModuleType, str]:
    """Imports Mooncake's engine (25 ms).

    Three wheels install into the same folder: the wheel installed last is used, and removing one of them removes the
    files of all. Two of the wheels load CUDA during import. `import mooncake` may succeed where `mooncake.engine` lacks
    a library.

    Returns:
        The module, and the name and version of the wheel.

    Raises:
        TransportUnavailable: no wheel is installed, it is too old, it needs CUDA, or a library is missing.
        ConfigError: an environment variable is set that ends the process or loses bytes.
    """
    wheels = installed()
    if not wheels:
        raise unavailable("mooncake", ModuleNotFoundError("none of its three wheels is installed"))
    _check_versions(wheels)
    if "MC_LOG_DIR" in os.environ:
        raise ConfigError("mooncake: MC_LOG_DIR ends the process while the engine is imported; unset it")
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise ConfigError(
            "mooncake: with MC_TCP_PROTO=1 the target does not acknowledge bytes, so tags would overtake them: unset it"
        )
    prepare_environment()
    try:
        import mooncake.engine
    except ImportError as error:
        raise explain(error, wheels) from error
    lacking = [name for name in ("TransferEngine", "TransferOpcode") if not hasattr(mooncake.engine, name)]
    lacking += [name for name in _NEEDED if not hasattr(mooncake.engine.TransferEngine, name)]
    if lacking:
        raise TransportUnavailable(
            f"the binding of {_named(wheels)} lacks {', '.join(lacking)}; kvctl is known to work with "
            f"mooncake {_dotted(MINIMUM)}"
        )
    return mooncake.engine, _named(wheels)


def installed() -> dict[str, str]:
    """Returns the versions of Mooncake's wheels that are recorded as installed, by name of the wheel."""
    found = {}
    for wheel in (CPU_WHEEL, *CUDA_WHEELS):
        try:
            found[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def explain(error: ImportError, wheels: dict[str, str]) -> TransportUnavailable:
    """Returns the error to raise when `mooncake.engine` cannot be imported although `wheels` are installed."""
    library = _CUDA.search(str(error))
    if library is not None:
        present = [wheel for wheel in CUDA_WHEELS if wheel in wheels] or list(wheels)
        return TransportUnavailable(
            f"transport 'mooncake': {_named(wheels)} needs {library[0]}, which this machine lacks ({error}). Without "
            f"CUDA, install the wheel that does not need it: pip uninstall -y {' '.join([*present, CPU_WHEEL])} && "
            f"pip install '{CPU_WHEEL}>={_dotted(MINIMUM)}'; or run without an engine: --transport loopback"
        )
    if isinstance(error, ModuleNotFoundError):
        wheel = CPU_WHEEL if CPU_WHEEL in wheels and not _NVIDIA_DRIVER.exists() else next(iter(wheels))
        return TransportUnavailable(
            f"transport 'mooncake': {_named(wheels)} is recorded as installed, but its files are gone ({error}): "
            f"Mooncake's wheels share one folder, and removing one removes it for all. "
            f"pip install --force-reinstall --no-deps '{wheel}>={_dotted(MINIMUM)}'"
        )
    return unavailable("mooncake", error, others=LIBRARIES)


def _check_versions(wheels: dict[str, str]) -> None:
    old = {wheel: version for wheel, version in wheels.items() if _release(version) < MINIMUM}
    if old:
        wheel = next(iter(old))
        raise TransportUnavailable(
            f"transport 'mooncake' needs version {_dotted(MINIMUM)} or newer, but {_named(old)} is installed: "
            f"pip install --upgrade '{wheel}>={_dotted(MINIMUM)}'"
        )


def _release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (0, 3, 13) of "0.3.13.post1"."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _named(wheels: dict[str, str]) -> str:
    return " and ".join(f"{wheel} {version}" for wheel, version in wheels.items())
