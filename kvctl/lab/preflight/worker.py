"""What the process of a rank does for `kvctl preflight`: host checks, and writes over the transport."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np

from kvctl.health.host import engines, system
from kvctl.health.host.view import HostView
from kvctl.lab.preflight import messages
from kvctl.lab.preflight.reach import Listener, own_address, reach
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.addresses import ip_address
from kvctl_agent.contract.admin import socket_dir
from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.snapshots import PeerRow
from kvctl_agent.device.base import Device
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeadlineExceeded, KvctlError
from kvctl_agent.host.nics import HostNics
from kvctl_agent.memory.allocations import allocate
from kvctl_agent.memory.region import Region
from kvctl_agent.observer.documents import Identity
from kvctl_agent.observer.nics import NIC_SETTINGS, HostReading, NicQuery
from kvctl_agent.observer.process_facts import ProcessFacts
from kvctl_agent.runtime.liveness import host_identity
from kvctl_agent.telemetry.region import Header
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.cost_probe import interconnect_of
from kvctl_agent.transport.environment import has_infiniband, prefer_family_of, prepare_environment
from kvctl_agent.transport.registry import open_transport

_MEMORY_BYTES = 64 << 20
_DEVICE_MEMORY_BYTES = 256 << 20  # with 16 MiB, NVLink reaches half its rate
_LEAST_BYTES = 64 << 10
_SMALL_BYTES = 64
_ROUNDS = 20
_LONG_S = 0.02  # a write that takes as long is large enough
_BUDGET_S = 0.3
_MOVED_BYTES = 96 << 20  # that counters are compared with, if the connection is fast enough


class Worker:
    """The process of one rank; its methods run on the main thread.

    Attributes:
        attentive: whether a peer may be writing, so that `progress` must be called without pauses.
    """

    def __init__(self) -> None:
        self.attentive = False
        self._transport: Transport | None = None
        self._device: Device | None = None
        self._handlers: dict[type, Callable[[Any], dict[str, Any]]] = {
            messages.Begin: self._begin,
            messages.Clock: lambda _: {"now_ns": time.time_ns()},
            messages.Reach: self._reach,
            messages.Expect: self._expect,
            messages.Write: self._write,
            messages.Check: self._check,
            messages.Devices: self._devices,
        }

    def handle(self, command: messages.Command) -> dict[str, Any]:
        """Carries out a command and returns its answer; failures of a transfer are part of the answer.

        Raises:
            KvctlError: the process cannot be used.
        """
        return self._handlers[type(command)](command)

    def progress(self) -> None:
        """Lets the transport make progress, as the threads of an agent do."""
        if self._transport is not None:
            self._transport.progress()

    def close(self) -> None:
        """Closes the transport. The memory is freed with the process: writes that have not ended may still use it."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.close()

    def _begin(self, begin: messages.Begin) -> dict[str, Any]:
        os.environ.update(begin.environment)
        address = own_address(begin.address)
        if ip_address(address) is not None:
            prefer_family_of(address)
        prepare_environment()
        self._rank = begin
        self._device = None if begin.device == HOST else open_device(begin.device)
        self._memory = allocate(_MEMORY_BYTES if self._device is None else _DEVICE_MEMORY_BYTES, self._device)
        self._region = self._memory.region
        generator = np.random.default_rng(zlib.crc32(begin.name.encode()))
        self._content = generator.integers(0, 256, self._region.nbytes, np.uint8)
        self._fill(self._content)
        params = {"host": address, **begin.params} if begin.transport == "mooncake" else begin.params
        self._transport = open_transport(begin.transport, begin.name, params, self._device)
        self._transport.register([self._region])
        listener = Listener(begin.ports, begin.token) if begin.leads else None
        return {
            "version": VERSION,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "processes": host_identity(),
            "address": address,
            "ports": [] if listener is None else listener.ports,
            "ports_refused": {} if listener is None else listener.refused,
            "metadata": self._transport.metadata().hex(),
            "addr": self._region.addr,
            "nbytes": self._region.nbytes,
            "device": begin.device,
            "transport": self._described(),
            "facts": _facts(begin.name) if begin.leads else [],
            "devices": self._devices(messages.Devices()),
        }

    def _reach(self, asked: messages.Reach) -> dict[str, Any]:
        return {"ports": [reach(asked.address, port, asked.token, asked.timeout_s) for port in asked.ports]}

    def _expect(self, _: messages.Expect) -> dict[str, Any]:
        self._fill(np.zeros(self._region.nbytes, np.uint8))
        self.attentive = True
        return {}

    def _check(self, asked: messages.Check) -> dict[str, Any]:
        found = np.empty(min(asked.nbytes, self._region.nbytes), np.uint8)
        if self._device is None:
            found[:] = self._region.array()[: found.nbytes]
        else:
            with self._device.visit():
                self._device.download(self._region.addr, found)
        self._fill(self._content)
        self.attentive = False
        return {"crc32": zlib.crc32(found.data)}

    def _write(self, asked: messages.Write) -> dict[str, Any]:
        assert self._transport is not None
        nics = HostNics()
        before = nics.read()
        found: dict[str, Any] = {"error": "", "crc32": None, "nbytes": 0}
        try:
            self._transport.connect(asked.peer, bytes.fromhex(asked.metadata))
            found |= _measure(
                self._transport, asked.peer, self._region, Region(asked.addr, asked.nbytes), asked.timeout_s
            )
            found["crc32"] = zlib.crc32(self._content[: found["nbytes"]].data)
        except KvctlError as error:
            found["error"] = str(error)
            with contextlib.suppress(KvctlError):
                self._transport.disconnect(asked.peer)
        if found["crc32"] is not None and HOST not in (self._rank.device, asked.device):
            protocol = str(self._transport.describe().get("protocol", ""))
            interconnect = interconnect_of(found["gb_per_s"], asked.same_host, has_infiniband(), protocol)
            found["interconnect"] = interconnect._asdict()
        return {**found, "before": before, "after": nics.read()}

    def _devices(self, asked: messages.Devices) -> dict[str, Any]:
        transport = self._described()
        variables = {name: os.environ[name] for name in NIC_SETTINGS if name in os.environ}
        pci = None if self._device is None else self._device.pci
        identity = Identity(host=socket.gethostname(), transport=transport, environment=variables, gpu_pci=pci)
        header = Header(0, os.getpid(), 0, 0, 0, 0, 0, self._rank.role, self._rank.name, "")
        peers = [
            {"endpoint": f"tcp://[{address}]:1" if ":" in address else f"tcp://{address}:1"} for address in asked.peers
        ]
        query = NicQuery(
            header,
            lambda: identity,
            lambda: cast(Sequence[PeerRow], peers),
            lambda: ProcessFacts(cpu_ns=0),
            HostReading(),
        )
        return dict(query())

    def _described(self) -> dict[str, str | list[str]]:
        described = {} if self._transport is None else self._transport.describe()
        return {
            key: [f"{name}={text}" for name, text in value.items()]
            if isinstance(value, dict)
            else list(map(str, value))
            if isinstance(value, list | tuple)
            else str(value)
            for key, value in described.items()
        }

    def _fill(self, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if self._device is None:
            self._region.array()[:] = content
        else:
            with self._device.visit():
                self._device.upload(self._region.addr, content)


def _measure(transport: Transport, peer: str, local: Region, remote: Region, timeout_s: float) -> dict[str, Any]:
    """Writes to a peer: small writes for the latency, then larger and larger ones for the rate.

    Returns:
        `first_ns`, of the first write, which waits for the connection; `latency_ns`, the shortest of a small write;
        `gb_per_s`, of the fastest large one; `nbytes`, the size of the large ones; `moved_bytes`, of all together.

    Raises:
        DeadlineExceeded: a write was not complete in time.
        PeerDisconnected, TransportError: the transport failed.
    """
    moved = 0

    def write(nbytes: int) -> int:
        nonlocal moved
        here, there, sizes = (np.array([value], np.uint64) for value in (local.addr, remote.addr, nbytes))
        began = time.monotonic_ns()
        posted = transport.write(peer, here, there, sizes, None)
        while not posted.poll():
            if time.monotonic_ns() - began > timeout_s * 1e9:
                posted.release()
                raise DeadlineExceeded(f"a write of {nbytes} bytes to {peer} was not complete after {timeout_s:g} s")
            time.sleep(0)
        moved += nbytes
        return max(1, time.monotonic_ns() - began)

    first_ns = write(_SMALL_BYTES)
    started = time.monotonic()
    latency_ns = write(_SMALL_BYTES)
    for _ in range(_ROUNDS):
        if time.monotonic() - started > _BUDGET_S:
            break
        latency_ns = min(latency_ns, write(_SMALL_BYTES))
    most = min(local.nbytes, remote.nbytes)
    size = min(_LEAST_BYTES, most)
    while (took_ns := write(size)) < _LONG_S * 1e9 and size < most:
        size = min(4 * size, most)
    started = time.monotonic()
    while (spent_s := time.monotonic() - started) < _BUDGET_S or (moved < _MOVED_BYTES and spent_s < 3 * _BUDGET_S):
        took_ns = min(took_ns, write(size))
    return {
        "first_ns": first_ns,
        "latency_ns": latency_ns,
        "gb_per_s": size / took_ns,
        "nbytes": size,
        "moved_bytes": moved,
    }


def _facts(name: str) -> list[dict[str, Any]]:
    """Returns the results of the host checks that concern a worker, as JSON values."""
    host = HostView()
    found = [
        *engines.device_facts(host),
        *system.limit_facts(host),
        *engines.engine_facts(host, {name: host.environ}),
        *system.environment_facts(host, socket_dir(), {}),
    ]
    return [{**asdict(fact), "severity": int(fact.severity)} for fact in found]
