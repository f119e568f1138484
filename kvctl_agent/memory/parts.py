"""How a part lies in its contiguous region, and how to walk it in pieces that stay in cache.

Order inside the region: layer, K before V, then token, head, dim. Both sides derive the same offsets from the
part alone, so the region carries no header. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import K, V

REGION_ALIGN_BYTES = 256
# Measured in the fleet (TP4 to DP4 and to TP4, two cores with 1 MiB of L2 each), GB/s against 2 MiB: 1 MiB 0.97,
# 512 KiB 0.90, 256 KiB 0.76: a write's fixed cost and its wait for the reader outweigh what the cache saves.
PIECE_BYTES = 2 << 20


class Span(NamedTuple):
    """Pages [page_lo, page_hi) of the part, of one layer's K (kv 0) or V (kv 1); `layer` is the pool's number."""

    layer: int
    kv: int
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
        first_layer: the pool's number of the part's first layer (each side has its own).
        num_layers: layers in the part.
        num_pages, page_size: whole pages, and tokens in each.
        heads: heads in the slice.
        k_row_bytes, v_row_bytes: bytes of one head of one token.
    """

    first_layer: int
    num_layers: int
    num_pages: int
    page_size: int
    heads: int
    k_row_bytes: int
    v_row_bytes: int

    def __post_init__(self) -> None:
        """Raises MemoryLayoutError on sizes that make no region."""
        sizes = (self.num_layers, self.num_pages, self.page_size, self.heads, self.k_row_bytes, self.v_row_bytes)
        if min(sizes) <= 0 or self.first_layer < 0:
            raise MemoryLayoutError(f"a part needs positive sizes, got {self}")

    def page_bytes(self, kv: int) -> int:
        """Bytes of one page's slice of one layer's K or V."""
        return self.page_size * self.heads * (self.v_row_bytes if kv else self.k_row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.num_layers * self.num_pages * (self.page_bytes(K) + self.page_bytes(V))

    @property
    def region_bytes(self) -> int:
        """Bytes to ask the ring for: the payload, aligned to 256."""
        return -(-self.nbytes // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES

    def block(self, layer: int, kv: int) -> tuple[int, int]:
        """(offset, nbytes) of one layer's K or V in the region; `layer` is the pool's number."""
        index = layer - self.first_layer
        if not 0 <= index < self.num_layers:
            raise MemoryLayoutError(
                f"layer {layer} is not in the part's layers [{self.first_layer}, {self.first_layer + self.num_layers})"
            )
        k_bytes = self.num_pages * self.page_bytes(K)
        v_bytes = self.num_pages * self.page_bytes(V)
        offset = index * (k_bytes + v_bytes)
        return (offset + k_bytes, v_bytes) if kv else (offset, k_bytes)

    def pieces(self, target_bytes: int = PIECE_BYTES) -> tuple[Piece, ...]:
        """Cut the region into pieces of at most `target_bytes`, or one page where a page is larger.

        Blocks below the target are grouped, whole and in order; larger ones are split evenly by pages, so that no
        piece is a sliver.
        """
        return _pieces(self, target_bytes)


# Parts are many and their shapes few: most rooms of a prompt length share one.
@lru_cache(maxsize=256)
def _pieces(part: PartLayout, target_bytes: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    group: list[Span] = []
    start = end = 0
    for layer in range(part.first_layer, part.first_layer + part.num_layers):
        for kv in (K, V):
            offset, nbytes = part.block(layer, kv)
            if group and offset + nbytes - start > target_bytes:
                pieces.append(Piece(start, offset - start, tuple(group)))
                group, start = [], offset
            end = offset + nbytes
            if nbytes <= target_bytes:
                group.append(Span(layer, kv, 0, part.num_pages))
                continue
            page_bytes = part.page_bytes(kv)
            for page_lo, page_hi in _even(part.num_pages, max(1, target_bytes // page_bytes)):
                span = Span(layer, kv, page_lo, page_hi)
                pieces.append(Piece(offset + page_lo * page_bytes, (page_hi - page_lo) * page_bytes, (span,)))
            start = end
    if group:
        pieces.append(Piece(start, end - start, tuple(group)))
    return tuple(pieces)


def _even(total: int, most: int) -> list[tuple[int, int]]:
    """Split [0, total) into the fewest ranges of at most `most`, their sizes differing by one at most."""
    count = -(-total // most)
    return [(total * i // count, total * (i + 1) // count) for i in range(count)]
