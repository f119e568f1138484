"""Copies of rows on a stream: tables up in one asynchronous copy, a launch for each batch, an event.

`begin` is what a transfer worker does for every part, with a budget of 30 µs: kernels, events, memory for tables and
blocks of arguments are there before; what is left are a few numpy calls on tables and the calls of the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.device.base import Batch, BlockRanges, Event, Geometry, PageIds
from kvctl_agent.device.compiler import ARGUMENTS
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.device.events import EventPool
from kvctl_agent.device.kernels import Kernel, Kernels
from kvctl_agent.device.table_cache import TableCache
from kvctl_agent.device.tables import STRIP_BYTES, split, table_bytes
from kvctl_agent.device.upload_slots import UploadSlot, UploadSlots
from kvctl_agent.device.variant import Tile, Variant, alignment, variant
from kvctl_agent.errors import DeadlineExceeded, DeviceError

_MOST = 2**31 - 1
# Every copy takes milliseconds, but those of a mapped peer whose GPU or NVLink has failed may take for ever.
_END_S = 2.0
_LOOK_S = 1e-4
_ARGUMENTS = struct.Struct(f"={len(ARGUMENTS)}q")
_STRIP = struct.Struct(f"={STRIP_BYTES // 8}q")


class Tuning(NamedTuple):
    """What benchmarks vary.

    Attributes:
        tile: of launches that may use the whole device.
        bounded: of launches with few programs, each of which must keep more bytes under way.
        slots: requests that may be under way.
        slot_bytes: of tables of one request; a multiple of 8.
    """

    tile: Tile = Tile(16 << 10, 8)
    bounded: Tile = Tile(64 << 10, 16)
    slots: int = 32
    slot_bytes: int = 64 << 10


DEFAULT = Tuning()


class _Launch:
    """A variant and its block of arguments, which the driver reads during the call that launches.

    Attributes:
        arguments: eight bytes for each, narrower ones in the lower half; those that the compiler appended stay null.
        parameters: address of their addresses.
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
        """Tiles of a block of so many pages; the kernel counts units, and tiles of all blocks, in 32 bits."""
        units = pages * self._page_units
        tiles = -(-units // self._tile_units)
        if tiles * blocks > _MOST or units > _MOST:
            raise DeviceError(f"{blocks} blocks of up to {pages} pages are too many for one launch")
        return tiles


class CudaRowCopies:
    """`Copies` of a CUDA device; belongs to one thread, but for `close`."""

    def __init__(self, context: Context, kernels: Kernels, events: EventPool, tuning: Tuning = DEFAULT) -> None:
        """Makes the stream and its tables.

        Raises:
            DeviceError: there is no memory for them.
        """
        self._driver = load()
        self._context = context
        self._kernels = kernels
        self._events = events
        self._tuning = tuning
        self._launches: dict[tuple[Geometry, int, bool, bool], _Launch] = {}
        self._slots = UploadSlots(context, tuning.slots, tuning.slot_bytes)
        try:
            with context.visit():
                _, highest = checked(self._driver.cuCtxGetStreamPriorityRange(), "no stream priorities")
                # Small and awaited by another machine: let it go before compute, and wait for no default stream.
                flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
                made = self._driver.cuStreamCreateWithPriority
                self._stream: Any = checked(made(flags, highest), "no stream")
                self._uploads: Any = checked(made(flags, highest), "no stream")
        except BaseException:
            self._slots.close()
            raise
        self._resident = TableCache(context, self._stream)
        self._last: Event | None = None  # what was begun last

    def prepare(self, geometries: Sequence[Geometry]) -> None:
        self._context.enter()
        for geometry in geometries:
            direct = geometry.src_paged and geometry.dst_paged
            # Between pages and staging there are strips, and what they do not serve; from pages to pages launches may
            # be bounded.
            for bounded, strips in ((False, False), (True, False) if direct else (False, True)):
                # Launched once with nothing to do: the driver loads code when it is first used.
                self._launch(self._kernel(geometry, 0, bounded, strips), 0, 0, 0, 0, 1, 1, None)
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
        try:
            if table_bytes(batches, pages) <= self._slots.nbytes:
                return self._begin(batches, pages, programs)
            for batch, listed in split(batches, pages, self._slots.nbytes):
                done = self._begin([batch], listed, programs)
        except BaseException:
            # What went before the failed call still reads tables and writes rows: the caller will have no event of it.
            for stream in (self._uploads, self._stream):
                self._driver.cuStreamSynchronize(stream)
            raise
        return done

    def close(self) -> None:
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        self._await_end()
        with self._context.visit():
            # Unchecked, as in `UploadSlots.close`.
            for each in (self._uploads, stream):
                self._driver.cuStreamSynchronize(each)
                self._driver.cuStreamDestroy(each)
        self._resident.close()
        self._slots.close()

    def _await_end(self) -> None:
        """Until all that was begun is through, or the device is lost, where nothing runs any more."""
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(DeviceError):
            while self._last is not None and not self._last.done():
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"a copy on the GPU has not ended within {_END_S:g} s: it never will")
                time.sleep(_LOOK_S)

    def _begin(self, batches: Sequence[Batch | BlockRanges], pages: PageIds, programs: int | None) -> Event:
        slot = self._slots.take()
        at = 0
        for each in batches:
            if isinstance(each, BlockRanges):
                for strip in each.strips:
                    _STRIP.pack_into(slot.memory, at, *strip)
                    at += STRIP_BYTES
            else:
                blocks = each.blocks
                slot.words[at // 8 : at // 8 + blocks.size] = blocks.reshape(-1)
                at += blocks.nbytes
        slot.places[at // 4 : at // 4 + len(pages)] = pages
        self._upload(slot, at + pages.nbytes)
        # The device has the tables by the time that the rest has been worked out.
        tables_at, pages_at = slot.device, slot.device + at
        for each in batches:
            if isinstance(each, BlockRanges):
                self._copy_strips(each, tables_at, pages_at, programs)
                tables_at += STRIP_BYTES * len(each.strips)
            else:
                self._copy_batch(each, tables_at, pages_at, programs)
                tables_at += each.blocks.nbytes
        done = slot.until = self._last = self._events.record(self._stream)
        return done

    def _upload(self, slot: UploadSlot, nbytes: int) -> None:
        """Ahead of the kernels that are still to run, if there are any.

        Between two kernels it would leave the device nothing to run of this process for a moment. Where others share
        the device it turns to them at once, and comes back 150 µs later (H200, four processes).
        """
        ahead = self._last is not None and not self._last.done()
        stream = self._uploads if ahead else self._stream
        checked(self._driver.cuMemcpyHtoDAsync(slot.device, slot.host, nbytes, stream), "cannot upload tables")
        if ahead:
            self._events.record(stream).wait(self._stream)

    def _copy_batch(self, batch: Batch, blocks_at: int, pages_at: int, programs: int | None) -> None:
        geometry, blocks = batch
        # One pass instead of three. Or-ed numbers of pages are not less than the most, and the same where all are one.
        source, target, _, _, pages = np.bitwise_or.reduce(blocks).tolist()
        launch = self._kernel(geometry, source | target, programs is not None, False)
        tiles = launch.tiles(pages, len(blocks))
        self._launch(launch, blocks_at, 0, pages_at, tiles * len(blocks), tiles, 1, programs)

    def _copy_strips(self, some: BlockRanges, strips_at: int, pages_at: int, programs: int | None) -> None:
        table, strips = some
        bits, most, pages = table.bits, 0, 0
        for lo, hi, shift, packed, count, _ in strips:
            bits |= shift | packed
            if hi - lo > most:
                most = hi - lo
            if count > pages:
                pages = count
        launch = self._kernel(table.geometry, bits, programs is not None, True)
        blocks = most * len(strips)
        tiles = launch.tiles(pages, blocks)
        blocks_at = self._resident.address(table)
        self._launch(launch, blocks_at, strips_at, pages_at, tiles * blocks, tiles, most, programs)

    def _kernel(self, geometry: Geometry, bits: int, bounded: bool, strips: bool) -> _Launch:
        key = (geometry, alignment(bits), bounded, strips)
        launch = self._launches.get(key)
        if launch is None:
            chosen = variant(geometry, bits, self._tuning.bounded if bounded else self._tuning.tile, strips)
            launch = self._launches[key] = _Launch(chosen, self._kernels.get(chosen))
        return launch

    def _launch(
        self,
        launch: _Launch,
        blocks_at: int,
        strips_at: int,
        pages_at: int,
        items: int,
        tiles: int,
        most: int,
        programs: int | None,
    ) -> None:
        """Launches with the arguments in their order; at most `programs` thread blocks, where it says how many."""
        _ARGUMENTS.pack_into(launch.arguments, 0, blocks_at, strips_at, pages_at, items, tiles, most)
        grid = items if programs is None or items < programs else programs
        kernel, stream = launch.kernel, self._stream
        launched = self._driver.cuLaunchKernel(
            kernel.function, grid or 1, 1, 1, kernel.threads, 1, 1, kernel.shared, stream, launch.parameters, 0
        )
        checked(launched, "cannot launch the copy kernel")
