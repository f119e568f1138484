"""Base addresses of a pool, and the address arithmetic with which peers write into its pages.

A decode rank sends its `PoolAddresses` once, in Hello, and writers compute every destination address from it. The
layers and heads of a rank follow from the plan and are not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.layout.parallel import LocalShard

Indices = npt.NDArray[np.int64]

_NUMBERS = ("num_pages", "aux_base", "aux_row_bytes", "aux_slots")
_LISTS = ("slots", "bases")


@dataclass(frozen=True, slots=True)
class SegmentAddresses:
    """Base addresses of one segment on one rank; layers are numbered as in the segment.

    Page p (for state: item p) of a plane is at base + p * `page_bytes` and has contiguous rows of all local heads.

    Attributes:
        shard: The rank's layers and heads of the segment.
        num_slots: Pages, or items; 0 if the rank has no layer of the segment.
        bases: For each local layer, the address of page 0 of each plane.
    """

    shard: LocalShard
    num_slots: int
    bases: tuple[tuple[int, ...], ...]

    def row_bytes(self, plane: int) -> int:
        """Returns the bytes of one row of a plane, with all local heads."""
        return self.shard.heads * self.shard.segment.planes[plane].head_bytes

    def page_bytes(self, plane: int) -> int:
        """Returns the bytes of one page of a plane in one layer, with all local heads."""
        return self.shard.segment.planes[plane].rows * self.row_bytes(plane)

    def row_addrs(self, layer: int, plane: int, pages: Indices, head: int = 0) -> Indices:
        """Returns the address of local head `head` in every row of `pages`, int64 `[len(pages) * rows]`.

        `layer` is in the segment's numbering, `plane` an index into the segment's planes.
        """
        _, rows, head_bytes = self.shard.segment.planes[plane]
        row_indices = (pages[:, None] * rows + np.arange(rows, dtype=np.int64)).reshape(-1)
        start = self.bases[layer - self.shard.layer_lo][plane] + head * head_bytes
        return start + row_indices * self.row_bytes(plane)


@dataclass(frozen=True, slots=True)
class PoolAddresses:
    """Addresses of all segments of a pool, in the model's order, and of its aux rows.

    Attributes:
        segments: The addresses of each segment.
        aux_base: Address of aux row 0; 0 without aux rows.
        aux_row_bytes: Bytes of an aux row.
        aux_slots: Number of aux rows.
    """

    segments: tuple[SegmentAddresses, ...]
    aux_base: int
    aux_row_bytes: int
    aux_slots: int

    @property
    def num_pages(self) -> int:
        """Number of KV pages in the pool."""
        return self.segments[0].num_slots

    def aux_addr(self, slot: int) -> int:
        """Returns the address of aux row `slot`."""
        return self.aux_base + slot * self.aux_row_bytes

    def to_wire(self) -> dict[str, Any]:
        """Returns the addresses as ints and lists of ints, for the codec.

        `slots` has the pages or items of each segment. `bases` has the bases of all segments, ordered by segment, layer
        and plane.
        """
        return {
            "num_pages": self.num_pages,
            "slots": [segment.num_slots for segment in self.segments],
            "bases": [base for segment in self.segments for layer in segment.bases for base in layer],
            "aux_base": self.aux_base,
            "aux_row_bytes": self.aux_row_bytes,
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
        slots, bases = wire["slots"], tuple(wire["bases"])
        if len(slots) != len(shards):
            raise RemoteProtocolError(f"pool addresses: {len(slots)} slots, but the model has {len(shards)} segments")
        expected = sum(shard.num_layers * len(shard.segment.planes) for shard in shards)
        if len(bases) != expected:
            raise RemoteProtocolError(f"pool addresses: {len(bases)} bases, but that rank holds {expected} planes")
        segments = []
        for shard, count in zip(shards, slots, strict=True):
            planes = len(shard.segment.planes)
            end = shard.num_layers * planes
            segment_bases, bases = bases[:end], bases[end:]
            layers = tuple(segment_bases[first : first + planes] for first in range(0, end, planes))
            segments.append(_checked(SegmentAddresses(shard, count, layers)))
            if not shard.segment.state and shard.num_layers and count != wire["num_pages"]:
                raise RemoteProtocolError(
                    f"pool addresses: {shard.segment.name} has {count} pages, but num_pages is {wire['num_pages']}"
                )
        if wire["aux_base"] + wire["aux_slots"] * wire["aux_row_bytes"] >= 1 << 63:
            raise RemoteProtocolError("pool addresses: the aux rows end beyond 64 bits")
        return cls(tuple(segments), wire["aux_base"], wire["aux_row_bytes"], wire["aux_slots"])


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
    for layer in segment.bases:
        for plane, base in enumerate(layer):
            if base + segment.num_slots * segment.page_bytes(plane) >= 1 << 63:
                raise RemoteProtocolError(f"pool addresses: {name} ends beyond 64 bits: {segment.num_slots} slots")
    return segment


def _is_address(value: object) -> bool:
    # The limit is signed 64 bits: user-space addresses fit, and the address arithmetic is int64.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
