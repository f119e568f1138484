"""A `Device` in host memory for tests: copies complete late, so that code that ignores events reads stale bytes."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.device.base import (
    HOST,
    Batch,
    BlockRanges,
    Blocks,
    DeviceMemory,
    Event,
    Export,
    Geometry,
    Mapping,
    PageIds,
    PageStrides,
    RowCopies,
    checksum_word,
)
from kvctl_agent.errors import DeviceError
from kvctl_agent.memory.allocations import HugePageMemory
from kvctl_agent.memory.checksum import bytes_checksum

JUNK = 0xA5
"""What fresh memory is full of: memory of a device is not zeroed."""


class Begun(NamedTuple):
    """Recorded call of `RowCopies.begin`."""

    batches: tuple[Batch, ...]
    pages: PageIds
    after: Event | None
    programs: int | None


class HostEvent:
    """Event that completes at its n-th `done()`, or with a later event of its stream; its work is executed then.

    Attributes:
        streams: streams that wait for it; such a wait completes the event, as if that stream had run.
    """

    handle = 0

    def __init__(self, stream: HostStream | None, work: Callable[[], None], slow: int, after: Event | None) -> None:
        self._stream, self._work, self._left, self._after = stream, work, slow, after
        self.finished = False
        self.failure: DeviceError | None = None
        self.streams: list[Any] = []

    def done(self) -> bool:
        if self._after is not None and not self._after.done():
            return False
        self._left -= 1
        if self._left <= 0:
            self.finish()
        if self.failure is not None and self.finished:
            raise self.failure
        return self.finished

    def wait(self, stream: Any) -> None:
        self.streams.append(stream)
        self.finish()

    def finish(self) -> None:
        """Executes the work of the stream up to this event."""
        if self._stream is not None:
            self._stream.run_to(self)

    def run(self) -> None:
        while self._after is not None and not self._after.done():
            pass
        if self.failure is None:
            self._work()
        self.finished = True


class HostStream:
    """Stream that executes its work in order, when an event behind the work completes."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        device.streams.append(self)
        self._lock = threading.RLock()
        self._queue: deque[HostEvent] = deque()

    def put(self, work: Callable[[], None], after: Event | None = None) -> HostEvent:
        event = HostEvent(self, work, self._device.slow, after)
        if self._device.fail_next > 0:
            self._device.fail_next -= 1
            event.failure = DeviceError("the stand-in device was told to fail this copy")
        with self._lock:
            self._queue.append(event)
        return event

    def run_to(self, event: HostEvent | None) -> None:
        """Executes the work up to an event, or all of it if `event` is None."""
        with self._lock:
            while self._queue and (event is None or not event.finished):
                self._queue.popleft().run()


class HostChecksum:
    """`PendingChecksum` whose bytes are read when its completion is polled."""

    def __init__(self, stream: HostStream, begun: Begun) -> None:
        self.value = 0
        self._begun = begun
        self._event = stream.put(self._compute)
        self.done = self._event.done

    def _compute(self) -> None:
        for geometry, blocks in self._begun.batches:
            word = checksum_word(geometry.width)
            for source, position, at, _, count in blocks.tolist():
                rows = _rows(source, self._begun.pages[at : at + count], count, geometry, geometry.src)
                self.value += bytes_checksum(rows.reshape(-1), word, position)
        self.value &= 0xFFFFFFFF


class HostCopies:
    """`RowCopies` with numpy; a copy is executed when its completion is polled."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._stream = HostStream(device)
        self.closed = False

    def prepare(self, geometries: Sequence[Geometry], checksum: bool = False) -> None:
        (self._device.prepared_sums if checksum else self._device.prepared).extend(geometries)

    def begin(
        self,
        batches: Sequence[Batch | BlockRanges],
        pages: PageIds,
        after: Event | None = None,
        programs: int | None = None,
    ) -> Event:
        assert not self.closed, "a copy after close()"
        assert pages.dtype == np.int32
        each = [batch.batch() if isinstance(batch, BlockRanges) else batch for batch in batches]
        assert all(len(batch.blocks) and batch.blocks.dtype == np.int64 for batch in each)
        # The caller may reuse its arrays after this call.
        kept = tuple(Batch(batch.geometry, batch.blocks.copy()) for batch in each)
        begun = Begun(kept, pages.copy(), after, programs)
        self._device.begun.append(begun)
        return self._stream.put(lambda: _copy_all(begun), after)

    def checksum(self, batches: Sequence[Batch | BlockRanges], pages: PageIds) -> HostChecksum:
        assert not self.closed, "a checksum after close()"
        assert pages.dtype == np.int32
        each = tuple(batch.batch() if isinstance(batch, BlockRanges) else batch for batch in batches)
        self._device.summed.extend(batch.geometry for batch in each)
        return HostChecksum(self._stream, Begun(each, pages.copy(), None, None))

    def close(self) -> None:
        self._stream.run_to(None)
        self.closed = True


class HostMapping:
    """Mapping of a peer's memory, which is in this process; translates only exported addresses.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, exports: Sequence[Export], lane: str) -> None:
        self._exports, self._lane = tuple(exports), lane
        self.closed = False

    @property
    def lane(self) -> str:
        return self._lane

    def translate(self, addr: int, nbytes: int = 1) -> int:
        assert not self.closed, "a translation after close()"
        if not any(export.addr <= addr <= export.addr + export.nbytes - nbytes for export in self._exports):
            raise DeviceError(f"address {addr:#x} lies in nothing that the peer exported")
        return addr

    def translate_all(self, addrs: Blocks, nbytes: Blocks | int = 1) -> Blocks:
        pairs = np.broadcast(addrs, nbytes)
        return np.array([self.translate(int(addr), int(size)) for addr, size in pairs], np.int64).reshape(addrs.shape)

    def close(self) -> None:
        self.closed = True


class HostDevice:
    """Device in host memory whose copies complete late.

    Attributes:
        slow: number of `done()` calls until started work completes.
        fail_next: number of following copies that fail; `done()` of their events raises DeviceError.
        why_no_export, why_no_open: reasons with which `export` and `open` refuse, if set.
        lane: the interconnect that mappings report.
        begun: every copy, in order.
        pci: PCI address that it reports.
        prepared, prepared_sums: every geometry that was prepared for copies, and for checksums.
        summed: geometry of every batch whose checksum was computed.
        mappings: every opened mapping.
        streams: every stream.
    """

    def __init__(self, slow: int = 3, index: int = HOST, lane: str = "same device") -> None:
        self.index = index
        self.slow = slow
        self.lane = lane
        self.fail_next = 0
        self.why_no_export = self.why_no_open = ""
        self.begun: list[Begun] = []
        self.prepared: list[Geometry] = []
        self.prepared_sums: list[Geometry] = []
        self.summed: list[Geometry] = []
        self.mappings: list[HostMapping] = []
        self._allocations: list[HugePageMemory] = []
        self.streams: list[HostStream] = []
        self._driver = HostStream(self)
        self._uuid = f"HOST-{next(_numbers)}"
        self.pci: str | None = None
        self.event_query = 0

    @property
    def name(self) -> str:
        return "host stand-in"

    def allocate(self, nbytes: int, pool: str = "default") -> DeviceMemory:
        if pool not in ("default", "vmm"):
            raise DeviceError(f"mem_pool {pool}: the stand-in has default and vmm")
        slab = HugePageMemory(nbytes)
        slab.array[:] = JUNK
        self._allocations.append(slab)
        return slab

    def enter(self) -> None:
        pass

    def visit(self) -> AbstractContextManager[None]:
        return nullcontext()

    def now(self) -> Event:
        event = HostEvent(None, lambda: None, 0, None)
        event.finished = True
        return event

    def copy(self, target: int, source: int, nbytes: int) -> Event:
        return self._driver.put(lambda: ctypes.memmove(target, source, nbytes) and None)

    def copies(self) -> RowCopies:
        return HostCopies(self)

    def event_of(self, given: Any) -> Event:
        if isinstance(given, HostEvent):
            return given
        raise DeviceError(f"{type(given).__name__} is no event of this device")

    def engine_event(self, work: Callable[[], None] = lambda: None, slow: int | None = None) -> HostEvent:
        """Returns an event as an engine records it; `work` is executed when the event completes.

        Args:
            slow: number of `done()` calls until the event completes; None for that of the device.
        """
        event = HostStream(self).put(work)
        event._left = self.slow if slow is None else slow
        return event

    def export(self, regions: Sequence[tuple[int, int]]) -> list[Export]:
        if self.why_no_export:
            raise DeviceError(self.why_no_export)
        return [
            Export(slab.addr, slab.nbytes, "ipc", f"{os.getpid()}:{slab.addr}".encode(), self._uuid)
            for slab in self._allocations
            if any(slab.addr <= addr < slab.addr + slab.nbytes for addr, _ in regions)
        ]

    def open(self, exports: Sequence[Export], same_process: bool = False) -> Mapping:
        if self.why_no_open:
            raise DeviceError(self.why_no_open)
        if any(not export.handle.startswith(f"{os.getpid()}:".encode()) for export in exports):
            raise DeviceError("the stand-in maps memory of its own process alone")
        self.mappings.append(HostMapping(exports, self.lane))
        return self.mappings[-1]

    def fill(self, addr: int, nbytes: int, value: int) -> None:
        ctypes.memset(addr, value, nbytes)

    def upload(self, addr: int, data: npt.NDArray[np.uint8]) -> None:
        at(addr, data.nbytes)[:] = data.reshape(-1)

    def download(self, addr: int, out: npt.NDArray[np.uint8]) -> None:
        out.reshape(-1)[:] = at(addr, out.nbytes)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "index": self.index}


_numbers = itertools.count()


def at(addr: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Returns a view of host memory at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addr))


def _copy_all(begun: Begun) -> None:
    for geometry, blocks in begun.batches:
        for source, target, source_at, target_at, count in blocks.tolist():
            assert count > 0
            values = _rows(source, begun.pages[source_at : source_at + count], count, geometry, geometry.src)
            _rows(target, begun.pages[target_at : target_at + count], count, geometry, geometry.dst, values)


def _rows(
    addr: int,
    pages: npt.NDArray[Any],
    count: int,
    geometry: Geometry,
    side: PageStrides | None,
    values: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.uint8]:
    """Returns a copy of the rows of a block, uint8 `[count, rows, heads, width]`; first writes `values` to them."""
    rows, heads, width, _, _ = geometry
    if side is None:
        side, pages = PageStrides(geometry.page_bytes, heads * width, width), np.arange(count)
    assert len(pages) == count
    number, sub = pages // side.split, pages % side.split
    shape = int(number.max()) + 1, side.split, rows, heads, width
    strides = side.page, side.sub, side.row, side.head, 1
    view = np.lib.stride_tricks.as_strided(at(addr, 1), shape, strides)
    if values is not None:
        view[number, sub] = values
    return view[number, sub]
