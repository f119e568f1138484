"""What a rank's pool holds for a lot of rooms: which pages are whose, and what is written there before a run."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl_agent.contract.rig import Room, Start
from kvctl_agent.layout.heads import mix64
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rig.pages import Pages, assign_pages
from kvctl_agent.rig.pattern import POISON, Bytes, Rows, Words, Writer, aux_row, token_bases

AUX_ROW_BYTES = 256


def allocate_pool(start: Start) -> KVPool:
    """The pool this rank was planned to have."""
    return KVPool.allocate(
        num_layers=start.layers[1] - start.layers[0],
        num_pages=start.pool_pages,
        page_size=start.page_size,
        heads_local=start.heads[1] - start.heads[0],
        total_kv_heads=start.total_kv_heads,
        k_dim=start.head_dim,
        v_dim=start.head_dim,
        dtype_bytes=start.dtype_bytes,
        aux_slots=start.aux_slots,
        aux_row_bytes=AUX_ROW_BYTES,
    )


class Content:
    """The lot a rank works on.

    Attributes:
        start: who this rank is.
        rows: geometry of one layer's K or V here.
        writer: writes and checks rows of that geometry.
        rooms: the rooms taken, by number, in the order they were given.
        pages: page indices of each, in the prompt's order.
    """

    def __init__(self, pool: KVPool, start: Start) -> None:
        self._pool = pool
        self._filled: int | None = None
        self.start = start
        self.rows = Rows(
            page_size=start.page_size,
            head_lo=start.heads[0],
            heads=start.heads[1] - start.heads[0],
            row_bytes=start.head_dim * start.dtype_bytes,
            dtype_bytes=start.dtype_bytes,
        )
        self.writer = Writer(self.rows)
        self.rooms: dict[int, Room] = {}
        self.pages: dict[int, Pages] = {}

    def take(self, rooms: Sequence[Room]) -> None:
        """Give each room pages; which ones depends on the rooms' content and on the rank, not on the run."""
        counts = [-(-room.tokens // self.start.page_size) for room in rooms]
        first = rooms[0].index if rooms else 0
        rank = 2 * self.start.unique + (self.start.role == "decode")
        seed = mix64(mix64(self.start.seed + rank) + first)
        assigned = assign_pages(counts, self.start.pool_pages, self.start.page_order, seed)
        self.rooms = {room.number: room for room in rooms}
        self.pages = {room.number: pages for room, pages in zip(rooms, assigned, strict=True)}

    def fill(self, lot: int) -> None:
        """Write the pattern into the pages and aux rows of the rooms taken, unless this lot is there already."""
        if self._filled == lot:
            return
        self._filled = lot
        for number, pages in self.pages.items():
            room = self.rooms[number]
            bases = self.bases(room)
            for layer in range(*self.start.layers):
                for kv in (0, 1):
                    self.writer.fill(self.block(layer, kv), pages, bases, layer, kv)
            self.aux()[room.slot] = aux_row(self.start.seed, room.index, AUX_ROW_BYTES)

    def poison(self) -> None:
        """Overwrite everything, so that whatever is right afterwards has been moved."""
        for layer in range(*self.start.layers):
            for kv in (0, 1):
                self.block(layer, kv).fill(POISON)
        self.aux().fill(POISON)

    def bases(self, room: Room) -> Words:
        """The pattern's words for all whole pages of a room and this rank's heads."""
        tokens = self.whole_tokens(room)
        return token_bases(self.start.seed, room.index, tokens, self.rows.head_lo, self.rows.heads)

    def whole_tokens(self, room: Room) -> int:
        """Tokens of the room's pages: its prompt, filled up."""
        return len(self.pages[room.number]) * self.start.page_size

    def block(self, layer: int, kv: int) -> Bytes:
        """This rank's bytes of a global layer's K or V."""
        return self._pool.block(layer - self.start.layers[0], kv)

    def aux(self) -> Bytes:
        """The aux rows, uint8 `[slots, AUX_ROW_BYTES]`."""
        assert self._pool.aux is not None
        return self._pool.aux
