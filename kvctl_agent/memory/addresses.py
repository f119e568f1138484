"""Where a pool's bytes are: the little a peer must know to write into our pages, and the arithmetic on it.

A decode rank sends its `PoolAddresses` once, in Hello; writers compute every destination from it. What a rank holds
of each segment follows from the plan and is never sent: only numbers are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.layout.local_shard import LocalShard

Indices = npt.NDArray[np.int64]

_NUMBERS = ("num_pages", "aux_base", "aux_row_bytes", "aux_slots")
_LISTS = ("slots", "bases")


@dataclass(frozen=True, slots=True)
class SegmentAddresses:
    """Base addresses of what one rank holds of one segment; layers have the segment's numbers.

    A page (of a state: an item) of a plane is `rows` rows of all local heads, contiguous, at base + page x page bytes.

    Attributes:
        held: the layers and heads, and the segment with its planes.
        num_slots: pages, or items; 0 where no layer is held.
        bases: for each layer held, the address of page 0 of each plane.
    """

    held: LocalShard
    num_slots: int
    bases: tuple[tuple[int, ...], ...]

    def row_bytes(self, plane: int) -> int:
        """Bytes of all local heads of one row."""
        return self.held.heads * self.held.segment.planes[plane].head_bytes

    def page_bytes(self, plane: int) -> int:
        """Bytes of one page of one layer."""
        return self.held.segment.planes[plane].rows * self.row_bytes(plane)

    def row_addrs(self, layer: int, plane: int, pages: Indices, head: int = 0) -> Indices:
        """Address of local head `head` in every row of `pages`, int64 `[len(pages) * rows]`."""
        _, rows, head_bytes = self.held.segment.planes[plane]
        numbers = (pages[:, None] * rows + np.arange(rows, dtype=np.int64)).reshape(-1)
        start = self.bases[layer - self.held.layer_lo][plane] + head * head_bytes
        return start + numbers * self.row_bytes(plane)


@dataclass(frozen=True, slots=True)
class PoolAddresses:
    """Every segment of one pool, in the model's order, and the aux rows; `aux_base` is 0 where there are none."""

    segments: tuple[SegmentAddresses, ...]
    aux_base: int
    aux_row_bytes: int
    aux_slots: int

    @property
    def num_pages(self) -> int:
        """Pages of KV."""
        return self.segments[0].num_slots

    def aux_addr(self, slot: int) -> int:
        """Address of one aux row."""
        return self.aux_base + slot * self.aux_row_bytes

    def to_wire(self) -> dict[str, Any]:
        """Plain ints and lists of ints, for the codec.

        `slots` are pages or items by segment; `bases` are those of all segments, one layer's planes after another's.
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
    def from_wire(cls, wire: Mapping[str, Any], held: tuple[LocalShard, ...]) -> PoolAddresses:
        """What a peer sent, as the addresses of what the plan says it holds.

        Raises:
            RemoteProtocolError: it is not `to_wire`'s shape, or does not fit `held`; names the field.
        """
        names = {*_NUMBERS, *_LISTS}
        if set(wire) != names:
            odd = sorted(map(str, set(wire) ^ names))
            raise RemoteProtocolError(f"pool addresses: missing or unknown fields {odd}; match the versions")
        for name in _NUMBERS:
            if not _is_address(wire[name]):
                raise RemoteProtocolError(f"pool addresses: {name} is {wire[name]!r:.40}, not an unsigned integer")
        for name in _LISTS:
            if not isinstance(wire[name], list | tuple) or not all(map(_is_address, wire[name])):
                raise RemoteProtocolError(f"pool addresses: {name} is not a list of unsigned integers")
        slots, bases = wire["slots"], tuple(wire["bases"])
        if len(slots) != len(held):
            raise RemoteProtocolError(f"pool addresses: {len(slots)} slots, but the model has {len(held)} segments")
        wanted = sum(each.num_layers * len(each.segment.planes) for each in held)
        if len(bases) != wanted:
            raise RemoteProtocolError(f"pool addresses: {len(bases)} bases, but that rank holds {wanted} planes")
        segments = []
        for each, count in zip(held, slots, strict=True):
            planes = len(each.segment.planes)
            mine, bases = bases[: each.num_layers * planes], bases[each.num_layers * planes :]
            layers = tuple(mine[at : at + planes] for at in range(0, len(mine), planes))
            segments.append(_checked(SegmentAddresses(each, count, layers)))
            if not each.segment.state and each.num_layers and count != wire["num_pages"]:
                raise RemoteProtocolError(
                    f"pool addresses: {each.segment.name} has {count} pages, but num_pages is {wire['num_pages']}"
                )
        if wire["aux_base"] + wire["aux_slots"] * wire["aux_row_bytes"] >= 1 << 63:
            raise RemoteProtocolError("pool addresses: the aux rows end beyond 64 bits")
        return cls(tuple(segments), wire["aux_base"], wire["aux_row_bytes"], wire["aux_slots"])


def _checked(segment: SegmentAddresses) -> SegmentAddresses:
    """Raises RemoteProtocolError where the arithmetic above would leave 64 bits, or nothing lies where layers are."""
    name, layers = segment.held.segment.name, segment.held.num_layers
    if bool(segment.num_slots) != bool(layers):
        raise RemoteProtocolError(f"pool addresses: slots of {name} is {segment.num_slots}, with {layers} layers there")
    for layer in segment.bases:
        for plane, base in enumerate(layer):
            if base + segment.num_slots * segment.page_bytes(plane) >= 1 << 63:
                raise RemoteProtocolError(f"pool addresses: {name} ends beyond 64 bits: {segment.num_slots} slots")
    return segment


def _is_address(value: object) -> bool:
    # Signed 64 bits: user-space addresses fit, and the arithmetic above is int64.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
