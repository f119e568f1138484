"""Row copies on a CUDA stream; each request uploads its tables, launches a kernel per batch, and records an event.

The control loop calls `begin` for every part, with a budget of 30 µs. Kernels, events, memory for tables and argument
blocks are therefore created in advance, and `begin` makes only a few calls to numpy and the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvctl_agent.device.base import Batch, BlockRanges, Event, Geometry, PageIds
from kvctl_agent.device.driver import Context, checked, load, load_short_calls
from kvctl_agent.device.events import EventPool
from kvctl_agent.device.kernels import ARGUMENTS, Kernel, Kernels, Tile, Variant, alignment, variant
from kvctl_agent.device.launch_tables import (
    RANGE_BYTES,
    RESULT_BYTES,
    ResultCells,
    TableCache,
    UploadSlot,
    UploadSlots,
    split,
    table_bytes,
)
from kvctl_agent.errors import DeadlineExceeded, DeviceError

_MAX_COUNT = 2**31 - 1
# Copies take milliseconds, except to a mapped peer whose GPU or NVLink has failed: these may never end.
_END_S = 2.0
_POLL_S = 1e-4
_ARGUMENTS = struct.Struct(f"={len(ARGUMENTS)}q")
_RANGE = struct.Struct(f"={RANGE_BYTES // 8}q")


class Tuning(NamedTuple):
    """Sizes of tiles and upload slots, which benchmarks vary.

    Attributes:
        tile: Tile size for launches that may use the whole device.
        bounded: Tile size for launches with limited thread blocks, each of which must have more bytes in flight.
        slots: Number of upload slots, which limits the requests in flight.
        slot_bytes: Bytes for the tables of one request, a multiple of 8.
    """

    tile: Tile = Tile(16 << 10, 8)
    bounded: Tile = Tile(64 << 10, 16)
    slots: int = 32
    slot_bytes: int = 64 << 10


DEFAULT = Tuning()


class _Launch:
    """A kernel and its argument block, which the driver reads during the launch call.

    Attributes:
        arguments: Eight bytes per argument, 32-bit arguments in the lower half; arguments that the compiler appended
            stay null.
        parameters: Address of the array of the arguments' addresses.
    """

    __slots__ = ("_page_units", "_pointers", "_tile_units", "arguments", "kernel", "parameters")

    def __init__(self, variant: Variant, kernel: Kernel) -> None:
        self.kernel = kernel
        self._page_units, self._tile_units = variant.page_units, variant.tile_units
        count = len(ARGUMENTS) + kernel.appended
        self.arguments = (ctypes.c_int64 * count)()
        at = ctypes.addressof(self.arguments)
        self._pointers = (ctypes.c_void_p * count)(*range(at, at + 8 * count, 8))
        self.parameters = ctypes.addressof(self._pointers)

    def tiles(self, pages: int, blocks: int) -> int:
        """Returns the number of tiles in a block of `pages` pages, for a launch with `blocks` blocks.

        Raises:
            DeviceError: the units or tiles of all blocks exceed the 32 bits in which the kernel counts them.
        """
        units = pages * self._page_units
        tiles = -(-units // self._tile_units)
        if tiles * blocks > _MAX_COUNT or units > _MAX_COUNT:
            raise DeviceError(f"{blocks} blocks of up to {pages} pages are too many for one launch")
        return tiles


class _Checksum:
    """`PendingChecksum` of one or more requests, each of which has a result cell."""

    def __init__(self, event: Event, results: ResultCells, cells: list[int]) -> None:
        self.value = 0
        self._event = event
        self._results = results
        self._cells = cells

    def done(self) -> bool:
        if self._cells and self._event.done():
            self.value = sum(map(self._results.read, self._cells)) & 0xFFFFFFFF
            self._cells = []
        return not self._cells


class CudaRowCopies:
    """`RowCopies` for a CUDA device. One thread uses it; another may call `close` afterwards."""

    def __init__(self, context: Context, kernels: Kernels, events: EventPool, tuning: Tuning = DEFAULT) -> None:
        """Creates the streams and the memory for tables.

        Raises:
            DeviceError: the memory cannot be allocated.
        """
        self._driver = load()
        self._calls = load_short_calls()
        self._context = context
        self._kernels = kernels
        self._events = events
        self._tuning = tuning
        self._launches: dict[tuple[Geometry, int, bool, bool, bool], _Launch] = {}
        self._slots = UploadSlots(context, tuning.slots, tuning.slot_bytes)
        try:
            with context.visit():
                _, highest = checked(self._driver.cuCtxGetStreamPriorityRange(), "no stream priorities")
                # Copies are small and a peer waits for them, so they have priority over compute and do not
                # synchronise with the default stream.
                flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
                made = self._driver.cuStreamCreateWithPriority
                self._stream: Any = checked(made(flags, highest), "no stream")
                self._uploads: Any = checked(made(flags, highest), "no stream")
        except BaseException:
            self._slots.close()
            raise
        self._tables = TableCache(context, self._stream)
        self._results = ResultCells(context)
        self._last: Event | None = None  # the event of the most recent request

    def prepare(self, geometries: Sequence[Geometry], checksum: bool = False) -> None:
        self._context.enter()
        for geometry in geometries:
            direct = geometry.src is not None and geometry.dst is not None
            # Copies between pages and staging use block ranges, or batches if these do not fit into a slot. Copies from
            # pages to pages use batches and may be bounded.
            for bounded, ranges in ((False, False), (True, False) if direct else (False, True)):
                # An empty launch, because the driver loads code on first use.
                self._launch(self._kernel(geometry, 0, bounded, ranges, checksum), 0, 0, 0, 0, 1, 1, None, 0)
        checked(self._driver.cuStreamSynchronize(self._stream), "cannot launch the copy kernel")

    def begin(
        self,
        batches: Sequence[Batch | BlockRanges],
        pages: PageIds,
        after: Event | None = None,
        programs: int | None = None,
    ) -> Event:
        if self._stream is None:
            raise DeviceError("these copies are closed")
        self._context.enter()
        if after is not None:
            after.wait(self._stream)
        return self._enqueue(batches, pages, programs, None)

    def checksum(self, batches: Sequence[Batch | BlockRanges], pages: PageIds) -> _Checksum:
        if self._stream is None:
            raise DeviceError("these copies are closed")
        self._context.enter()
        cells: list[int] = []
        return _Checksum(self._enqueue(batches, pages, None, cells), self._results, cells)

    def close(self) -> None:
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        self._await_end()
        with self._context.visit():
            # Not checked, for the reason given in `UploadSlots.close`.
            for each in (self._uploads, stream):
                self._driver.cuStreamSynchronize(each)
                self._driver.cuStreamDestroy(each)
        self._tables.close()
        self._slots.close()
        self._results.close()

    def _await_end(self) -> None:
        """Waits until all requests have ended; returns early if the device is lost, on which nothing runs any more.

        Raises:
            DeadlineExceeded: a copy has not ended within 2 seconds.
        """
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(DeviceError):
            while self._last is not None and not self._last.done():
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"a copy on the GPU has not ended within {_END_S:g} s")
                time.sleep(_POLL_S)

    def _enqueue(
        self, batches: Sequence[Batch | BlockRanges], pages: PageIds, programs: int | None, cells: list[int] | None
    ) -> Event:
        """Launches the kernels of a copy or, if `cells` is a list, of a checksum, and appends its result cells."""
        nbytes = self._slots.nbytes - (0 if cells is None else 2 * RESULT_BYTES)
        fits = table_bytes(batches, pages) <= nbytes
        try:
            for some, listed in [(batches, pages)] if fits else split(batches, pages, nbytes):
                if cells is not None:
                    cells.append(self._results.take())
                done = self._begin(some, listed, programs, cells[-1] if cells else 0)
        except BaseException:
            # Kernels launched before the failed call still read tables and use rows, and the caller gets no event.
            for stream in (self._uploads, self._stream):
                self._driver.cuStreamSynchronize(stream)
            for cell in cells or ():
                self._results.read(cell)
            raise
        return done

    def _begin(
        self, batches: Sequence[Batch | BlockRanges], pages: PageIds, programs: int | None, cell: int = 0
    ) -> Event:
        """Launches the kernels of one upload slot: copies, or if a result cell is given, the checksum of the rows."""
        slot = self._slots.take()
        at = 0
        for each in batches:
            if isinstance(each, BlockRanges):
                for entry in each.ranges:
                    _RANGE.pack_into(slot.memory, at, *entry)
                    at += RANGE_BYTES
            else:
                data = each.data
                slot.memory[at : at + len(data)] = data
                at += len(data)
        slot.page_ids[at // 4 : at // 4 + len(pages)] = pages
        end = at + pages.nbytes
        sum_at = 0
        if cell:
            end += -end % RESULT_BYTES
            slot.words[end // 8] = 0
            sum_at = slot.device + end
            end += RESULT_BYTES
        self._upload(slot, end)
        # The upload runs while the launch arguments are computed.
        tables_at, pages_at = slot.device, slot.device + at
        for each in batches:
            if isinstance(each, BlockRanges):
                self._copy_ranges(each, tables_at, pages_at, programs, sum_at)
                tables_at += RANGE_BYTES * len(each.ranges)
            else:
                self._copy_batch(each, tables_at, pages_at, programs, sum_at)
                tables_at += each.blocks.nbytes
        if cell:
            checked(self._calls.cuMemcpyDtoHAsync(cell, sum_at, 4, self._stream), "cannot read a checksum back")
        done = slot.until = self._last = self._events.record(self._stream)
        return done

    def _upload(self, slot: UploadSlot, nbytes: int) -> None:
        """Uploads the tables in `slot`, on a second stream if kernels are still pending.

        On the same stream the upload would leave the device idle for this process between two kernels. A device shared
        with other processes then switches to them and comes back 150 µs later (H200, four processes).
        """
        ahead = self._last is not None and not self._last.done()
        stream = self._uploads if ahead else self._stream
        checked(self._calls.cuMemcpyHtoDAsync(slot.device, slot.host, nbytes, stream), "cannot upload tables")
        if ahead:
            uploaded = self._events.record(stream)
            checked(self._driver.cuStreamWaitEvent(self._stream, uploaded.handle, 0), "cannot make a stream wait")

    def _copy_batch(self, batch: Batch, blocks_at: int, pages_at: int, programs: int | None, sum_at: int) -> None:
        bits, pages = batch.summary
        blocks = len(batch.blocks)
        launch = self._kernel(batch.geometry, bits, programs is not None, False, sum_at != 0)
        tiles = launch.tiles(pages, blocks)
        self._launch(launch, blocks_at, 0, pages_at, tiles * blocks, tiles, 1, programs, sum_at)

    def _copy_ranges(
        self, block_ranges: BlockRanges, ranges_at: int, pages_at: int, programs: int | None, sum_at: int
    ) -> None:
        table, ranges = block_ranges
        bits, most, pages = table.bits, 0, 0
        for lo, hi, shift, packed, count, _ in ranges:
            bits |= shift | packed
            if hi - lo > most:
                most = hi - lo
            if count > pages:
                pages = count
        launch = self._kernel(table.geometry, bits, programs is not None, True, sum_at != 0)
        blocks = most * len(ranges)
        tiles = launch.tiles(pages, blocks)
        blocks_at = self._tables.address(table)
        self._launch(launch, blocks_at, ranges_at, pages_at, tiles * blocks, tiles, most, programs, sum_at)

    def _kernel(self, geometry: Geometry, bits: int, bounded: bool, ranges: bool, checksum: bool) -> _Launch:
        key = (geometry, alignment(bits), bounded, ranges, checksum)
        launch = self._launches.get(key)
        if launch is None:
            chosen = variant(geometry, bits, self._tuning.bounded if bounded else self._tuning.tile, ranges, checksum)
            launch = self._launches[key] = _Launch(chosen, self._kernels.get(chosen))
        return launch

    def _launch(
        self,
        launch: _Launch,
        blocks_at: int,
        ranges_at: int,
        pages_at: int,
        items: int,
        tiles: int,
        most: int,
        programs: int | None,
        sum_at: int,
    ) -> None:
        """Launches a kernel with these arguments of `copy_rows`, on at most `programs` thread blocks unless None."""
        _ARGUMENTS.pack_into(launch.arguments, 0, blocks_at, ranges_at, pages_at, items, tiles, most, sum_at)
        grid = items if programs is None or items < programs else programs
        kernel, stream = launch.kernel, self._stream
        launched = self._calls.cuLaunchKernel(
            kernel.function, grid or 1, 1, 1, kernel.threads, 1, 1, kernel.shared, stream, launch.parameters, 0
        )
        checked(launched, "cannot launch the copy kernel")
