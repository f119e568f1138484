"""Copies of rows on a stream: tables up in one asynchronous copy, a launch for each batch, an event.

`begin` is what a transfer worker does for every part, with a budget of 30 µs: kernels, events, memory for tables and
blocks of arguments are there before; what is left are a few numpy calls on tables and the calls of the driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.device.base import Batch, Event, Geometry, Places
from kvctl_agent.device.driver import Context, checked, load
from kvctl_agent.device.events import EventPool
from kvctl_agent.device.kernels import Kernel, Kernels
from kvctl_agent.device.slots import Slots
from kvctl_agent.device.tables import split, table_bytes
from kvctl_agent.device.variant import Tile, Variant, alignment, variant
from kvctl_agent.errors import DeviceError

_MOST = 2**31 - 1


class Tuning(NamedTuple):
    """What benchmarks vary.

    Attributes:
        tile: of launches that may use the whole device.
        bounded: of launches with few programs, each of which must keep more bytes under way.
        zero_copy: kernels read tables from pinned host memory instead of a copy on the device.
        slots: requests that may be under way.
        slot_bytes: of tables of one request; a multiple of 8.
    """

    tile: Tile = Tile(16 << 10, 4)
    bounded: Tile = Tile(64 << 10, 16)
    zero_copy: bool = False
    slots: int = 16
    slot_bytes: int = 64 << 10


DEFAULT = Tuning()


class _Launch:
    """A variant and its block of arguments, which the driver reads during the call that launches."""

    __slots__ = ("_pointers", "arguments", "kernel", "parameters", "variant")

    def __init__(self, variant: Variant, kernel: Kernel) -> None:
        self.variant = variant
        self.kernel = kernel
        # Eight bytes for each, narrower ones in the lower half; those that the compiler appended stay null.
        count = 4 + kernel.appended
        self.arguments = (ctypes.c_int64 * count)()
        at = ctypes.addressof(self.arguments)
        self._pointers = (ctypes.c_void_p * count)(*range(at, at + 8 * count, 8))
        self.parameters = ctypes.addressof(self._pointers)


class CudaCopies:
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
        self._launches: dict[tuple[Geometry, int, bool], _Launch] = {}
        self._slots = Slots(context, tuning.slots, tuning.slot_bytes, not tuning.zero_copy)
        try:
            with context.visit():
                _, highest = checked(self._driver.cuCtxGetStreamPriorityRange(), "no stream priorities")
                self._stream: Any = checked(
                    # Small and awaited by another machine: let it go before compute, and wait for no default stream.
                    self._driver.cuStreamCreateWithPriority(
                        self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING, highest
                    ),
                    "no stream",
                )
        except BaseException:
            self._slots.close()
            raise

    def prepare(self, geometries: Sequence[Geometry]) -> None:
        self._context.enter()
        for geometry in geometries:
            for bounded in (False, True):
                # Launched once with nothing to do: the driver loads code when it is first used.
                self._launch(self._kernel(geometry, 0, bounded), 0, 0, 0, 1, 1)
        checked(self._driver.cuStreamSynchronize(self._stream), "cannot launch the copy kernel")

    def begin(
        self, batches: Sequence[Batch], pages: Places, after: Event | None = None, programs: int | None = None
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
            # Launches before the failed one still read tables and write rows, of which the caller will have no event.
            self._driver.cuStreamSynchronize(self._stream)
            raise
        return done

    def close(self) -> None:
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        with self._context.visit():
            # Unchecked, as in `Slots.close`.
            self._driver.cuStreamSynchronize(stream)
            self._driver.cuStreamDestroy(stream)
        self._slots.close()

    def _begin(self, batches: Sequence[Batch], pages: Places, programs: int | None) -> Event:
        slot = self._slots.take()
        at = 0
        for batch in batches:
            size = batch.blocks.size
            slot.words[at : at + size] = batch.blocks.reshape(-1)
            at += size
        slot.places[2 * at : 2 * at + len(pages)] = pages
        if not self._tuning.zero_copy:
            checked(
                self._driver.cuMemcpyHtoDAsync(slot.device, slot.host, 8 * at + pages.nbytes, self._stream),
                "cannot upload tables",
            )
        pages_at, blocks_at = slot.device + 8 * at, slot.device
        for geometry, blocks in batches:
            launch = self._kernel(geometry, int(np.bitwise_or.reduce(blocks[:, :2], axis=None)), programs is not None)
            most = int(blocks[:, 4].max())
            tiles = launch.variant.tiles(most)
            items = tiles * len(blocks)
            # The kernel counts in 32 bits.
            if max(items, most * launch.variant.page_units) > _MOST:
                raise DeviceError(f"{len(blocks)} blocks of up to {most} pages are too many for one launch: {geometry}")
            self._launch(launch, blocks_at, pages_at, items, tiles, items if programs is None else min(items, programs))
            blocks_at += blocks.nbytes
        done = slot.until = self._events.record(self._stream)
        return done

    def _kernel(self, geometry: Geometry, bits: int, bounded: bool) -> _Launch:
        key = (geometry, alignment(bits), bounded)
        launch = self._launches.get(key)
        if launch is None:
            chosen = variant(geometry, bits, self._tuning.bounded if bounded else self._tuning.tile)
            launch = self._launches[key] = _Launch(chosen, self._kernels.get(chosen))
        return launch

    def _launch(self, launch: _Launch, blocks_at: int, pages_at: int, items: int, tiles: int, programs: int) -> None:
        kernel = launch.kernel
        arguments = launch.arguments
        arguments[0], arguments[1], arguments[2], arguments[3] = blocks_at, pages_at, items, tiles
        checked(
            self._driver.cuLaunchKernel(
                kernel.function, programs, 1, 1, kernel.threads, 1, 1, kernel.shared, self._stream, launch.parameters, 0
            ),
            "cannot launch the copy kernel",
        )
