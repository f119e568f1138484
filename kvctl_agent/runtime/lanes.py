"""A prefill rank's lanes: which peers can be written to, and what writing to them costs.

The control loop connects and drops; measuring runs on a transfer worker between parts, since a lane that is busy
cannot be measured and one that is being measured should not be in use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvctl_agent.contract.lane import LaneCost
from kvctl_agent.device.base import Geometry
from kvctl_agent.errors import DeadlineExceeded, DeviceError, KvctlError, LocalProtocolError, TransportError
from kvctl_agent.layout.holding import Held
from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.memory.block_table import gathers_between
from kvctl_agent.memory.buffers import StagingBuffers
from kvctl_agent.memory.floor import halves_gb_per_s
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.slab import Slab
from kvctl_agent.paths.base import BULK, SLICE, Lane
from kvctl_agent.paths.calibration import measure_copies
from kvctl_agent.paths.chooser import AUTO, Chooser, DirectCost
from kvctl_agent.paths.device_calibration import measure_device_copies, measure_direct
from kvctl_agent.paths.direct import PROGRAMS
from kvctl_agent.paths.mapped import Mapped
from kvctl_agent.paths.routes import geometries
from kvctl_agent.protocol.messages import Introduction
from kvctl_agent.runtime.reach import reach
from kvctl_agent.runtime.worker import TransferWorker
from kvctl_agent.telemetry.recorder import FlightRecorder
from kvctl_agent.transport.base import Region, Transport
from kvctl_agent.transport.probe import LEAST_ROUNDS, measure_lane

_MEASURE_S = 10.0
_COPIES_BYTES = 64 << 20  # larger than the caches


class Measured(NamedTuple):
    """What a lane cost when it was last measured, at a monotonic moment."""

    cost: LaneCost
    at_ns: int


class Measuring:
    """One measurement, on its way or done; `run` is the worker's, the rest any thread's.

    Attributes:
        ended_ns: when it was done, monotonic; 0 on its way.
    """

    def __init__(self, lane: Lane, measure: Callable[[Lane], LaneCost]) -> None:
        self.peer = lane.peer
        self.lane = lane.transport.name
        self.ended_ns = 0
        self._target = lane
        self._measure = measure
        self._result: LaneCost | KvctlError | None = None
        self._done = threading.Event()

    def run(self) -> None:
        try:
            self._result = self._measure(self._target)
        except KvctlError as error:
            self._result = error
        except Exception as error:  # a bug: whoever waits must hear of it, and the worker must go on
            self._result = TransportError(f"{type(error).__name__}: {error}")
        self.ended_ns = time.monotonic_ns()
        self._done.set()

    def wait(self, timeout: float) -> LaneCost | None:
        """What the lane costs; None when that is not known after `timeout` seconds.

        Raises:
            KvctlError: it could not be measured.
        """
        self._done.wait(timeout)
        if isinstance(self._result, KvctlError):
            raise self._result
        return self._result


class Lanes:
    """Lanes by peer, and the calibration of the chooser by the first of them.

    Attributes:
        by_peer: written by the control loop alone; an entry is replaced and never changed.
        measured: by peer, those that were; likewise safe to read from any thread.
        memory_gb_per_s: one thread's memcpy on this machine, once the chooser has been calibrated.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        pool: KVPool,
        buffers: StagingBuffers | None,
        chooser: Chooser,
        recorder: FlightRecorder,
        direct_programs: int | None = None,
    ) -> None:
        """`direct_programs`: how much of the device the direct path may take, as `DirectPath`."""
        self.by_peer: dict[str, Lane] = {}
        self.measured: dict[str, Measured] = {}
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
        self._compiled: set[Geometry] = set()

    def connect(self, peer: str, who: Introduction, held: tuple[Held, ...], worker: TransferWorker | None) -> None:
        """Make `peer`, which holds `held` of the model, writable; raises KvctlError where it cannot be."""
        theirs = PoolAddresses.from_wire(who.pool, held)
        self._transport.connect(peer, who.metadata)
        self._scratch[peer] = Region(who.scratch_base, who.scratch_bytes)
        before = self.by_peer.get(peer)
        self.by_peer[peer] = self._lane(peer, who, theirs)
        if before is not None:
            before.close()
        self.calibrate_once(worker)

    def drop(self, peer: str) -> None:
        """Forget `peer`; unknown names are fine. Its memory stays mapped for the kernels that are on it."""
        lane = self.by_peer.pop(peer, None)
        if lane is not None:
            lane.close()
        self.measured.pop(peer, None)
        self._scratch.pop(peer, None)
        self._transport.disconnect(peer)

    def close(self) -> None:
        """Forget all peers' memory, once the workers have ended."""
        for lane in list(self.by_peer.values()):
            lane.close()

    def reaches(self, peer: str) -> bool:
        """Whether its memory is mapped here, so that parts can go direct. Safe from any thread."""
        lane = self.by_peer.get(peer)
        return lane is not None and lane.mapping is not None

    def _lane(self, peer: str, who: Introduction, theirs: PoolAddresses) -> Lane:
        mapping, why_not = reach(self._pool.device, who)
        made = self._transport, self._pool, theirs, who.ring_base
        try:
            lane = Lane(peer, *made, mapping, why_not)
        except DeviceError as error:
            if mapping is not None:
                mapping.close()
            lane = Lane(peer, *made, why_not=str(error))
        if self._pool.device is not None:
            way = f"direct by {lane.mapping.lane}" if lane.mapping else f"not direct: {lane.why_not}"
            self._recorder.record("direct", f"lane to {peer}: {way}", peer=peer)
        return lane

    def measure(self, worker: TransferWorker) -> LaneCost:
        """Measure the lane to the first connected peer, between parts.

        Raises:
            LocalProtocolError: no peer is connected, or it offers no memory to measure with.
            DeadlineExceeded: the transfer worker was too busy.
        """
        cost = self._begin(worker, self._first(), self._measure).wait(_MEASURE_S)
        if cost is None:
            raise DeadlineExceeded(f"{self._name}: the transfer worker measured no lane within {_MEASURE_S:g} s")
        return cost

    def begin(self, worker: TransferWorker, peer: str | None, big_bytes: int | None) -> Measuring:
        """Have the worker measure the lane to `peer` (None: the first one) once, between parts.

        On a slow lane each kind of write goes once only, so that parts wait for seconds at most.

        Args:
            big_bytes: size of the large write; None for the usual one.

        Raises:
            LocalProtocolError: it is not connected.
        """
        lane = self._first() if peer is None else self.by_peer.get(peer)
        if lane is None:
            known = ", ".join(sorted(self.by_peer)) or "none"
            raise LocalProtocolError(f"{self._name} is not connected to {peer!r:.80}; connected: {known}")
        return self._begin(worker, lane, lambda lane: self._measure(lane, big_bytes, least_rounds=1))

    def _begin(self, worker: TransferWorker, lane: Lane, measure: Callable[..., LaneCost]) -> Measuring:
        measuring = Measuring(lane, measure)
        worker.put(measuring.run)
        return measuring

    def calibrate_once(self, worker: TransferWorker | None) -> None:
        """Have the worker measure, when the first peer is there and costs decide; the first rooms wait for it.

        On a device they wait for its compiler, too, and not in the middle of a part.
        """
        if self._pool.device is not None and worker is not None and self._chooser.path not in (BULK, SLICE):
            worker.put(self._compile)
        costs_decide = self._chooser.path == AUTO and self._chooser.staging == "auto"
        if costs_decide and worker is not None and self.by_peer and not self._calibrating:
            self._calibrating = True
            worker.put(self.calibrate)

    def calibrate(self) -> None:
        """On a worker: what `auto` decides by."""
        if self._chooser.lane is not None:
            return
        try:
            lane = self._first()
            cost = self._measure(lane)
            self._calibrate_copies(lane)
        except KvctlError as error:
            self._calibrating = False  # the next peer that comes may be the one
            self._recorder.record("calibration", f"auto stages everything that cannot go direct: {error}", "warning")
            return
        self._chooser.lane = cost
        text = f"one write {cost.write_gb_per_s:.1f} GB/s, {cost.descriptor_us(512):.1f} µs a descriptor of 512 bytes"
        if (direct := self._chooser.direct) is not None:
            text += f", direct {direct.us_per_part:.0f} µs a part and {direct.us_per_mib:.2f} µs a MiB"
        self._recorder.record("calibration", f"lane to {lane.peer}: {text}")

    def _calibrate_copies(self, lane: Lane) -> None:
        """What row copies cost, on the memory that they are for."""
        with Slab(_COPIES_BYTES) as memory:
            self.memory_gb_per_s = halves_gb_per_s(memory.array)
            if self._pool.device is None:
                self._chooser.copy = measure_copies(memory.array)
                return
        assert self._buffers is not None
        copies = self._pool.device.copies()
        buffer = self._buffers.acquire()
        try:
            if buffer is None:
                raise LocalProtocolError(f"{self._name}: no staging buffer was free to measure copies with")
            staging = Region(buffer.stretch.addr, buffer.stretch.nbytes)
            self._chooser.copy = measure_device_copies(copies, self._source(), staging)
            scratch = self._scratch.get(lane.peer)
            if lane.mapping is not None and scratch is not None:
                self._chooser.direct = self._measure_direct(lane.mapping, scratch)
        finally:
            copies.close()  # waits: only then may others have the buffer
            if buffer is not None:
                self._buffers.release(buffer)

    def _measure_direct(self, mapping: Mapped, scratch: Region) -> DirectCost:
        assert self._pool.device is not None
        mapping.take()
        copies = self._pool.device.copies()
        try:
            there = Region(mapping.translate(scratch.addr, scratch.nbytes), scratch.nbytes)
            return measure_direct(copies, self._source(), there, self._direct_programs)
        finally:
            copies.close()  # waits: only then may it be unmapped
            mapping.give()

    def _compile(self) -> None:
        """On a worker: every kernel that parts on the lanes so far can need."""
        device = self._pool.device
        wanted: set[Geometry] = set()
        for lane in list(self.by_peer.values()):
            for segment in lane.segments:
                wanted |= gathers_between(segment.ours.held, segment.theirs.held)
            if lane.mapping:
                wanted |= geometries(lane.segments)
        if device is None or not wanted - self._compiled:
            return
        copies = device.copies()
        try:
            copies.prepare(sorted(wanted - self._compiled))
            self._compiled |= wanted
        except KvctlError as error:
            self._recorder.record("device", f"its kernels could not be compiled: {error}", "error")
        finally:
            copies.close()

    def _first(self) -> Lane:
        for lane in list(self.by_peer.values()):
            return lane
        raise LocalProtocolError(f"{self._name} has no lane to measure: no peer is connected")

    def _measure(self, lane: Lane, big_bytes: int | None = None, least_rounds: int = LEAST_ROUNDS) -> LaneCost:
        scratch = self._scratch.get(lane.peer)
        if scratch is None or not scratch.nbytes or self._buffers is None:
            raise LocalProtocolError(f"{lane.peer} offers no scratch memory to measure the lane with")
        cost = measure_lane(self._transport, lane.peer, self._source(), scratch, big_bytes, least_rounds)
        self.measured[lane.peer] = Measured(cost, time.monotonic_ns())
        return cost

    def _source(self) -> Region:
        """To read from: the pool where it is large, since its pages are as cold as those that will be sent.

        Aux rows are in host memory, beside a pool on a device too.
        """
        assert self._buffers is not None
        buffers = self._buffers.region()
        alike = [region for region in self._pool.regions() if region.device == buffers.device]
        return Region(*max(*alike, buffers, key=lambda region: region.nbytes))
