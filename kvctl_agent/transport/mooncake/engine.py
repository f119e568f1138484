"""Adapter for Mooncake's Python binding, which works around these properties of the engine:

- Most builds ignore the protocol passed to `initialize` and use RDMA if there is a device, else TCP, without an error.
  The protocol depends on environment variables and the wheel, which are both checked here.
- The engine listens on all interfaces, and any client that reaches its ports may write registered memory. For peers on
  one host, its listeners are bound to the loopback device.
- Its destructor holds the GIL until the listener's `accept` times out (1 s), or the read from a silent client (5 s).
  `stop` shortens both to milliseconds.
- It prints an error on every start, also if it succeeds. The output is used only for the text of a failed start.
"""

from __future__ import annotations

import contextlib
import os
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
from kvctl_agent.transport.captured_stderr import captured_stderr
from kvctl_agent.transport.device_map import device_name
from kvctl_agent.transport.fork_safety import disown_in_children
from kvctl_agent.transport.mooncake.wheels import CPU_WHEEL, import_engine
from kvctl_agent.transport.registration_errors import explain_refusal

LOOPBACK_HOST = "127.0.0.1"

_INFINIBAND = Path("/sys/class/infiniband")
_FALSE_ALARMS = (b"Logging before InitGoogleLogging()", b"Local segment descriptor not found")
_STOP_S = 0.005
_KICK_S = 0.05
_EMPTY_S = 5.0
_starting = threading.Lock()


class Protocol(NamedTuple):
    """What makes Mooncake use a protocol: a variable, and a build that has it (`flag` of its module; "" for all)."""

    variable: str
    flag: str


PROTOCOLS = {
    "tcp": Protocol("MC_FORCE_TCP", ""),
    "rdma": Protocol("", ""),
    "nvlink": Protocol("MC_FORCE_MNNVL", "SUPPORT_MNNVL"),
    "nvlink_intra": Protocol("MC_INTRANODE_NVLINK", "SUPPORT_INTRA_NVLINK"),
    "efa": Protocol("", "SUPPORT_EFA"),
}


class Engine:
    """A Mooncake engine that is ready for use.

    Attributes:
        wheel: the wheel it comes from, with its version.
        session: "host:port" by which peers know it.
        private: its listeners accept this host's connections only.
        cuda: it was built to reach GPU memory; which memory is such, it asks the driver.
        submit: (session, local address, remote address, bytes) → number of a posted entry, 0 if it was refused.
            Never waits for a peer whose session is open.
        check: entry → 1 done (frees it), -1 failed (frees it), 0 or -2 still in flight.
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

    def register(self, regions: Sequence[Region]) -> None:
        """Registers memory; adjacent regions are one by now.

        Raises:
            TransportUnavailable: it is a GPU's, and this build would take it for the host's.
            TransportError: it overlaps what is registered, or the network card or the driver refuses it.
        """
        device = max((region.device for region in regions), default=HOST)
        if device != HOST and not self.cuda:
            raise TransportUnavailable(
                f"mooncake: {self.wheel} cannot reach memory of {device_name(device)}: pip uninstall -y {CPU_WHEEL} && "
                f"pip install mooncake-transfer-engine-cuda13 (mooncake-transfer-engine for CUDA 12)"
            )
        addrs = [region.addr for region in regions]
        with captured_stderr() as said:
            code = self._engine.batch_register_memory(addrs, [region.nbytes for region in regions])
        if code:
            why = explain_refusal(said.decode("utf-8", "replace"), device)
            raise TransportError(
                f"mooncake: cannot register {len(regions)} regions, {sum(region.nbytes for region in regions)} bytes "
                f"(code {code}){why or ': they must not overlap each other or what was registered before'}"
            )
        self._registered += addrs

    def open(self, session: str) -> str:
        """Open a session. The call waits for the peer's engine, so it needs a thread of its own.

        Returns:
            "", or the reason of the failure.
        """
        engine, submit, check = self._engine, self.submit, self.check
        # Without the engine's lock, which the calls below would hold while they wait for a stopped peer.
        code = engine.send_probe(session)
        if code:
            return f"nobody answers at {session} (code {code})"
        entry = submit(session, 0, 0, 0)
        if not entry:
            return f"{session} does not tell its memory"
        deadline = time.monotonic() + _EMPTY_S
        while check(entry) == 0:  # an entry of no bytes is complete when it is posted
            if time.monotonic() > deadline:
                return f"{session} did not complete an entry of no bytes within {_EMPTY_S:g} s"
        return ""

    def stop(self) -> None:
        """Unregister all memory and stop the engine within milliseconds; entries in flight are abandoned."""
        if self._registered:
            self._engine.batch_unregister_memory(self._registered)
        for number in self._listeners:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(_STOP_S * 1e6)))
        for _, one in _sockets():
            with one, contextlib.suppress(OSError):
                if one.getsockname()[1] == self._port and not _listens(one):
                    one.shutdown(socket.SHUT_RDWR)
        # The accept under way still has the old timeout.
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self._port), timeout=_KICK_S).close()
        del self.submit, self.check, self._engine


def start(protocol: str, device: str, host: str) -> Engine:
    """Start an engine that peers reach at `host`.

    Raises:
        ConfigError: no such protocol or device.
        TransportUnavailable: Mooncake is missing, or this wheel or machine has not what the protocol needs.
        TransportError: the engine cannot start; ends with what it said.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"transport_params: mooncake has no protocol {protocol!r}; allowed: {', '.join(PROTOCOLS)}")
    module, wheel = import_engine()
    _check_protocol(module, wheel, protocol, device)
    with _starting, _environment(PROTOCOLS[protocol].variable), captured_stderr(less=_FALSE_ALARMS) as said:
        before = {number for number, one in _sockets(close=True)}
        engine = module.TransferEngine()
        disown_in_children(engine)
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, device.replace("+", ","))
        port = engine.get_rpc_port() if code == 0 else 0
        fresh = [number for number, one in _sockets(close=True) if number not in before and _listens_at(number)]
    if code:
        text = said.decode("utf-8", "replace").strip()
        raise TransportError(f"{wheel} could not start with protocol {protocol} at {host} (code {code}): {text}")
    bound = [_bind_to_loopback(number) for number in fresh] if host == LOOPBACK_HOST else []
    return Engine(wheel, engine, f"{host}:{port}", fresh, bool(bound) and all(bound), _knows_cuda(module, wheel))


def _knows_cuda(module: ModuleType, wheel: str) -> bool:
    """Older builds do not say."""
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
    """Exactly the one variable that picks the protocol, while the engine looks."""
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


def _sockets(close: bool = False) -> list[tuple[int, socket.socket]]:
    """Copies of this process's internet sockets with their original numbers; closed at once if only those matter."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers are wanted, not paths
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # gone meanwhile
            continue
        if one.family in (socket.AF_INET, socket.AF_INET6):
            found.append((int(name), one))
            if not close:
                continue
        one.close()
    return found


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listens_at(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as one:
        return _listens(one)


def _bind_to_loopback(number: int) -> bool:
    """True if the listener now refuses what does not come from this host."""
    try:
        with socket.socket(fileno=os.dup(number)) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    except OSError:  # a kernel before 5.7 asks for a capability
        return False
    return True
