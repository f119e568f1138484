"""Which page indices a room gets in a rank's pool: like an engine's allocator after hours of use, or a fresh one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvctl.lab.ranks.content_store import HostStore, MirrorStore, PlaneView, Store, plane_views
from kvctl.lab.ranks.geometry import model_shape, side_of, state_items
from kvctl.lab.ranks.gpu_store import GpuStore
from kvctl.lab.ranks.messages import Room, Start
from kvctl.lab.ranks.pattern import POISON, Bytes, Pages, Words, aux_row, row_bases
from kvctl_agent.contract.choices import HOST
from kvctl_agent.device.cuda import CudaDevice, open_device
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards, mix64
from kvctl_agent.memory.pool import KVPool


def assign_pages(counts: Sequence[int], pool_pages: int, order: str, seed: int) -> list[Pages]:
    """Disjoint page indices for each room; page 0 is left alone, as engines reserve it.

    Args:
        counts: pages of each room; together at most `pool_pages - 1`.
        pool_pages: pages of the pool.
        order: "random" scatters every room over the whole pool; "contiguous" gives ascending runs.
        seed: decides the scatter; give every rank its own, so that no two ranks agree on a page by accident.
    """
    if order == "random":
        free = np.random.default_rng(seed).permutation(np.arange(1, pool_pages, dtype=np.int64))
    else:
        free = np.arange(1, pool_pages, dtype=np.int64)
    ends = np.cumsum(np.asarray(counts, dtype=np.int64))
    return [free[end - count : end] for end, count in zip(ends.tolist(), counts, strict=True)]


def unused_pages(assigned: Sequence[Pages], pool_pages: int) -> Pages:
    """Every page that no room has: nothing may write to them."""
    used = np.zeros(pool_pages, dtype=bool)
    for pages in assigned:
        used[pages] = True
    return np.flatnonzero(~used)


AUX_ROW_BYTES = 256


def own_side(start: Start) -> ParallelConfig:
    """The sizes of the instance that this rank is of."""
    return side_of(start.prefill[start.instance] if start.role == "prefill" else start.decode)


def own_coord(start: Start) -> RankCoord:
    """This rank's place in it."""
    return own_side(start).coord(start.unique)


def allocate_pool(start: Start) -> KVPool:
    """The pool this rank was planned to have, on its GPU where it has one.

    Raises:
        DeviceError: there is no such GPU, or not so much memory on it.
    """
    shape = model_shape(start.shape, start.page_size)
    return KVPool.allocate(
        local_shards(shape, start.page_size, own_side(start), own_coord(start)),
        page_size=start.page_size,
        num_pages=start.pool_pages,
        state_slots=start.state_slots,
        aux_slots=start.aux_slots,
        aux_row_bytes=AUX_ROW_BYTES,
        device=None if start.device == HOST else open_device(start.device),
    )


class Content:
    """The lot a rank works on.

    Attributes:
        start: who this rank is.
        decks: every plane of every segment that this rank has layers of.
        store: what writes and checks them.
        rooms: the rooms taken, by number, in the order they were given.
        items: of each, the page (of a state: item) indices in each segment, in the prompt's order.
    """

    def __init__(self, pool: KVPool, start: Start) -> None:
        self._pool = pool
        self._filled: int | None = None
        self.start = start
        self.decks = plane_views(pool, start.shape["dtype_bytes"])
        self.store = _store(pool)
        self.rooms: dict[int, Room] = {}
        self.items: dict[int, tuple[Pages, ...]] = {}

    def take(self, rooms: Sequence[Room]) -> None:
        """Give each room pages; which ones depends on the rooms' content and on the rank, not on the run."""
        start = self.start
        first = rooms[0].index if rooms else 0
        rank = 2 * start.unique + (start.role == "decode") + (max(0, start.instance) << 32)
        seed = mix64(mix64(start.seed + rank) + first)
        pages = assign_pages(
            [-(-room.tokens // start.page_size) for room in rooms], start.pool_pages, start.page_order, seed
        )
        segments: list[list[Pages]] = [pages] * (len(self._pool.segments) - len(start.shape["states"]))
        for at, state in enumerate(start.shape["states"]):
            counts = [state_items(state, room.tokens, start.page_size) for room in rooms]
            segments.append(
                assign_pages(counts, start.state_slots[state["name"]], start.page_order, mix64(seed + at + 1))
            )
        self.rooms = {room.number: room for room in rooms}
        self.items = {room.number: items for room, items in zip(rooms, zip(*segments, strict=True), strict=True)}

    def pages(self, number: int) -> Pages:
        """A room's KV pages."""
        return self.items[number][0]

    def states(self, number: int) -> tuple[Pages, ...]:
        """A room's items of each state component, in the model's order."""
        return self.items[number][len(self._pool.segments) - len(self.start.shape["states"]) :]

    def fill(self, lot: int) -> None:
        """Write the pattern into the pages and aux rows of the rooms taken, unless this lot is there already."""
        if self._filled == lot:
            return
        self._filled = lot
        for room in self.rooms.values():
            self.fill_room(room)

    def fill_room(self, room: Room) -> None:
        """Write the pattern into one room's pages and aux row."""
        for deck, bases in self.with_bases(room):
            self.store.fill(deck, self.items[room.number][deck.held.segment.index], bases)
        self.aux()[room.slot] = aux_row(self.start.seed, room.index, AUX_ROW_BYTES)

    def poison(self) -> None:
        """Overwrite everything, so that whatever is right afterwards has been moved."""
        for deck in self.decks:
            self.store.poison(deck)
        self.aux().fill(POISON)

    def with_bases(self, room: Room) -> Iterator[tuple[PlaneView, Words]]:
        """Every deck with the pattern's words for all whole pages of a room and this rank's heads."""
        made: dict[tuple[int, int, int], Words] = {}
        for deck in self.decks:
            key = (self.whole_rows(room, deck), deck.rows.head_lo, deck.rows.heads)
            if key not in made:
                made[key] = row_bases(self.start.seed, room.index, *key)
            yield deck, made[key]

    def whole_rows(self, room: Room, deck: PlaneView) -> int:
        """Rows of all pages (of a state: items) of a room, the last one filled up."""
        return len(self.items[room.number][deck.held.segment.index]) * deck.rows.per_page

    def aux(self) -> Bytes:
        """The aux rows, uint8 `[slots, AUX_ROW_BYTES]`."""
        assert self._pool.aux is not None
        return self._pool.aux


def _store(pool: KVPool) -> Store:
    if pool.device is None:
        return HostStore()
    if isinstance(pool.device, CudaDevice):
        return GpuStore(pool.device)
    return MirrorStore(pool.device)
