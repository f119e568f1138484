"""What memory, paths and runtime need of a device; everything above is written against this file alone.

A device has memory, which kernels of any stream read and write; streams, which run in order what is put on them; and
events, which say how far a stream has come. No call here waits for a kernel, but for those that say so. Calls may come
from any thread; a `RowCopies` belongs to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.memory import HOST

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
    "RowCopies",
    "Table",
]

Blocks = npt.NDArray[np.int64]
"""int64 `[n, 5]`, see `Batch`."""

PageIds = npt.NDArray[np.int32]
"""Page numbers, int32 `[n]`."""


class Event(Protocol):
    """A moment on a stream: everything that was put there before it."""

    def done(self) -> bool:
        """Whether the stream has come so far; never waits. True for ever after.

        Raises:
            DeviceError: a kernel failed; so will everything else on this device.
        """
        ...

    def wait(self, stream: Any) -> None:
        """Makes an engine's stream wait for this moment; the caller does not.

        Called this way by `torch.cuda.Stream.wait_event(event)`, too.

        Args:
            stream: a `torch.cuda.Stream`, or anything with `cuda_stream`, or the handle itself.
        """
        ...


class Geometry(NamedTuple):
    """How the rows of one launch lie, in bytes; launches of one geometry share a compiled kernel.

    A side is *paged*: page p of a block begins at the block's address + p x rows x its row distance; or *packed*: the
    block's pages follow each other, row after row without gaps.

    Attributes:
        rows: of a page.
        width: what is copied of each row.
        src_row, dst_row: from one row to the next in a paged side; `width` where that side is packed.
        src_paged, dst_paged: which sides are paged.
    """

    rows: int
    width: int
    src_row: int
    dst_row: int
    src_paged: bool
    dst_paged: bool


class Batch(NamedTuple):
    """What one launch copies: blocks of one geometry, all layers of K and V, say, and of several parts.

    Attributes:
        geometry: of all blocks.
        blocks: int64 `[n, 5]`, for each: address of the source (of its page 0 where paged, first head included, else of
            the first packed page); of the destination, likewise; where its source pages begin in the list of pages that
            goes with the launch, and where its destination pages (unused for a packed side); number of pages.
    """

    geometry: Geometry
    blocks: Blocks


class Table:
    """Blocks of one geometry, paged on one side and packed on the other, that stay where they are.

    A launch of such needs no table of its own, whose making and upload is most of what one costs the host.

    Attributes:
        geometry: of all blocks.
        paged: int64 `[n]`, each block's address, as in a batch.
        before: int64 `[n]`, bytes that lie packed before each, where all blocks have one page.
        bits: of all these numbers, or-ed: what they are multiples of.
    """

    def __init__(self, geometry: Geometry, paged: npt.NDArray[np.int64], before: npt.NDArray[np.int64]) -> None:
        self.geometry = geometry
        self.paged, self.before = paged, before
        self.bits = int(np.bitwise_or.reduce(paged) | np.bitwise_or.reduce(before))


class BlockRange(NamedTuple):
    """Consecutive blocks of a table with the same pages, packed one after the other.

    Attributes:
        lo, hi: blocks [lo, hi).
        shift: added to every paged address: where heads begin, say.
        packed: what `before` x pages is added to, so that block `lo` begins where it shall.
        pages: how many.
        listed: where they begin in the list of pages that goes with the launch.
    """

    lo: int
    hi: int
    shift: int
    packed: int
    pages: int
    listed: int


Packed = tuple[int, int, int, int, int, int]
"""A `BlockRange`, or a plain tuple like it, which is made in a third of the time."""


class BlockRanges(NamedTuple):
    """What one launch copies, like a `Batch`: strips of one table, of several parts, say."""

    table: Table
    strips: Sequence[Packed]

    def batch(self) -> Batch:
        """The same, block by block."""
        paged, packed = (0, 1) if self.table.geometry.src_paged else (1, 0)
        each = []
        for lo, hi, shift, base, pages, listed in self.strips:
            blocks = np.zeros((hi - lo, 5), np.int64)
            blocks[:, paged] = self.table.paged[lo:hi] + shift
            blocks[:, packed] = self.table.before[lo:hi] * pages + base
            blocks[:, 2 + paged] = listed
            blocks[:, 4] = pages
            each.append(blocks)
        return Batch(self.table.geometry, np.concatenate(each))


class RowCopies(Protocol):
    """Copies rows in order, on a stream of its own."""

    def prepare(self, geometries: Sequence[Geometry]) -> None:
        """Compiles what is not compiled yet (about a second each, the first time on a machine), and waits for it."""
        ...

    def begin(
        self,
        batches: Sequence[Batch | BlockRanges],
        pages: PageIds,
        after: Event | None = None,
        programs: int | None = None,
    ) -> Event:
        """Puts copies on the stream.

        Args:
            batches: none empty.
            pages: page numbers that the batches' blocks point into; may be reused as soon as this returns.
            after: begin no sooner than this moment, of whatever stream of this device.
            programs: use at most so many thread blocks, and so about as many multiprocessors; None: all.

        Returns:
            When all of it is done, and visible to every later kernel of this device and to engines.

        Raises:
            DeviceError: it could not be launched.
        """
        ...

    def close(self) -> None:
        """Waits for what was begun, gives everything back; idempotent.

        Raises:
            DeadlineExceeded: a kernel does not end; what it may still read stays as it is.
        """
        ...


class DeviceMemory(Protocol):
    """Memory of a device that we own; or host memory, behind the same words."""

    @property
    def addr(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """Gives it back now; idempotent. Peers must have drained."""
        ...


class Export(NamedTuple):
    """One allocation that other processes may map.

    Attributes:
        addr, nbytes: where it is in the exporting process; all of the allocation.
        kind: how `handle` is meant: "ipc" (one host) or "fabric" (several hosts that share an NVLink domain).
        handle: the driver's.
        device: the driver's name for the device (its UUID).
    """

    addr: int
    nbytes: int
    kind: str
    handle: bytes
    device: str


class Mapping(Protocol):
    """A peer's memory in our address space.

    Attributes:
        lane: how it is reached: "same device", "nvlink", "pcie" or "fabric".
    """

    @property
    def lane(self) -> str: ...

    def translate(self, addr: int, nbytes: int = 1) -> int:
        """Our address for one of the peer's, at which so many bytes are.

        Raises:
            DeviceError: they do not all lie in one allocation that the peer exported.
        """
        ...

    def translate_all(self, addrs: Blocks, nbytes: Blocks | int = 1) -> Blocks:
        """The same for many addresses, int64 of any shape, and as many sizes, or shapes that broadcast to it."""
        ...

    def close(self) -> None:
        """Unmaps; idempotent. Waits for no kernel: none may be running on it any more."""
        ...


class Device(Protocol):
    """One device, in this process.

    Attributes:
        index: its number here, as the engine's tensors have it.
        name: for people.
    """

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

    def allocate(self, nbytes: int, pool: str = "default") -> DeviceMemory:
        """Memory of our own, at least 256-byte aligned, not zeroed.

        Args:
            pool: "default", or "vmm": backed so that other hosts of an NVLink domain can map it, where there is one.

        Raises:
            DeviceError: says how much was asked for and how much is free.
        """
        ...

    def enter(self) -> None:
        """Makes this device the current one of this thread, for engines that ask the driver; cheap where it is."""
        ...

    def visit(self) -> AbstractContextManager[None]:
        """The same within a block: for threads that are not ours, and may have another device."""
        ...

    def now(self) -> Event:
        """A moment on a stream of ours with nothing before it: for whoever wants an event of what is done already."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> Event:
        """Copies contiguous bytes by the driver's own means, on a stream for this alone: the floor of all copies.

        Args:
            target, source: addresses of this device's memory or of a mapped peer's.
        """
        ...

    def copies(self) -> RowCopies:
        """A stream of copies for one thread."""
        ...

    def event_of(self, given: Any) -> Event:
        """An engine's event (`torch.cuda.Event`, anything with `cuda_event`, or a handle), which it keeps alive.

        Raises:
            DeviceError: it is none.
        """
        ...

    def export(self, regions: Sequence[tuple[int, int]]) -> list[Export]:
        """What a peer needs to map the allocations that these (address, bytes) lie in; each allocation once.

        Raises:
            DeviceError: one of them cannot be exported; says why and what to change.
        """
        ...

    def open(self, exports: Sequence[Export], same_process: bool = False) -> Mapping:
        """Maps a peer's allocations.

        Args:
            same_process: the peer is another agent of this process, whose addresses are ours.

        Raises:
            DeviceError: they cannot be reached from this device; says why.
        """
        ...

    def fill(self, addr: int, nbytes: int, value: int) -> None:
        """Sets every byte, and waits for it."""
        ...

    def upload(self, addr: int, data: npt.NDArray[np.uint8]) -> None:
        """Copies from host memory, and waits for it."""
        ...

    def download(self, addr: int, out: npt.NDArray[np.uint8]) -> None:
        """Copies to host memory, and waits for it."""
        ...

    def describe(self) -> dict[str, Any]:
        """For people: name, driver, memory, what it can do."""
        ...
