"""Connections of a prefill rank: connects peers, maps their memory and measures the cost of writing to them.

The control loop connects and drops peers. Measurements run between parts, on a thread of their own: a busy connection
cannot be measured, and a connection that is being measured must not be in use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from kvctl_agent.contract.choices import BULK, SLICE
from kvctl_agent.device.base import Device, Export, Geometry
from kvctl_agent.errors import DeadlineExceeded, DeviceError, KvctlError, LocalProtocolError, TransportError
from kvctl_agent.layout.parallel import RankCoord, local_shards
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.memory.allocations import HugePageMemory, StagingBuffers
from kvctl_agent.memory.device_copier import gather_geometries
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import Region
from kvctl_agent.paths.calibration import measure_copies, measure_device_copies, measure_direct, memcpy_gb_per_s_within
from kvctl_agent.paths.connection_model import ConnectionModel, CopyCost, DirectCost
from kvctl_agent.paths.contiguous_runs import PlaneRuns
from kvctl_agent.paths.direct import PROGRAMS, geometries
from kvctl_agent.paths.path_chooser import AUTO, PathChooser
from kvctl_agent.paths.peer_connection import MappedMemory, PeerConnection
from kvctl_agent.protocol.messages import PeerInfo
from kvctl_agent.runtime.liveness import host_identity
from kvctl_agent.runtime.transfers import Transfers
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.cost_probe import LEAST_ROUNDS, ConnectionCost, measure_connection

_FABRIC = "fabric"
_MEASURE_S = 10.0
_COPIES_BYTES = 64 << 20  # larger than the caches


class MeasuredCost(NamedTuple):
    """Result of the latest measurement of a connection, and its monotonic time."""

    cost: ConnectionCost
    at_ns: int


class Measurement(NamedTuple):
    """A measurement of a connection, pending or done.

    Attributes:
        peer: agent name of the peer.
        lane: name of the transport.
        asked_ns: monotonic time at which somebody last asked for it.
        cost: the cost of the connection, or the KvctlError for which it could not be measured.
    """

    peer: str
    lane: str
    asked_ns: int
    cost: Future[ConnectionCost]


class PeerConnections:
    """Connections by peer; the path chooser is calibrated when the first peer is connected.

    Attributes:
        by_peer: connections, written by the control loop only; entries are replaced, never changed.
        measured: latest measurements by peer; any thread may read them.
        memory_gb_per_s: memcpy rate of one thread on this machine in GB/s; None until the chooser is calibrated.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        pool: KVPool,
        chooser: PathChooser,
        recorder: FlightRecorder,
        by_peer: dict[str, PeerConnection],
        *,
        buffers: StagingBuffers | None = None,
        transfers: Transfers | None = None,
        direct_programs: int | None = None,
        checksum: bool = False,
    ) -> None:
        """Creates the table of connections.

        Args:
            chooser: path chooser to calibrate.
            by_peer: empty mapping, shared with the transfers.
            buffers: staging buffers of a prefill rank; None on a decode rank.
            transfers: prefill: runs measurements of connections between parts.
            direct_programs: limit of the direct path's share of the device, as for `DirectPath`.
            checksum: whether parts are sent with checksums, whose kernels are compiled in advance.
        """
        self.by_peer = by_peer
        self._transfers = transfers
        self.measured: dict[str, MeasuredCost] = {}
        self.memory_gb_per_s: float | None = None
        self._scratch: dict[str, Region] = {}
        self._name = name
        self._transport = transport
        self._pool = pool
        self._buffers = buffers
        self._chooser = chooser
        self._recorder = recorder
        self._direct_programs = direct_programs or PROGRAMS
        self._calibrating = False
        self._checksum = checksum
        self._compiled: set[Geometry] = set()

    def connect(self, peer: str, info: PeerInfo, inputs: PlanInputs) -> None:
        """Connects `peer`, a decode rank; raises KvctlError if that is impossible."""
        split, coord = inputs.decode_split, RankCoord(*info.coord)
        shards = local_shards(inputs.shape, inputs.page_size * split, inputs.decode, coord)
        addresses = PoolAddresses.from_wire(info.pool, shards)
        addresses = addresses.at(local_shards(inputs.shape, inputs.page_size, inputs.decode, coord), split)
        self._transport.connect(peer, info.metadata)
        self._scratch[peer] = Region(info.scratch_base, info.scratch_bytes)
        before = self.by_peer.get(peer)
        self.by_peer[peer] = self._connection(peer, info, addresses, inputs.prefill_split)
        if before is not None:
            before.close()
        self.calibrate_once()

    def drop(self, peer: str) -> None:
        """Drops a peer; ignores unknown names. The peer's memory stays mapped while kernels use it."""
        connection = self.by_peer.pop(peer, None)
        if connection is not None:
            connection.close()
        self.measured.pop(peer, None)
        self._scratch.pop(peer, None)
        self._transport.disconnect(peer)

    def ended(self, info: PeerInfo) -> None:
        """Takes note that a peer's process has ended, so writes in flight to it end at once."""
        self._transport.ended(info.metadata)

    def close(self) -> None:
        """Unmaps the memory of all peers; to be called after the control loop has ended."""
        for connection in list(self.by_peer.values()):
            connection.close()

    def reaches(self, peer: str) -> bool:
        """Returns whether the peer's memory is mapped, so that the direct path can be used. Any thread may call it."""
        connection = self.by_peer.get(peer)
        return connection is not None and connection.mapping is not None

    def runs(self, peer: str, share: TransferSlice) -> tuple[PlaneRuns, ...]:
        """Returns the contiguous runs of parts of `share` for each plane; empty if the peer is not connected."""
        connection = self.by_peer.get(peer)
        return () if connection is None else connection.segments[share.segment].runs(share.heads)

    def _connection(self, peer: str, info: PeerInfo, addresses: PoolAddresses, split: int) -> PeerConnection:
        mapping, why_not = map_peer_memory(self._pool.device, info)
        common = self._transport, self._pool, addresses, info.ring_base
        try:
            connection = PeerConnection(peer, *common, mapping, why_not, split=split)
        except DeviceError as error:
            if mapping is not None:
                mapping.close()
            connection = PeerConnection(peer, *common, why_not=str(error), split=split)
        if self._pool.device is not None:
            text = f"direct by {connection.mapping.lane}" if connection.mapping else f"not direct: {connection.why_not}"
            self._recorder.record("direct", f"connection to {peer}: {text}", peer=peer)
        return connection

    def measure(self) -> ConnectionCost:
        """Measures the connection to the first connected peer between parts, and waits for the result.

        Raises:
            LocalProtocolError: no peer is connected or offers scratch memory, or this is a decode rank.
            DeadlineExceeded: the rank was too busy.
        """
        try:
            return self._begin(self._first(), self._measure).cost.result(_MEASURE_S)
        except KvctlError:
            raise
        except TimeoutError:
            text = f"{self._name}: measured no connection between parts within {_MEASURE_S:g} s"
            raise DeadlineExceeded(text) from None

    def begin(self, peer: str | None, big_bytes: int | None) -> Measurement:
        """Has the connection to `peer` (None: to the first peer) measured once, between parts.

        On a slow connection each kind of write is done only once, so that parts wait for a few seconds at most.

        Args:
            big_bytes: size of the large write; None for the default.

        Raises:
            LocalProtocolError: the peer is not connected, or this is a decode rank.
        """
        connection = self._first() if peer is None else self.by_peer.get(peer)
        if connection is None:
            known = ", ".join(sorted(self.by_peer)) or "none"
            raise LocalProtocolError(f"{self._name} is not connected to {peer!r:.80}; connected: {known}")
        return self._begin(connection, lambda connection: self._measure(connection, big_bytes, least_rounds=1))

    def _begin(self, connection: PeerConnection, measure: Callable[[PeerConnection], ConnectionCost]) -> Measurement:
        if self._transfers is None:
            raise LocalProtocolError(
                f"{self._name} is a decode rank: a connection is measured by its writer, a prefill rank"
            )
        cost: Future[ConnectionCost] = Future()

        def run() -> None:
            try:
                cost.set_result(measure(connection))
            except KvctlError as error:
                cost.set_exception(error)
            except Exception as error:  # a bug, which whoever waits reports
                cost.set_exception(TransportError(f"{type(error).__name__}: {error}"))

        self._transfers.run_between(run)
        return Measurement(connection.peer, connection.transport.name, time.monotonic_ns(), cost)

    def calibrate_once(self) -> None:
        """Has the chooser calibrated when the first peer is connected, if it chooses paths by cost.

        Parts wait meanwhile. On a device the kernels are compiled as well, so that no part waits for the compiler.
        """
        transfers = self._transfers
        kernels = self._checksum or self._chooser.path not in (BULK, SLICE)
        if self._pool.device is not None and transfers is not None and kernels:
            transfers.run_between(self._compile)
        costs_decide = self._chooser.path == AUTO and self._chooser.staging == "auto"
        if costs_decide and transfers is not None and self.by_peer and not self._calibrating:
            self._calibrating = True
            transfers.run_between(self.calibrate)

    def calibrate(self) -> None:
        """Measures the costs by which the setting `auto` chooses a path; runs between parts."""
        if self._chooser.model is not None:
            return
        try:
            connection = self._first()
            write = self._measure(connection)
            copy, direct = self._measure_copies(connection)
        except KvctlError as error:
            self._calibrating = False  # tried again with the next peer
            self._recorder.record("calibration", f"auto stages everything that cannot go direct: {error}", "warning")
            return
        self._chooser.model = ConnectionModel(write, copy, direct)
        text = f"one write {write.write_gb_per_s:.1f} GB/s, {write.descriptor_us(512):.1f} µs a descriptor of 512 bytes"
        if direct is not None:
            text += f", direct {direct.us_per_part:.0f} µs a part and {direct.us_per_mib:.2f} µs a MiB"
        self._recorder.record("calibration", f"connection to {connection.peer}: {text}")

    def _measure_copies(self, connection: PeerConnection) -> tuple[CopyCost, DirectCost | None]:
        """Measures the memcpy rate, the cost of row copies and, if the peer's memory is mapped, of the direct path."""
        with HugePageMemory(_COPIES_BYTES) as memory:
            self.memory_gb_per_s = memcpy_gb_per_s_within(memory.array)
            if self._pool.device is None:
                return measure_copies(memory.array), None
        assert self._buffers is not None
        copies = self._pool.device.copies()
        buffer = self._buffers.acquire(connection.peer)
        try:
            if buffer is None:
                raise LocalProtocolError(f"{self._name}: no staging buffer was free to measure copies with")
            staging = Region(buffer.span.addr, buffer.span.nbytes)
            copy, scratch = measure_device_copies(copies, self._source(), staging), self._scratch.get(connection.peer)
            if connection.mapping is None or scratch is None:
                return copy, None
            return copy, self._measure_direct(connection.mapping, scratch)
        finally:
            copies.close()  # waits for the copies; only then may the buffer be reused
            if buffer is not None:
                self._buffers.release(buffer)

    def _measure_direct(self, mapping: MappedMemory, scratch: Region) -> DirectCost:
        assert self._pool.device is not None
        mapping.acquire()
        copies = self._pool.device.copies()
        try:
            there = Region(mapping.translate(scratch.addr, scratch.nbytes), scratch.nbytes)
            return measure_direct(copies, self._source(), there, self._direct_programs)
        finally:
            copies.close()  # waits for the copies; only then may the memory be unmapped
            mapping.release()

    def _compile(self) -> None:
        """Compiles every kernel that parts of the present connections may need; runs between parts."""
        device = self._pool.device
        wanted: set[Geometry] = set()
        for connection in list(self.by_peer.values()):
            for segment in connection.segments:
                wanted |= gather_geometries(segment.local, segment.remote.shard)
            if connection.mapping:
                wanted |= geometries(connection.segments)
        if device is None or not wanted - self._compiled:
            return
        copies = device.copies()
        try:
            copies.prepare([*(wanted - self._compiled)])
            if self._checksum:
                copies.prepare([each for each in wanted - self._compiled if each.dst is None], checksum=True)
            self._compiled |= wanted
        except KvctlError as error:
            self._recorder.record("device", f"the copy kernels could not be compiled: {error}", "error")
        finally:
            copies.close()

    def _first(self) -> PeerConnection:
        for connection in list(self.by_peer.values()):
            return connection
        raise LocalProtocolError(f"{self._name} has no connection to measure: no peer is connected")

    def _measure(
        self, connection: PeerConnection, big_bytes: int | None = None, least_rounds: int = LEAST_ROUNDS
    ) -> ConnectionCost:
        scratch = self._scratch.get(connection.peer)
        if scratch is None or not scratch.nbytes or self._buffers is None:
            raise LocalProtocolError(f"{connection.peer} offers no scratch memory to measure the connection with")
        cost = measure_connection(self._transport, connection.peer, self._source(), scratch, big_bytes, least_rounds)
        self.measured[connection.peer] = MeasuredCost(cost, time.monotonic_ns())
        return cost

    def _source(self) -> Region:
        """Returns the memory that measurements read: the pool or the staging buffers, whichever region is largest.

        A large pool is preferred since its pages are as cold as those of a room. Only memory on the device of the
        staging buffers is considered: aux rows are in host memory even if the pool is on a device.
        """
        assert self._buffers is not None
        buffers = self._buffers.region()
        alike = [region for region in self._pool.regions() if region.device == buffers.device]
        return Region(*max(*alike, buffers, key=lambda region: region.nbytes))


def map_peer_memory(device: Device | None, info: PeerInfo) -> tuple[MappedMemory | None, str]:
    """Maps a peer's memory, which the direct path needs; returns the mapping, or None and the reason as text.

    Args:
        device: device of this rank's pool; None for host memory.
        info: info of the peer, which lists the allocations that it shares.
    """
    if device is None:
        return None, "this rank's pool is host memory"
    if not info.shared:
        return None, info.unshared or f"{info.name}'s pool is host memory"
    same_host = info.host == host_identity()
    if not same_host and any(each.kind != _FABRIC for each in info.shared):
        lacks = "its memory has no fabric handles (engines make pools with them, mem_pool=vmm the ring)"
        return None, f"{info.name} is on another host, and {lacks}"
    exports = [Export(each.addr, each.nbytes, each.kind, each.handle, each.device) for each in info.shared]
    try:
        return MappedMemory(device.open(exports, same_process=same_host and info.pid == os.getpid())), ""
    except DeviceError as error:
        return None, str(error)
