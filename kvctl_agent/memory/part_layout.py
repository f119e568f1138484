"""How a part lies in its contiguous region, and how to walk it in pieces that stay in cache.

Order inside the region: layer, plane (K before V), then page, row, head. Both sides derive the same offsets from the
part alone, so the region carries no header. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.contract.layer_range import layer_range
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.local_shard import LocalShard
from kvctl_agent.layout.transfer_slice import STAGING_ALIGN_BYTES

# Measured in the fleet (TP4 to DP4 and to TP4, two cores with 1 MiB of L2 each), GB/s against 2 MiB: 1 MiB 0.97,
# 512 KiB 0.90, 256 KiB 0.76: a write's fixed cost and its wait for the reader outweigh what the cache saves.
PIECE_BYTES = 2 << 20


class Span(NamedTuple):
    """Pages [page_lo, page_hi) of the part, of one plane of one layer; `layer` counts from the first one held."""

    layer: int
    plane: int
    page_lo: int
    page_hi: int


class Piece(NamedTuple):
    """A contiguous stretch of the region: `spans` one after the other."""

    offset: int
    nbytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One part's region.

    Attributes:
        first_layer: the part's first layer, counted from the first one held (each side has its own).
        num_layers: layers in the part.
        num_pages: whole pages (of a state: items).
        page_bytes: for each plane, bytes of one page's slice of one layer.
        nbytes: of payload.
    """

    first_layer: int
    num_layers: int
    num_pages: int
    page_bytes: tuple[int, ...]
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises MemoryLayoutError on sizes that make no region."""
        if min(self.num_layers, self.num_pages, *self.page_bytes) <= 0 or self.first_layer < 0:
            raise MemoryLayoutError(f"a part needs positive sizes, got {self}")
        object.__setattr__(self, "nbytes", self.num_layers * self.num_pages * sum(self.page_bytes))

    @property
    def region_bytes(self) -> int:
        """Bytes to ask the ring for: the payload, aligned."""
        return -(-self.nbytes // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES

    def block(self, layer: int, plane: int) -> tuple[int, int]:
        """(offset, nbytes) of one layer's plane in the region; `layer` counts as `first_layer` does."""
        index = layer - self.first_layer
        if not 0 <= index < self.num_layers:
            raise MemoryLayoutError(
                f"layer {layer} is not in the part's layers "
                f"{layer_range(self.first_layer, self.first_layer + self.num_layers)}"
            )
        before = index * sum(self.page_bytes) + sum(self.page_bytes[:plane])
        return self.num_pages * before, self.num_pages * self.page_bytes[plane]

    def pieces(self, target_bytes: int = PIECE_BYTES) -> tuple[Piece, ...]:
        """Cut the region into pieces of at most `target_bytes`, or one page where a page is larger.

        Blocks below the target are grouped, whole and in order; larger ones are split evenly by pages, so that no
        piece is a sliver.
        """
        return _pieces(self, target_bytes)


# Parts are many and their shapes few: most rooms of a prompt length share one.
@lru_cache(maxsize=1024)
def part_layout(held: LocalShard, layer_lo: int, layer_hi: int, num_pages: int, heads: int) -> PartLayout:
    """How a part of these layers, pages and heads lies in its region, at a rank that holds the layers."""
    page_bytes = tuple(plane.rows * heads * plane.head_bytes for plane in held.segment.planes)
    return PartLayout(layer_lo - held.layer_lo, layer_hi - layer_lo, num_pages, page_bytes)


@lru_cache(maxsize=256)
def _pieces(part: PartLayout, target_bytes: int) -> tuple[Piece, ...]:
    if part.nbytes <= target_bytes:  # usual on a device, where targets are large and page counts too many to keep
        layers, planes = range(part.first_layer, part.first_layer + part.num_layers), range(len(part.page_bytes))
        spans = tuple(Span(layer, plane, 0, part.num_pages) for layer in layers for plane in planes)
        return (Piece(0, part.nbytes, spans),)
    pieces: list[Piece] = []
    group: list[Span] = []
    start = end = 0
    for layer in range(part.first_layer, part.first_layer + part.num_layers):
        for plane, page_bytes in enumerate(part.page_bytes):
            offset, nbytes = part.block(layer, plane)
            if group and offset + nbytes - start > target_bytes:
                pieces.append(Piece(start, offset - start, tuple(group)))
                group, start = [], offset
            end = offset + nbytes
            if nbytes <= target_bytes:
                group.append(Span(layer, plane, 0, part.num_pages))
                continue
            for page_lo, page_hi in _even(part.num_pages, max(1, target_bytes // page_bytes)):
                span, start = Span(layer, plane, page_lo, page_hi), offset + page_lo * page_bytes
                if page_hi == part.num_pages:
                    group = [span]  # a small block that follows, of scales say, rides with the rest of this one
                else:
                    pieces.append(Piece(start, (page_hi - page_lo) * page_bytes, (span,)))
    if group:
        pieces.append(Piece(start, end - start, tuple(group)))
    return tuple(pieces)


def _even(total: int, most: int) -> list[tuple[int, int]]:
    """Split [0, total) into the fewest ranges of at most `most`, their sizes differing by one at most."""
    count = -(-total // most)
    return [(total * i // count, total * (i + 1) // count) for i in range(count)]
