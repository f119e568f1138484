"""Copier for host memory, which copies without the GIL (`kvctl_agent/native/row_copies.c`).

A numpy call copies the pages of one plane of one layer and then takes the GIL again. Beside an engine whose thread runs
Python that takes up to 5 ms each time, and several copying threads delay each other. Here one call copies any number of
pieces, and the threads of the pool never need the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import LocalProtocolError, MemoryLayoutError
from kvctl_agent.memory.allocations import Bytes
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.part_layout import PIECE_BYTES, Piece, Span
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.segment import RowIndex, SegmentMemory
from kvctl_agent.native import row_copies

Job = tuple[row_copies.HeadSlice, npt.NDArray[np.int64], tuple[Span, ...], Bytes]
"""One piece: heads of the pool, pages, spans of the piece, and staging memory of at least its size."""


class Chained(Protocol):
    """What a copy pool runs after each piece of a copy, such as the write of the piece."""

    @property
    def then(self) -> object:
        """Capsule with a C function and its argument; the function takes the number of the piece as well."""
        ...


class HostCopy(PendingCopy, Protocol):
    """A copy of a copy pool. If it is dropped, pieces that no thread has begun are not copied."""

    @property
    def copy_ns(self) -> int:
        """Time that threads have spent copying, all together."""
        ...


class CopyPool:
    """Threads that copy without the GIL and wake the control loop; without threads, `done` of a copy copies.

    The owner must close the pool. A process whose owner does not close it still exits.

    Attributes:
        threads, considerate: As passed to the pool.
    """

    def __init__(self, threads: int, wake_fd: int, considerate: bool = False) -> None:
        """Creates a pool whose threads are started by `start`.

        Args:
            threads: Number of threads; with 0, a copy makes progress in the calls of its `done`.
            wake_fd: Eventfd to which the pool writes when a copy of its threads has ended.
            considerate: Whether the threads are not used while other threads of this process compute, such as an
                engine's: for hosts on which they would take its core.
        """
        self.threads = threads
        self.considerate = considerate
        self._pool = row_copies.Pool(threads, wake_fd, MemoryLayoutError, considerate)

    def start(self) -> CopyPool:
        """Starts the threads; returns the pool itself."""
        self._pool.start()
        return self

    @property
    def has_threads(self) -> bool:
        """Whether threads may copy now: those of a considerate pool do not while others compute than they and this one.

        To be asked by one thread only, the one that begins copies.
        """
        return self._pool.has_threads

    @property
    def pieces_at_once(self) -> int:
        """Number of pieces to begin at once: more, the longer the control loop takes to notice the end of a copy."""
        return self._pool.pieces_at_once

    def begin(self, gather: bool, jobs: list[Job], owner: Chained | None = None) -> HostCopy:
        """Begins a copy of one or more pieces, from the pool to staging if `gather`, otherwise from staging.

        Args:
            owner: What to run after each piece, on the thread that has copied it.

        Raises:
            LocalProtocolError: the pool is closed, or was made before this process was forked.
            MemoryLayoutError: a piece lies outside the part or the rank, or is larger than its staging memory.
        """
        try:
            return self._pool.begin(gather, jobs, owner)
        except ValueError as error:
            raise MemoryLayoutError(str(error)) from None
        except RuntimeError as error:
            raise LocalProtocolError(str(error)) from None

    def run(self, count: int, owner: Chained) -> PendingCopy:
        """Runs `owner.then` `count` times on the threads, without copying anything, whether or not others compute.

        Raises:
            LocalProtocolError: the pool is closed, or was made before this process was forked.
        """
        try:
            return self._pool.run(count, owner)
        except RuntimeError as error:
            raise LocalProtocolError(str(error)) from None

    def close(self) -> None:
        """Ends the threads once copies that have begun are finished; idempotent. Does nothing in a forked child."""
        self._pool.close()


class HostCopier:
    """Copies parts in host memory with a copy pool, which may be shared and is closed by its owner."""

    piece_bytes = PIECE_BYTES
    parts_at_once = 1  # so that a part is complete as soon as its own copy has ended

    def __init__(self, copy_pool: CopyPool) -> None:
        self._copy_pool = copy_pool

    @property
    def pieces_at_once(self) -> int:
        return self._copy_pool.pieces_at_once

    def gather(
        self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan], owner: Chained | None = None
    ) -> HostCopy:
        where, pages = _native_rows(rows)
        jobs = [(where, pages, piece.spans, host_array(span)) for piece, span in zip(pieces, into, strict=True)]
        return self._copy_pool.begin(True, jobs, owner)

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        jobs: list[Job] = []
        for rows, layout, region in landed:
            where, pages = _native_rows(rows)
            array = host_array(region)
            jobs += [(where, pages, piece.spans, array[piece.offset :]) for piece in layout.pieces()]
        return self._copy_pool.begin(False, jobs)

    def close(self) -> None:
        """Does nothing: the owner of the copy pool closes it."""


def host_array(span: MemorySpan) -> Bytes:
    """Returns the bytes of a span; raises MemoryLayoutError if it is on a device."""
    if span.array is None:
        raise MemoryLayoutError(f"staging memory at {span.addr:#x} is on a device; the host cannot copy it")
    return span.array


def gather_piece(piece: Piece, rows: RowIndex, out: Bytes) -> None:
    """Gathers all spans of `piece` into `out[:piece.nbytes]` on this thread.

    Raises:
        MemoryLayoutError: the piece lies outside the part or the rank, or is larger than `out`.
    """
    where, pages = _native_rows(rows)
    _copy_now(True, (where, pages, piece.spans, out))


def copy_rows(gather: bool, rows: Bytes, row_bytes: int, order: npt.NDArray[np.int64], piece: Bytes) -> None:
    """Copies as a copy of parts does, on this thread: rows of `rows` into `piece` if `gather`, otherwise back.

    Args:
        rows: Consecutive rows of `row_bytes` bytes.
        order: Numbers of the rows, at least one, in their order in `piece`.
        piece: At least as many bytes as these rows.
    """
    plane = 1, 1, row_bytes, row_bytes, row_bytes, row_bytes, 1  # a page of one row of one head
    where = row_copies.HeadSlice([rows.ctypes.data], [plane], len(rows) // row_bytes)
    _copy_now(gather, (where, order, (Span(0, 0, 0, len(order)),), piece))


def _copy_now(gather: bool, job: Job) -> None:
    wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        pool = CopyPool(0, wake_fd)
    finally:
        os.close(wake_fd)  # the pool has a copy of it
    try:
        copy = pool.begin(gather, [job])
        while not copy.done():
            pass
    finally:
        pool.close()


def _native_rows(rows: RowIndex) -> tuple[row_copies.HeadSlice, npt.NDArray[np.int64]]:
    """Returns the addresses of a part's heads in every block, which are kept while the pool is open, and its pages."""
    memory = rows.memory
    key = "native rows", rows.head, rows.heads
    where = memory.derived.get(key)
    if where is None:
        where = memory.derived[key] = _head_slice(memory, rows.head, rows.heads)
    return where, np.ascontiguousarray(rows.raw_pages, np.int64)


def _head_slice(memory: SegmentMemory, head: int, heads: int) -> row_copies.HeadSlice:
    where = memory.addresses
    blocks = [
        memory.view(block).ctypes.data + head * strides.head
        for layer in memory.blocks
        for strides, block in zip(where.strides, layer, strict=True)
    ]
    planes = [
        (plane.rows, heads, plane.head_bytes, *strides, where.split)
        for plane, strides in zip(memory.shard.segment.planes, where.strides, strict=True)
    ]
    return row_copies.HeadSlice(blocks, planes, memory.num_slots)
