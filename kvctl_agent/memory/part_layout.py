"""Layout of a part in its contiguous staging region, and its division into pieces that stay in cache.

The order inside the region is layer, plane (K before V), page, row, head. Both sides derive the same offsets from the
part alone, so the region has no header.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.plan import STAGING_ALIGN_BYTES

# Measured with all ranks on one host (TP4 to DP4 and to TP4, two cores with 1 MiB of L2 each), GB/s relative to 2 MiB:
# 1 MiB 0.97, 512 KiB 0.90, 256 KiB 0.76. The fixed cost of a write and its wait for the reader outweigh what smaller
# pieces save by staying in cache.
PIECE_BYTES = 2 << 20


class Span(NamedTuple):
    """Pages of one plane of one layer: positions [page_lo, page_hi) of the part's page list.

    `layer` is counted from the rank's first layer of the segment.
    """

    layer: int
    plane: int
    page_lo: int
    page_hi: int


class Piece(NamedTuple):
    """A contiguous range of a part's staging region: `nbytes` bytes at `offset`, which consist of whole `spans`."""

    offset: int
    nbytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PartLayout:
    """Layout of one part in its staging region.

    Attributes:
        first_layer: First layer of the part, counted from the rank's first layer; it may differ between the two sides.
        num_pages: Pages (for state: items) of the part.
        page_bytes: For each plane, bytes of the part's heads in one page of one layer.
        region_bytes: Bytes of the ring region that the part needs: the payload rounded up to the alignment.
    """

    first_layer: int
    num_layers: int
    num_pages: int
    page_bytes: tuple[int, ...]
    nbytes: int = field(init=False, repr=False)
    region_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Computes the sizes; raises MemoryLayoutError if a given size is not positive."""
        if min(self.num_layers, self.num_pages, *self.page_bytes) <= 0 or self.first_layer < 0:
            raise MemoryLayoutError(f"a part needs positive sizes, got {self}")
        nbytes = self.num_layers * self.num_pages * sum(self.page_bytes)
        object.__setattr__(self, "nbytes", nbytes)
        object.__setattr__(self, "region_bytes", -(-nbytes // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES)

    def block(self, layer: int, plane: int) -> tuple[int, int]:
        """Returns (offset, nbytes) of one plane of one layer in the region; `layer` is counted like `first_layer`.

        Raises:
            MemoryLayoutError: the part does not have the layer.
        """
        index = layer - self.first_layer
        if not 0 <= index < self.num_layers:
            raise MemoryLayoutError(
                f"layer {layer} is not in the part's layers "
                f"{layer_range(self.first_layer, self.first_layer + self.num_layers)}"
            )
        before = index * sum(self.page_bytes) + sum(self.page_bytes[:plane])
        return self.num_pages * before, self.num_pages * self.page_bytes[plane]

    @lru_cache(maxsize=256)  # noqa: B019 - layouts are small, and most parts share one
    def pieces(self, target_bytes: int = PIECE_BYTES) -> tuple[Piece, ...]:
        """Divides the region into pieces of at most `target_bytes`, or of one page if a page is larger.

        A block (one plane of one layer) that is smaller is grouped whole with its neighbours; a larger block is divided
        evenly by pages, so that no piece is much smaller than the others.
        """
        if self.nbytes <= target_bytes:  # the usual case on a device, where targets are large
            layers, planes = range(self.first_layer, self.first_layer + self.num_layers), range(len(self.page_bytes))
            spans = tuple(Span(layer, plane, 0, self.num_pages) for layer in layers for plane in planes)
            return (Piece(0, self.nbytes, spans),)
        pieces: list[Piece] = []
        group: list[Span] = []
        start = end = 0
        for layer in range(self.first_layer, self.first_layer + self.num_layers):
            for plane, page_bytes in enumerate(self.page_bytes):
                offset, nbytes = self.block(layer, plane)
                if group and offset + nbytes - start > target_bytes:
                    pieces.append(Piece(start, offset - start, tuple(group)))
                    group, start = [], offset
                end = offset + nbytes
                if nbytes <= target_bytes:
                    group.append(Span(layer, plane, 0, self.num_pages))
                    continue
                for page_lo, page_hi in _even_ranges(self.num_pages, max(1, target_bytes // page_bytes)):
                    span, start = Span(layer, plane, page_lo, page_hi), offset + page_lo * page_bytes
                    if page_hi == self.num_pages:
                        group = [span]  # small blocks that follow, such as scales, join the last piece of this block
                    else:
                        pieces.append(Piece(start, (page_hi - page_lo) * page_bytes, (span,)))
        if group:
            pieces.append(Piece(start, end - start, tuple(group)))
        return tuple(pieces)


# Cached because many parts share few layouts: most rooms of one prompt length have the same.
part_layout = lru_cache(maxsize=1024)(PartLayout)


def _even_ranges(total: int, maximum: int) -> list[tuple[int, int]]:
    """Splits [0, total) into the fewest ranges of at most `maximum`, whose sizes differ by at most one."""
    count = -(-total // maximum)
    return [(total * i // count, total * (i + 1) // count) for i in range(count)]
