"""Addresses and strides of a pool, and the arithmetic with which peers write into its pages.

A decode rank sends its `PoolAddresses` once, in Hello, and writers compute every destination address from it. The
layers and heads of a rank follow from the plan and are not sent.

A plane of a layer is described by strides: head h of row t of page p is `head_bytes` contiguous bytes at base +
p * page + t * row + h * head. The layouts of all engines differ only in these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError, RemoteProtocolError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane

Indices = npt.NDArray[np.int64]

_NUMBERS = ("num_pages", "aux_slots")
_LISTS = ("slots", "bases", "strides", "aux_bases", "aux_row_bytes")


class PlaneStrides(NamedTuple):
    """Distances in bytes between consecutive pages, rows of a page, and heads of a row of one plane."""

    page: int
    row: int
    head: int


class PageSteps(NamedTuple):
    """Distances of transfer pages in a plane.

    Attributes:
        page: Bytes between consecutive pages of the engine.
        split: Transfer pages in one of them.
        within: Bytes between consecutive transfer pages in one of them.
    """

    page: int
    split: int
    within: int

    def offsets(self, pages: npt.NDArray[np.integer[Any]]) -> Indices:
        """Returns the distance in bytes of each transfer page from the first one, int64 of the shape of `pages`."""
        wide = pages.astype(np.int64, copy=False)
        if self.split == 1:
            return wide * self.page
        return wide // self.split * self.page + wide % self.split * self.within


def contiguous_strides(plane: Plane, heads: int) -> PlaneStrides:
    """Returns the strides of a contiguous plane `[pages, rows, heads, head_bytes]`."""
    return PlaneStrides(plane.rows * heads * plane.head_bytes, heads * plane.head_bytes, plane.head_bytes)


@dataclass(frozen=True, slots=True)
class SegmentAddresses:
    """Base addresses and strides of one segment on one rank; layers are numbered as in the segment.

    The pages are transfer pages: an engine's page consists of `split` of them, each with the rows that the shard's
    planes have. Strides of planes of state are those of items.

    Attributes:
        shard: The rank's layers and heads of the segment, with the rows of a transfer page.
        num_slots: Transfer pages, or items; 0 if the rank has no layer of the segment.
        bases: For each local layer, the address of page 0 of each plane.
        strides: The strides of each plane, `page` being that of the engine's pages; contiguous planes if empty.
        split: Transfer pages in one page of the engine.
    """

    shard: LocalShard
    num_slots: int
    bases: tuple[tuple[int, ...], ...]
    strides: tuple[PlaneStrides, ...] = ()
    split: int = 1

    def __post_init__(self) -> None:
        """Sets the strides of contiguous planes if none are given."""
        if not self.strides:
            planes, heads = self.shard.segment.planes, self.shard.heads
            object.__setattr__(self, "strides", tuple(contiguous_strides(plane, heads) for plane in planes))

    def row_bytes(self, plane: int) -> int:
        """Returns the bytes of all local heads of one row of a plane, without gaps."""
        return self.shard.heads * self.shard.segment.planes[plane].head_bytes

    def page_bytes(self, plane: int) -> int:
        """Returns the bytes of all local heads of one page of a plane in one layer, without gaps."""
        return self.shard.segment.planes[plane].rows * self.row_bytes(plane)

    def split_stride(self, plane: int) -> int:
        """Returns the bytes between consecutive transfer pages inside one page of the engine."""
        return self.shard.segment.planes[plane].rows * self.strides[plane].row

    def extent(self, plane: int) -> int:
        """Returns the bytes from the base of a plane to the end of its last element; 0 without slots.

        Other planes may lie inside: with K and V fused in one tensor, the extents of both overlap.
        """
        _, rows, head_bytes = self.shard.segment.planes[plane]
        page, row, head = self.strides[plane]
        pages = self.num_slots // self.split
        if not pages:
            return 0
        return (pages - 1) * page + (rows * self.split - 1) * row + (self.shard.heads - 1) * head + head_bytes

    def page_steps(self, plane: int) -> PageSteps:
        """Returns the distances of the transfer pages of a plane."""
        return PageSteps(self.strides[plane].page, self.split, self.split_stride(plane))

    def at(self, shard: LocalShard, split: int) -> SegmentAddresses:
        """Returns the addresses of the same memory in transfer pages, `split` of which make one page of this object.

        Args:
            shard: The shard of this object, with the rows of a transfer page.
            split: Transfer pages in one page; 1 for state, which is never divided.

        Raises:
            MemoryLayoutError: the rows of the shard are not those of this object's pages divided by `split`.
        """
        for mine, theirs in zip(self.shard.segment.planes, shard.segment.planes, strict=True):
            if mine.rows != theirs.rows * split:
                raise MemoryLayoutError(
                    f"{self.shard.segment.name}: a page of {mine.name} has {mine.rows} rows, which are not {split} "
                    f"transfer pages of {theirs.rows}"
                )
        return SegmentAddresses(shard, self.num_slots * split, self.bases, self.strides, self.split * split)


@dataclass(frozen=True, slots=True)
class PoolAddresses:
    """Addresses of all segments of a pool, in the model's order, and of its aux rows.

    Attributes:
        aux_bases: Address of row 0 of each aux buffer; empty without aux rows.
    """

    segments: tuple[SegmentAddresses, ...]
    aux_bases: tuple[int, ...]
    aux_row_bytes: tuple[int, ...]
    aux_slots: int

    @property
    def num_pages(self) -> int:
        """Number of KV pages in the pool."""
        return self.segments[0].num_slots

    def at(self, shards: tuple[LocalShard, ...], split: int) -> PoolAddresses:
        """Returns the addresses of the same memory in transfer pages, `split` of which make one page of the engine.

        Args:
            shards: The rank's shards for the size of a transfer page.
            split: Transfer pages in one page of KV.

        Raises:
            MemoryLayoutError: the shards do not fit the pages divided by `split`.
        """
        pairs = zip(self.segments, shards, strict=True)
        segments = tuple(each.at(shard, split if shard.segment.table == 0 else 1) for each, shard in pairs)
        return replace(self, segments=segments)

    def to_wire(self) -> dict[str, Any]:
        """Returns the addresses as ints and lists of ints, for the codec; in the engine's pages, without `split`.

        `slots` has the pages or items of each segment. `bases` has the bases of all segments, ordered by segment, layer
        and plane; `strides` has page, row and head stride of each plane, ordered by segment.
        """
        return {
            "num_pages": self.num_pages,
            "slots": [segment.num_slots for segment in self.segments],
            "bases": [base for segment in self.segments for layer in segment.bases for base in layer],
            "strides": [stride for segment in self.segments for plane in segment.strides for stride in plane],
            "aux_bases": list(self.aux_bases),
            "aux_row_bytes": list(self.aux_row_bytes),
            "aux_slots": self.aux_slots,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any], shards: tuple[LocalShard, ...]) -> PoolAddresses:
        """Checks and converts the addresses that a peer sent.

        Args:
            wire: The mapping that the peer's `to_wire` returned.
            shards: The peer's shards according to the plan.

        Raises:
            RemoteProtocolError: a field is malformed or does not fit the shards; the text names the field.
        """
        names = {*_NUMBERS, *_LISTS}
        if set(wire) != names:
            fields = sorted(map(str, set(wire) ^ names))
            raise RemoteProtocolError(
                f"pool addresses: missing or unknown fields {fields}; run the same version of kvctl on both sides"
            )
        for name in _NUMBERS:
            if not _is_address(wire[name]):
                raise RemoteProtocolError(f"pool addresses: {name} is {wire[name]!r:.40}, not an unsigned integer")
        for name in _LISTS:
            if not isinstance(wire[name], list | tuple) or not all(map(_is_address, wire[name])):
                raise RemoteProtocolError(f"pool addresses: {name} is not a list of unsigned integers")
        slots, bases, strides = wire["slots"], tuple(wire["bases"]), tuple(wire["strides"])
        if len(slots) != len(shards):
            raise RemoteProtocolError(f"pool addresses: {len(slots)} slots, but the model has {len(shards)} segments")
        expected = sum(shard.num_layers * len(shard.segment.planes) for shard in shards)
        if len(bases) != expected:
            raise RemoteProtocolError(f"pool addresses: {len(bases)} bases, but that rank holds {expected} planes")
        expected = 3 * sum(len(shard.segment.planes) for shard in shards)
        if len(strides) != expected:
            raise RemoteProtocolError(f"pool addresses: {len(strides)} strides, but the model has {expected}")
        segments = []
        for shard, count in zip(shards, slots, strict=True):
            planes = len(shard.segment.planes)
            end = shard.num_layers * planes
            segment_bases, bases = bases[:end], bases[end:]
            layers = tuple(segment_bases[first : first + planes] for first in range(0, end, planes))
            segment_strides = tuple(PlaneStrides(*strides[first : first + 3]) for first in range(0, 3 * planes, 3))
            strides = strides[3 * planes :]
            segments.append(_checked(SegmentAddresses(shard, count, layers, segment_strides)))
            if shard.segment.table == 0 and shard.num_layers and count != wire["num_pages"]:
                raise RemoteProtocolError(
                    f"pool addresses: {shard.segment.name} has {count} pages, but num_pages is {wire['num_pages']}"
                )
        aux_bases, aux_row_bytes, aux_slots = tuple(wire["aux_bases"]), tuple(wire["aux_row_bytes"]), wire["aux_slots"]
        if len(aux_bases) != len(aux_row_bytes) or bool(aux_bases) != bool(aux_slots):
            raise RemoteProtocolError(
                f"pool addresses: {len(aux_bases)} aux_bases, {len(aux_row_bytes)} aux_row_bytes, {aux_slots} aux_slots"
            )
        if any(base + aux_slots * nbytes >= 1 << 63 for base, nbytes in zip(aux_bases, aux_row_bytes, strict=True)):
            raise RemoteProtocolError("pool addresses: the aux rows end beyond 64 bits")
        return cls(tuple(segments), aux_bases, aux_row_bytes, aux_slots)


def _checked(segment: SegmentAddresses) -> SegmentAddresses:
    """Returns the segment unchanged if its addresses fit into 64 bits and its slots fit its layers.

    Raises:
        RemoteProtocolError: they do not; the text names the segment.
    """
    name, layers = segment.shard.segment.name, segment.shard.num_layers
    if bool(segment.num_slots) != bool(layers):
        raise RemoteProtocolError(
            f"pool addresses: slots of {name} is {segment.num_slots}, but that rank holds {layers} of its layers"
        )
    for number, (page, row, head) in enumerate(segment.strides):
        plane, rows, head_bytes = segment.shard.segment.planes[number]
        if nested_extent(head_bytes, (segment.num_slots, page), (rows, row), (segment.shard.heads, head)) is None:
            raise RemoteProtocolError(
                f"pool addresses: {name}: elements of plane {plane} overlap: {head_bytes} bytes at strides of {page} "
                f"(page), {row} (row) and {head} (head)"
            )
        extent = segment.extent(number)
        if any(layer[number] + extent >= 1 << 63 for layer in segment.bases):
            raise RemoteProtocolError(f"pool addresses: {name} ends beyond 64 bits: {segment.num_slots} slots")
    return segment


def nested_extent(nbytes: int, *axes: tuple[int, int]) -> int | None:
    """Returns the bytes from the first to the end of the last of the blocks of `nbytes` bytes along `axes`.

    An axis is (count, stride). Returns None unless the axes are nested, that is, each stride is at least the extent of
    all axes of smaller strides. Those of a permuted or sliced dense array are, and nested blocks do not overlap.
    """
    for count, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if stride < nbytes:
            return None
        nbytes += (count - 1) * stride
    return nbytes


def _is_address(value: object) -> bool:
    # The limit is signed 64 bits: user-space addresses fit, and the address arithmetic is int64.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
