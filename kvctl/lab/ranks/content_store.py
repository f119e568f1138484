"""Writes and checks the test pattern, and the poison where no pattern belongs, in a KV pool with numpy.

`HostStore` works on a pool in host memory, `MirrorStore` on a pool on a device, through copies in host memory. What is
said of pages applies to the items of a state component as well. A bench does not time these calls; they return when the
work is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvctl.lab.ranks.pattern import POISON, Bytes, Pages, PlaneId, Rows, Words, Writer, Wrong
from kvctl_agent.device.base import Device
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory.addresses import PlaneStrides
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import SegmentMemory

# Copies between a device and the host: the bytes that take as long as starting a copy, and the most in one.
_COPY_BYTES = 100 << 10
_SPAN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PlaneView:
    """One plane (K, V, latent, state component) of one segment, in all layers that a rank holds.

    Attributes:
        shard: the layers and heads of the segment that this rank holds.
        index: position of the plane within a layer.
    """

    pool: KVPool
    shard: LocalShard
    index: int
    plane: Plane
    writer: Writer

    @property
    def num_slots(self) -> int:
        """Number of pages, or state items, in each layer."""
        return self._memory.num_slots

    @property
    def rows(self) -> Rows:
        return self.writer.rows

    @property
    def strides(self) -> PlaneStrides:
        return self._memory.addresses.strides[self.index]

    @property
    def _memory(self) -> SegmentMemory:
        return self.pool.segments[self.shard.segment.index]

    @property
    def name(self) -> str:
        """Name of the plane in mismatch reports: "k", "latent", "draft k", "swa k", or a state component's name."""
        segment = self.shard.segment
        return self.plane.name if segment.name == "kv" or segment.state else f"{segment.name} {self.plane.name}"

    def elements(self) -> Iterator[tuple[PlaneId, Bytes]]:
        """Yields (plane id, view `[pages, rows, heads, bytes]`) of each layer of a pool in host memory."""
        for layer in range(self.shard.layer_lo, self.shard.layer_hi):
            yield self._plane_id(layer), self._memory.elements(layer, self.index)

    def addresses(self) -> Iterator[tuple[PlaneId, int]]:
        """Yields (plane id, address of page 0) of each layer, for a pool in host or device memory."""
        for layer, planes in enumerate(self._memory.addresses.bases, self.shard.layer_lo):
            yield self._plane_id(layer), planes[self.index]

    def _plane_id(self, layer: int) -> PlaneId:
        return PlaneId(self.shard.segment.index, layer, self.index)


def plane_views(pool: KVPool, dtype_bytes: int) -> list[PlaneView]:
    """Returns a view of every plane of which a pool holds layers; `dtype_bytes` is the size of a KV element."""
    return [
        PlaneView(pool, memory.shard, index, plane, Writer(_rows(memory.shard, plane, dtype_bytes)))
        for memory in pool.segments
        if memory.shard.num_layers
        for index, plane in enumerate(memory.shard.segment.planes)
    ]


def _rows(shard: LocalShard, plane: Plane, dtype_bytes: int) -> Rows:
    # Scales and state have elements of other sizes; mismatches there are shown as bytes.
    kv = not shard.segment.state and plane.head_bytes % dtype_bytes == 0 and "scale" not in plane.name
    return Rows(
        per_page=plane.rows,
        head_lo=shard.head_lo,
        heads=shard.heads,
        row_bytes=plane.head_bytes,
        element_bytes=dtype_bytes if kv else 1,
    )


class WrittenPage(NamedTuple):
    """A page that should contain only poison but contains other bytes."""

    plane: PlaneId
    page: int
    found: Bytes


class Store(ABC):
    """Writes and checks the content of one rank's pool."""

    step_bytes: ClassVar[int]  # of pages that are written or compared at once

    def fill(self, view: PlaneView, pages: Pages, bases: Words) -> None:
        """Writes the test pattern into all pages of a room in every layer; `bases` are its `pattern.row_bases`."""
        step, by_page = self._step(view), bases.reshape(-1, view.rows.per_page * view.rows.heads)
        order = np.argsort(pages)  # pages that are adjacent on a device are copied to it at once
        for plane, place in self._planes(view):
            for first in range(0, len(pages), step):
                some = order[first : first + step]
                dense = _dense(view, len(some))
                view.writer.fill(dense, by_page[some].reshape(-1), plane)
                self._write(view, place, pages[some], dense)

    def check(
        self, view: PlaneView, pages: Pages, bases: Words, firsts: Sequence[int], count: int
    ) -> tuple[PlaneId, Wrong] | None:
        """Compares a range of a room's pages in every layer with the test pattern.

        Args:
            pages, bases: as for `fill`.
            firsts: for each layer, the position in `pages` at which its range starts.
            count: number of pages compared in each layer.

        Returns:
            The first layer with a mismatch and the first wrong element there; None if everything is correct.
        """
        step = self._step(view)
        for (plane, place), first in zip(self._planes(view), firsts, strict=True):
            for at in range(first, first + count, step):
                found = self._read(view, place, pages[at : min(at + step, first + count)])
                wrong = view.writer.check(found, bases, plane, first_page=at)
                if wrong is not None:
                    return plane, wrong
        return None

    def written(self, view: PlaneView, pages: Pages) -> Iterator[WrittenPage]:
        """Yields, for each layer, the first of `pages` that contains other bytes than poison, if there is one."""
        step = self._step(view)
        for plane, place in self._planes(view):
            for first in range(0, len(pages), step):
                some = pages[first : first + step]
                found = self._read(view, place, some)
                hits = np.flatnonzero((found != POISON).any(axis=1))
                if len(hits):
                    yield WrittenPage(plane, int(some[hits[0]]), found[hits[0]])
                    break

    def _step(self, view: PlaneView) -> int:
        """Returns the number of pages to write or compare at once."""
        return max(1, self.step_bytes // view.rows.page_bytes)

    @abstractmethod
    def poison(self, view: PlaneView, pages: Pages | None = None) -> None:
        """Fills these pages with poison in every layer; None: all pages."""

    @abstractmethod
    def _planes(self, view: PlaneView) -> Iterator[tuple[PlaneId, Any]]:
        """Yields (plane id, place of the plane for `_read` and `_write`) of each layer."""

    @abstractmethod
    def _read(self, view: PlaneView, place: Any, pages: Pages) -> Bytes:
        """Returns the bytes of pages, uint8 `[pages, page_bytes]`."""

    @abstractmethod
    def _write(self, view: PlaneView, place: Any, pages: Pages, dense: Bytes) -> None:
        """Writes pages of a prefill rank, to whose pool nothing else writes."""


class HostStore(Store):
    """Store for a pool in host memory."""

    step_bytes = 256 << 10

    def poison(self, view: PlaneView, pages: Pages | None = None) -> None:
        for _, elements in view.elements():
            elements[slice(None) if pages is None else pages] = POISON

    def _planes(self, view: PlaneView) -> Iterator[tuple[PlaneId, Any]]:
        return view.elements()

    def _read(self, view: PlaneView, place: Bytes, pages: Pages) -> Bytes:
        return place[pages].reshape(len(pages), -1)

    def _write(self, view: PlaneView, place: Bytes, pages: Pages, dense: Bytes) -> None:
        place[pages] = dense.reshape(-1, *place.shape[1:])


class MirrorStore(Store):
    """Store for a pool on a device, through copies in host memory.

    Pages that lie near one another are copied at once, with what is between them: each copy takes as long as some
    further 100 KiB, and a pool of small pages, such as those of one token, has millions of them.
    """

    step_bytes = _SPAN_BYTES

    def __init__(self, device: Device) -> None:
        self._device = device

    def poison(self, view: PlaneView, pages: Pages | None = None) -> None:
        for _, base in view.addresses():
            if pages is None:
                # Between the elements are only those of other planes, which are all filled.
                self._device.fill(base, (view.num_slots - 1) * view.strides.page + _page_extent(view), POISON)
            else:
                # Parts of other rooms may land in the pages between these.
                self._upload(view, base, pages, np.full((len(pages), view.rows.page_bytes), POISON, np.uint8), 0)

    def _planes(self, view: PlaneView) -> Iterator[tuple[PlaneId, Any]]:
        return view.addresses()

    def _read(self, view: PlaneView, place: int, pages: Pages) -> Bytes:
        dense = _dense(view, len(pages))
        for span in _spans(view, pages, _COPY_BYTES):
            self._device.download(place + span.offset, span.memory)
            dense[span.positions] = span.elements[span.pages].reshape(len(span.pages), -1)
        return dense

    def _write(self, view: PlaneView, place: int, pages: Pages, dense: Bytes) -> None:
        self._upload(view, place, pages, dense, _COPY_BYTES)

    def _upload(self, view: PlaneView, base: int, pages: Pages, dense: Bytes, gap: int) -> None:
        """Writes pages; what lies between their elements, and up to `gap` bytes between pages, is written unchanged."""
        for span in _spans(view, pages, gap):
            if len(span.pages) * view.rows.page_bytes < span.memory.size:
                self._device.download(base + span.offset, span.memory)
            span.elements[span.pages] = dense[span.positions].reshape(-1, *span.elements.shape[1:])
            self._device.upload(base + span.offset, span.memory)


class _Span(NamedTuple):
    """Host memory for a span of a plane that is copied at once.

    Attributes:
        offset: bytes from the start of the plane to that of the span.
        elements: view `[pages, rows, heads, bytes]` of the plane's elements in the span.
        pages: indices in `elements` of the pages that are wanted.
        positions: their positions in the list of wanted pages.
    """

    offset: int
    memory: Bytes
    elements: Bytes
    pages: Pages
    positions: Pages


def _spans(view: PlaneView, pages: Pages, gap: int) -> Iterator[_Span]:
    """Divides pages into spans of pages that are adjacent, or less than `gap` bytes apart, in ascending order."""
    if not len(pages):
        return
    rows, strides = view.rows, view.strides
    order = np.argsort(pages)
    at = pages[order].astype(np.int64) * strides.page
    cuts = (np.diff(at) > strides.page + gap) | (np.diff(at // _SPAN_BYTES) > 0)
    for positions in np.split(order, np.flatnonzero(cuts) + 1):
        first, last = int(pages[positions[0]]), int(pages[positions[-1]])
        memory = np.empty((last - first) * strides.page + _page_extent(view), np.uint8)
        shape = last - first + 1, rows.per_page, rows.heads, rows.row_bytes
        elements = np.lib.stride_tricks.as_strided(memory, shape, (*strides, 1))
        yield _Span(first * strides.page, memory, elements, pages[positions] - first, positions)


def _page_extent(view: PlaneView) -> int:
    """Returns the bytes from the first to the last element of a page."""
    rows, (_, row, head) = view.rows, view.strides
    return (rows.per_page - 1) * row + (rows.heads - 1) * head + rows.row_bytes


def _dense(view: PlaneView, pages: int) -> Bytes:
    return np.empty((pages, view.rows.page_bytes), np.uint8)
