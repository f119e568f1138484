"""What the process of a rank does for `kvctl preflight`: host checks, and writes over the transport."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import numpy as np

from kvctl.health.host import engines, system
from kvctl.health.host.view import HostView
from kvctl.lab.preflight.reach import Listener, own_address, reach
from kvctl.lab.ranks.request import Role
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.addresses import ip_address
from kvctl_agent.contract.admin import socket_dir
from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.snapshots import PeerRow
from kvctl_agent.device.base import Device
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import KvctlError
from kvctl_agent.host.nics import HostNics
from kvctl_agent.memory.allocations import allocate
from kvctl_agent.memory.region import Region
from kvctl_agent.observer.documents import Identity
from kvctl_agent.observer.nics import NIC_SETTINGS, HostReading, NicQuery
from kvctl_agent.observer.process_facts import ProcessFacts
from kvctl_agent.runtime.liveness import host_identity
from kvctl_agent.telemetry.region import Header
from kvctl_agent.transport.base import Transport, described
from kvctl_agent.transport.cost_probe import DEVICE_BIG_BYTES, interconnect_of, write_once_us
from kvctl_agent.transport.environment import has_infiniband, prefer_family_of, prepare_environment
from kvctl_agent.transport.registry import open_transport

_MEMORY_BYTES = 64 << 20
_LEAST_BYTES = 64 << 10
_SMALL_BYTES = 64
_ROUNDS = 10
_LONG_US = 20_000  # a write that takes as long is large enough
_BUDGET_S = 0.3
_MOVED_BYTES = 96 << 20  # that counters are compared with, if the connection is fast enough


class Worker:
    """The process of one rank; its methods run on the main thread.

    Those that return a dictionary carry out a command, which has their name, and answer it; failures of a transfer are
    part of the answer. They raise KvctlError if the process cannot be used.

    Attributes:
        attentive: whether a peer may be writing, so that `progress` must be called without pauses.
    """

    def __init__(self) -> None:
        self.attentive = False
        self._transport: Transport | None = None
        self._device: Device | None = None
        commands = self.begin, self.clock, self.reach, self.expect, self.write, self.check, self.devices
        self._commands: dict[str, Callable[..., dict[str, Any]]] = {each.__name__: each for each in commands}

    def handle(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out a command and returns its answer."""
        return self._commands[command](**arguments)

    def progress(self) -> None:
        """Lets the transport make progress, as the threads of an agent do."""
        if self._transport is not None:
            self._transport.progress()

    def close(self) -> None:
        """Closes the transport. The memory is freed with the process: writes that have not ended may still use it."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            transport.close()

    def begin(
        self,
        name: str,
        role: Role,
        transport: str,
        params: dict[str, str],
        environment: dict[str, str],
        device: int,
        address: str,
        ports: Sequence[int],
        token: str,
        leads: bool,
    ) -> dict[str, Any]:
        """Opens the transport; the answer describes the process, its memory and its host.

        Args:
            address: address at which other hosts reach this one; "": the process finds it out.
            ports: TCP ports to listen on; a free one if there are none.
            token: what a connection to these ports must begin with, hexadecimal.
            leads: whether the process stands for its host: only then it listens and checks the host.
        """
        os.environ.update(environment)
        address = own_address(address)
        if ip_address(address) is not None:
            prefer_family_of(address)
        prepare_environment()
        self._name, self._role = name, role
        self._device = None if device == HOST else open_device(device)
        self._memory = allocate(_MEMORY_BYTES if self._device is None else DEVICE_BIG_BYTES, self._device)
        self._region = self._memory.region
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        self._content = generator.integers(0, 256, self._region.nbytes, np.uint8)
        self._fill(self._content)
        params = {"host": address, **params} if transport == "mooncake" else params
        self._transport = open_transport(transport, name, params, self._device)
        self._transport.register([self._region])
        listener = Listener(ports, token) if leads else None
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
            "device": device,
            "transport": described(self._transport),
            "facts": _facts(name) if leads else [],
            "devices": self.devices(()),
        }

    def clock(self) -> dict[str, Any]:
        """Answers with the wall clock."""
        return {"now_ns": time.time_ns()}

    def reach(self, address: str, ports: Sequence[int], token: str, timeout_s: float) -> dict[str, Any]:
        """Connects to each port of another host and exchanges messages; `timeout_s` is for each step."""
        return {"ports": [reach(address, port, token, timeout_s) for port in ports]}

    def expect(self) -> dict[str, Any]:
        """Clears the memory that a peer is about to write, and becomes attentive."""
        self._fill(np.zeros(self._region.nbytes, np.uint8))
        self.attentive = True
        return {}

    def check(self, nbytes: int) -> dict[str, Any]:
        """Answers with the checksum of the first bytes of the memory, after a peer has written them."""
        found = np.empty(min(nbytes, self._region.nbytes), np.uint8)
        if self._device is None:
            found[:] = self._region.array()[: found.nbytes]
        else:
            with self._device.visit():
                self._device.download(self._region.addr, found)
        self._fill(self._content)
        self.attentive = False
        return {"crc32": zlib.crc32(found.data)}

    def write(
        self, peer: str, metadata: str, addr: int, nbytes: int, device: int, same_host: bool, timeout_s: float
    ) -> dict[str, Any]:
        """Measures writes into the memory of a peer; `timeout_s` is for each of them."""
        assert self._transport is not None
        nics = HostNics()
        before = nics.read()
        found: dict[str, Any] = {"error": "", "crc32": None, "nbytes": 0}
        try:
            self._transport.connect(peer, bytes.fromhex(metadata))
            remote = Region(addr, nbytes)
            once_us = partial(write_once_us, self._transport, peer, self._region, remote, wait_s=timeout_s)
            found |= _measure(once_us, min(self._region.nbytes, nbytes))
            found["crc32"] = zlib.crc32(self._content[: found["nbytes"]].data)
        except KvctlError as error:
            found["error"] = str(error)
            with contextlib.suppress(KvctlError):
                self._transport.disconnect(peer)
        if found["crc32"] is not None and self._device is not None and device != HOST:
            protocol = str(self._transport.describe().get("protocol", ""))
            interconnect = interconnect_of(found["gb_per_s"], same_host, has_infiniband(), protocol)
            found["interconnect"] = interconnect._asdict()
        return {**found, "before": before, "after": nics.read()}

    def devices(self, peers: Sequence[str]) -> dict[str, Any]:
        """Answers with the network devices, as an agent answers `nics`; `peers` are the addresses of other hosts."""
        transport = {} if self._transport is None else described(self._transport)
        variables = {name: os.environ[name] for name in NIC_SETTINGS if name in os.environ}
        pci = None if self._device is None else self._device.pci
        identity = Identity(host=socket.gethostname(), transport=transport, environment=variables, gpu_pci=pci)
        header = Header(0, os.getpid(), 0, 0, 0, 0, 0, self._role, self._name, "")
        rows = [{"endpoint": f"tcp://[{each}]:1" if ":" in each else f"tcp://{each}:1"} for each in peers]
        query = NicQuery(
            header,
            lambda: identity,
            lambda: cast(Sequence[PeerRow], rows),
            lambda: ProcessFacts(cpu_ns=0),
            HostReading(),
        )
        return dict(query())

    def _fill(self, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if self._device is None:
            self._region.array()[:] = content
        else:
            with self._device.visit():
                self._device.upload(self._region.addr, content)


def _measure(once_us: Callable[[int], float], most: int) -> dict[str, Any]:
    """Measures small writes for the latency, then larger and larger ones, of at most `most` bytes, for the rate.

    Returns:
        `first_ns`, of the first write, which waits for the connection; `latency_ns`, the shortest of a small write;
        `gb_per_s`, of the fastest large one; `nbytes`, the size of the large ones; `moved_bytes`, of all together.
    """
    first_us, latency_us = once_us(_SMALL_BYTES), min(once_us(_SMALL_BYTES) for _ in range(_ROUNDS))
    size = moved = _LEAST_BYTES
    while (least_us := once_us(size)) < _LONG_US and size < most:
        size = min(4 * size, most)
        moved += size
    started = time.monotonic()
    while (spent_s := time.monotonic() - started) < _BUDGET_S or (moved < _MOVED_BYTES and spent_s < 3 * _BUDGET_S):
        least_us = min(least_us, once_us(size))
        moved += size
    return {
        "first_ns": round(first_us * 1e3),
        "latency_ns": round(latency_us * 1e3),
        "gb_per_s": size / least_us / 1e3,
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
