"""Interface of a device (GPU), which the packages memory, paths and runtime use.

A device has memory, which kernels on any stream read and write; streams, which run their work in order; and events,
which show how far a stream has progressed. Unless documented otherwise, calls do not wait for kernels and may be made
on any thread; a `RowCopies` is used by one thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.choices import HOST

__all__ = [
    "HOST",
    "Batch",
    "BlockRange",
    "BlockRanges",
    "Blocks",
    "Device",
    "DeviceMemory",
    "Event",
    "Export",
    "Geometry",
    "Mapping",
    "Packed",
    "PageIds",
    "PageStrides",
    "PendingChecksum",
    "RowCopies",
    "Table",
    "checksum_word",
]

Blocks = npt.NDArray[np.int64]
"""Block table, int64 `[n, 5]`; see `Batch`."""

PageIds = npt.NDArray[np.int32]
"""Page numbers, int32 `[n]`."""


class Event(Protocol):
    """An event on a stream; it is done when all work enqueued before it has ended."""

    handle: Any

    def done(self) -> bool:
        """Returns whether the event is done, without waiting; once True, the result stays True.

        Raises:
            DeviceError: a kernel failed; all later calls on this device will fail too.
        """
        ...

    def wait(self, stream: Any) -> None:
        """Makes a stream wait for this event. The caller does not wait.

        `torch.cuda.Stream.wait_event(event)` calls this method as well.

        Args:
            stream: A `torch.cuda.Stream`, an object with `cuda_stream`, or the stream's handle.
        """
        ...


class PageStrides(NamedTuple):
    """Strides in bytes of a paged side of a copy.

    Row r, head h of page p is at the block's address + p // split * page + p % split * sub + r * row + h * head.

    Attributes:
        page: Distance between pages of the engine, each of which consists of `split` consecutive pages of the copy.
        split: Pages of the copy in a page of the engine.
        sub: Distance between the pages of the copy within a page of the engine; unused if `split` is 1.
    """

    page: int
    row: int
    head: int
    split: int = 1
    sub: int = 0


class Geometry(NamedTuple):
    """Geometry of one kernel launch. Launches with the same geometry share a compiled kernel.

    Each side is either *paged* and has strides, or *packed*: the pages of a block are consecutive, and rows and heads
    have no gaps. Heads are copied in the order page, row, head.

    Attributes:
        width: Bytes of a head in one row, contiguous on both sides.
        src, dst: Strides of the source and the destination; None if packed.
    """

    rows: int
    heads: int
    width: int
    src: PageStrides | None
    dst: PageStrides | None

    @property
    def page_bytes(self) -> int:
        """Bytes that are copied of a page."""
        return self.rows * self.heads * self.width

    def reversed(self) -> Geometry:
        """Returns the geometry with source and destination exchanged."""
        return self._replace(src=self.dst, dst=self.src)

    def merged(self) -> Geometry:
        """Returns an equivalent geometry with the widest heads and the fewest rows, heads and split pages.

        Heads that are adjacent on both sides become one, and so do rows. The order in which heads are copied changes
        only if both sides are paged.
        """
        rows, heads, width = self.rows, self.heads, self.width
        src, dst = (_unsplit(side, self.page_bytes) for side in (self.src, self.dst))
        if src is not None and dst is not None and src.row < src.head and dst.row < dst.head:
            # The rows of a head are closer together than the heads of a row.
            rows, heads = heads, rows
            src, dst = (side._replace(row=side.head, head=side.row) for side in (src, dst))
        # A packed side has no gaps, so it never prevents a merge.
        if heads == 1 or all(side.head == width for side in (src, dst) if side):
            width, heads = width * heads, 1
        elif rows == 1 or all(side.row == heads * side.head for side in (src, dst) if side):
            src, dst = (side and side._replace(row=side.head) for side in (src, dst))
            rows, heads = rows * heads, 1
        if heads == 1 and (rows == 1 or all(side.row == width for side in (src, dst) if side)):
            width, rows = width * rows, 1
        src, dst = (side and _used(side, rows, heads, width) for side in (src, dst))
        return Geometry(rows, heads, width, src, dst)


def _unsplit(side: PageStrides | None, page_bytes: int) -> PageStrides | None:
    """Returns the strides with `split` 1 if the pages of the copy are at equal distances."""
    if side is not None and side.page == side.split * side.sub:
        return PageStrides(side.sub, side.row, side.head)
    return side


def _used(side: PageStrides, rows: int, heads: int, width: int) -> PageStrides:
    """Returns the strides with those that are not used replaced, so that equal copies have equal geometries."""
    page, row, head, split, sub = side
    return PageStrides(page, row if rows > 1 else width, head if heads > 1 else width, split, sub if split > 1 else 0)


class Batch(NamedTuple):
    """Blocks of one geometry that one launch copies, for example all layers of K and V of several parts.

    Attributes:
        blocks: int64 `[n, 5]`. The columns are the source address (first head of page 0 if paged, else the first packed
            page), the destination address likewise, the index of the first source page in the launch's page list, the
            index of the first destination page in it (both unused on a packed side), and the number of pages.
    """

    geometry: Geometry
    blocks: Blocks

    @property
    def data(self) -> bytes:
        """The blocks as the kernel reads them."""
        return self.blocks.tobytes()

    @property
    def summary(self) -> tuple[int, int]:
        """Bitwise or of all addresses, which shows their common alignment; and a bound of the pages of a block.

        The bound is the bitwise or of the page counts: at least their maximum, and equal to it if all are equal.
        """
        source, target, _, _, pages = np.bitwise_or.reduce(self.blocks).tolist()
        return source | target, pages


class KeptBatch(Batch):
    """A batch that is launched again and again, so that what a launch needs of its blocks is computed once."""

    @cached_property
    def data(self) -> bytes:
        return super().data

    @cached_property
    def summary(self) -> tuple[int, int]:
        return super().summary


class Table:
    """Blocks of one geometry with fixed addresses, paged on one side and packed on the other.

    The table is uploaded once, so that a launch need not build and upload a block table, which would be most of its
    time on the host.

    Attributes:
        paged: int64 `[n]`, the paged address of each block, as in a batch.
        before: int64 `[n]`, the offset of each block on the packed side, in bytes, if every block has one page.
        bits: Bitwise or of all numbers in `paged` and `before`, which shows their common alignment.
    """

    def __init__(self, geometry: Geometry, paged: npt.NDArray[np.int64], before: npt.NDArray[np.int64]) -> None:
        self.geometry = geometry
        self.paged, self.before = paged, before
        self.bits = int(np.bitwise_or.reduce(paged) | np.bitwise_or.reduce(before))


class BlockRange(NamedTuple):
    """Consecutive blocks of a table that have the same pages and are packed consecutively.

    Attributes:
        lo, hi: Blocks [lo, hi).
        shift: Bytes added to every paged address, for example the offset of the first head.
        packed: Address on the packed side; block b begins at packed + before[b] * pages.
        first_page: Index of the first page in the launch's page list.
    """

    lo: int
    hi: int
    shift: int
    packed: int
    pages: int
    first_page: int


Packed = tuple[int, int, int, int, int, int]
"""A `BlockRange`, or a plain tuple with its fields, which takes a third of the time to create."""


class BlockRanges(NamedTuple):
    """Block ranges of one table that one launch copies, for example those of several parts."""

    table: Table
    ranges: Sequence[Packed]

    def batch(self) -> Batch:
        """Returns the equivalent batch, with one row per block."""
        paged, packed = (1, 0) if self.table.geometry.src is None else (0, 1)
        tables = []
        for lo, hi, shift, base, pages, first_page in self.ranges:
            blocks = np.zeros((hi - lo, 5), np.int64)
            blocks[:, paged] = self.table.paged[lo:hi] + shift
            blocks[:, packed] = self.table.before[lo:hi] * pages + base
            blocks[:, 2 + paged] = first_page
            blocks[:, 4] = pages
            tables.append(blocks)
        return Batch(self.table.geometry, np.concatenate(tables))


def checksum_word(head_bytes: int) -> int:
    """Returns the bytes of the words of which the checksum of heads of `head_bytes` bytes consists: 4, 2 or 1."""
    return min(4, head_bytes & -head_bytes)


class PendingChecksum(Protocol):
    """A checksum that is being computed."""

    @property
    def value(self) -> int:
        """The 32-bit checksum, once `done` has returned True."""
        ...

    def done(self) -> bool:
        """Returns whether the checksum is known, without waiting; once True, the result stays True.

        Raises:
            DeviceError: the checksum could not be computed.
        """
        ...


class RowCopies(Protocol):
    """Copies rows between pages and packed memory, or from pages to pages, in order on its own stream."""

    def prepare(self, geometries: Sequence[Geometry], checksum: bool = False) -> None:
        """Compiles and loads the kernels for these geometries; this takes about 1 s per geometry, once per machine.

        Args:
            geometries: Geometries of copies; if `checksum`, of rows whose checksum will be computed.
            checksum: Whether to prepare `checksum` instead of `begin`.
        """
        ...

    def begin(
        self,
        batches: Sequence[Batch | BlockRanges],
        pages: PageIds,
        after: Event | None = None,
        programs: int | None = None,
    ) -> Event:
        """Enqueues copies on the stream.

        Args:
            batches: Batches and block ranges, none of them empty.
            pages: Page list of the launch. The array may be reused as soon as the call returns.
            after: The copies start after this event of any stream of this device.
            programs: Maximum number of thread blocks, which about equals that of multiprocessors used; None: no limit.

        Returns:
            An event that is done when all copies have ended and are visible to all later kernels of this device and to
            transport engines.

        Raises:
            DeviceError: the copies could not be launched.
        """
        ...

    def checksum(self, batches: Sequence[Batch | BlockRanges], pages: PageIds) -> PendingChecksum:
        """Enqueues the computation of the checksum of paged rows; see `memory.checksum`.

        Poll the result until it is done, even if it is no longer needed.

        Args:
            batches: Batches and block ranges of gathers, whose destination addresses are positions in the part. The
                width of a geometry is that of a head.

        Raises:
            DeviceError: the kernel could not be launched.
        """
        ...

    def close(self) -> None:
        """Waits for the enqueued copies and frees all resources; idempotent.

        Raises:
            DeadlineExceeded: a kernel does not end; the memory that it may still read is not freed.
        """
        ...


class DeviceMemory(Protocol):
    """An allocation in a device's memory, or a host allocation with the same interface."""

    @property
    def addr(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Frees the memory; idempotent. No peer may access the memory any more."""
        ...


class Export(NamedTuple):
    """Handle of one device allocation, with which other processes can map it.

    Attributes:
        addr, nbytes: Address in the exporting process, and size of the whole allocation.
        kind: Kind of the handle: "ipc" (within a host) or "fabric" (between hosts of one NVLink domain).
    """

    addr: int
    nbytes: int
    kind: str
    handle: bytes
    device: str


class Mapping(Protocol):
    """Device memory of a peer that is mapped into this process's address space.

    Attributes:
        lane: The interconnect to the memory: "same device", "nvlink", "pcie" or "fabric".
    """

    @property
    def lane(self) -> str: ...

    def translate(self, addr: int, nbytes: int = 1) -> int:
        """Returns the local address of `nbytes` bytes at address `addr` of the peer.

        Raises:
            DeviceError: the bytes are not inside one allocation that the peer exported.
        """
        ...

    def translate_all(self, addrs: Blocks, nbytes: Blocks | int = 1) -> Blocks:
        """Translates an int64 array of addresses; `nbytes` broadcasts to its shape. Raises as `translate`."""
        ...

    def close(self) -> None:
        """Unmaps the memory without waiting; idempotent. No kernel may use the mapping any more."""
        ...


class Device(Protocol):
    """One device, as used by this process.

    Attributes:
        index: Number of the device in this process, as in the engine's tensors.
        pci: PCI address as in /sys, such as 0000:19:00.0; None for a device that is not on a PCI bus.
        event_query: Address of the driver's function that tells the state of an event; 0 if it has none.
    """

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def pci(self) -> str | None: ...

    @property
    def event_query(self) -> int: ...

    def allocate(self, nbytes: int, pool: str = "default") -> DeviceMemory:
        """Allocates memory, aligned to at least 256 bytes, not zeroed.

        Args:
            pool: "default", or "vmm" for memory that other hosts of the GPU's NVLink domain can map, if it is in one.

        Raises:
            DeviceError: the memory cannot be allocated; the text has the requested and the free size.
        """
        ...

    def enter(self) -> None:
        """Makes this device current on the calling thread, as transport engines use the thread's current device."""
        ...

    def visit(self) -> AbstractContextManager[None]:
        """Returns a context manager that makes this device current, for engine threads that may use another one."""
        ...

    def now(self) -> Event:
        """Records an event on a stream that is always idle, for callers that need an event of work already done."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> Event:
        """Starts a memcpy of contiguous bytes on a separate stream; measurements use it as the baseline for row copies.

        Args:
            target, source: Addresses in this device's memory or in a mapped peer's memory.

        Returns:
            An event that is done when the copy has ended.
        """
        ...

    def copies(self) -> RowCopies:
        """Creates a `RowCopies` with its own stream, for use by one thread."""
        ...

    def event_of(self, event: Any) -> Event:
        """Wraps an engine's event: a `torch.cuda.Event`, an object with `cuda_event`, or a handle.

        The result keeps the engine's event alive.

        Raises:
            DeviceError: the object is not an event.
        """
        ...

    def export(self, regions: Sequence[tuple[int, int]]) -> list[Export]:
        """Returns an export of each allocation that contains one of the regions (address, bytes).

        Raises:
            DeviceError: an allocation cannot be exported; the text has the reason and a remedy.
        """
        ...

    def open(self, exports: Sequence[Export], same_process: bool = False) -> Mapping:
        """Maps a peer's allocations.

        Args:
            same_process: Whether the peer is another agent of this process, so that addresses are the same.

        Raises:
            DeviceError: this device cannot reach the memory; the text has the reason.
        """
        ...

    def fill(self, addr: int, nbytes: int, value: int) -> None:
        """Sets `nbytes` bytes at `addr` to `value`, and waits until done."""
        ...

    def upload(self, addr: int, data: npt.NDArray[np.uint8]) -> None:
        """Copies `data` from host memory to `addr`, and waits until done."""
        ...

    def download(self, addr: int, out: npt.NDArray[np.uint8]) -> None:
        """Copies memory at `addr` to the host array `out`, filling it, and waits until done."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns the device's name, driver version, memory sizes and capabilities, for display."""
        ...
