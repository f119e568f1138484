"""The KV pool of a synthetic rank: its allocation, the pages of each room, and the test pattern written into them.

Memory that must not contain the pattern is filled with poison, a fixed byte value (`pattern.POISON`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvctl.lab.ranks.content_store import HostStore, MirrorStore, PlaneView, Store, plane_views
from kvctl.lab.ranks.geometry import group_pages, model_shape, side_of, state_items
from kvctl.lab.ranks.messages import Room, Start
from kvctl.lab.ranks.pattern import POISON, Bytes, Pages, Words, aux_row, row_bases
from kvctl_agent.contract.choices import HOST
from kvctl_agent.device.cuda import open_device
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards, mix64
from kvctl_agent.layout.shape import Segment
from kvctl_agent.memory.pool import KVPool

AUX_ROW_BYTES = 256


def own_side(start: Start) -> ParallelConfig:
    """Returns the parallel sizes of the instance to which the rank belongs."""
    return side_of(start.prefill[start.instance] if start.role == "prefill" else start.decode)


def own_coord(start: Start) -> RankCoord:
    """Returns the rank's position in its instance."""
    return own_side(start).coord(start.unique)


def allocate_pool(start: Start) -> KVPool:
    """Allocates the KV pool that a Start command specifies, on the rank's GPU if it has one.

    Raises:
        DeviceError: the GPU does not exist or has too little memory.
    """
    shape = model_shape(start.shape, start.state_page_size or start.page_size)
    return KVPool.allocate(
        local_shards(shape, start.page_size, own_side(start), own_coord(start)),
        page_size=start.page_size,
        num_pages=start.pool_pages,
        state_slots=start.state_slots,
        aux_slots=start.aux_slots,
        aux_row_bytes=AUX_ROW_BYTES,
        device=None if start.device == HOST else open_device(start.device),
        layout=start.kv_layout,
    )


def decode_run(start: Start) -> int:
    """Returns the tokens that a page of a decode rank takes on all cp ranks together."""
    return start.page_size * start.decode.cp


class RowMap(NamedTuple):
    """Rows of a room in one plane of a rank.

    Attributes:
        positions: for each row of the room's pages, or state items, its row in the prompt.
        end: number of rows in the prompt; on a decode rank, up to the end of the last transfer page. Rows behind it are
            not transferred.
    """

    positions: Pages
    end: int


class PageAllocator:
    """Allocates pages of a pool; never page 0, which engines reserve.

    In random order the pages of a room are scattered over the whole pool, as in an engine after hours of use, whichever
    rooms owned them before. In contiguous order the rooms of an unused pool get ascending runs of pages.

    Attributes:
        free: indices of the free pages, in the order in which they will be allocated.
    """

    def __init__(self, pool_pages: int, order: str, seed: int) -> None:
        self._random = np.random.default_rng(seed) if order == "random" else None
        self.free: Pages = np.arange(1, pool_pages, dtype=np.int64)
        self._shuffle()

    def allocate(self, count: int) -> Pages:
        """Removes `count` pages from the free list and returns their indices.

        Raises:
            MemoryError: too few pages are free.
        """
        if count > len(self.free):
            raise MemoryError(f"{count} pages are needed, {len(self.free)} are free")
        pages, self.free = self.free[:count].copy(), self.free[count:]
        return pages

    def release(self, pages: Pages) -> None:
        """Returns pages to the free list."""
        self.free = np.concatenate([self.free, pages])
        self._shuffle()

    def _shuffle(self) -> None:
        if self._random is not None:
            self._random.shuffle(self.free)


class Content:
    """The rooms of one rank and the content of its pool.

    Attributes:
        views: every plane (K, V, latent, state component) of which this rank holds layers, of KV groups as well.
        rooms: rooms that own pages, by room number, in the order in which they were added.
        items: by room number, one array per segment: indices of the room's pages, of those in the window for a KV
            group, or of its items for a state component, in the prompt's order.
        slots: index of each room's aux row, by room number.
    """

    def __init__(self, pool: KVPool, start: Start) -> None:
        self._pool = pool
        self._filled: int | None = None
        self.start = start
        self.views = plane_views(pool, start.shape["dtype_bytes"])
        self.store: Store = HostStore() if pool.device is None else MirrorStore(pool.device)
        self._groups, self._states = start.shape["groups"], start.shape["states"]
        # KV and draft share their pages; the segments behind them have pages or items of their own.
        self._shared = len(pool.segments) - len(self._groups) - len(self._states)
        self._reset(start.seed)

    def take(self, rooms: Sequence[Room]) -> None:
        """Replaces all rooms by those of a batch; on a given rank, a batch gets the same pages in every run."""
        self._reset(rooms[0].index if rooms else 0)
        for room in rooms:
            self.add(room)

    def add(self, room: Room) -> None:
        """Adds a room and allocates its pages, state items and aux row.

        Raises:
            MemoryError: too few pages or items are free; pools are sized so that this does not happen.
        """
        start = self.start
        run = decode_run(start) if start.role == "decode" else start.page_size
        pages = self._pages.allocate(-(-room.tokens // run))
        counts = [len(group_pages(group, room.tokens)) for group in self._groups]
        state_page = start.state_page_size or start.page_size
        counts += [state_items(state, room.tokens, state_page) for state in self._states]
        own = [allocator.allocate(count) for allocator, count in zip(self._own, counts, strict=True)]
        self.items[room.number] = (*[pages] * self._shared, *own)
        self.slots[room.number] = self.free_slots.pop(0)
        self.rooms[room.number] = room

    def remove(self, number: int) -> None:
        """Removes a room; fills its pages, state items and aux row with poison and frees them."""
        del self.rooms[number]
        items, slot = self.items.pop(number), self.slots.pop(number)
        for view in self.views:
            self.store.poison(view, items[view.shard.segment.index])
        self.aux()[slot] = POISON
        self._pages.release(items[0])
        for allocator, released in zip(self._own, items[self._shared :], strict=True):
            allocator.release(released)
        self.free_slots.append(slot)

    def pages(self, number: int) -> Pages:
        """Returns the indices of a room's KV pages, in the prompt's order."""
        return self.items[number][0]

    def states(self, number: int) -> tuple[Pages, ...]:
        """Returns the indices of a room's items, one array per state component in the model's order."""
        return self.items[number][self._shared + len(self._groups) :]

    def computed(self, room: Room) -> list[Pages]:
        """Returns the pages that a prefill rank computes: of the KV, then of each KV group.

        All are in the prompt's order from its start on; pages of a group before its window are -1.
        """
        groups = self.items[room.number][self._shared : self._shared + len(self._groups)]
        return [
            self.pages(room.number),
            *(
                np.concatenate([np.full(group_pages(group, room.tokens).start, -1, np.int64), pages])
                for group, pages in zip(self._groups, groups, strict=True)
            ),
        ]

    def wanted(self, room: Room) -> list[Pages]:
        """Returns the pages that a decode rank receives, all but the cached ones: of the KV, then of each KV group."""
        segments = (memory.shard.segment for memory in self._pool.segments)
        return [
            self.items[room.number][segment.index][self.cached(room, segment) :]
            for segment in segments
            if not segment.state and segment.name != "draft"
        ]

    def cached(self, room: Room, segment: Segment) -> int:
        """Returns the number of a room's pages that are not transferred because decode has them cached; 0 for state."""
        if segment.table is None:
            return 0
        if segment.table == 0:
            return room.prefix_tokens // decode_run(self.start)
        group = self._groups[segment.table - 1]
        return group_pages(group, room.tokens, room.prefix_tokens).start - group_pages(group, room.tokens).start

    def unowned(self, view: PlaneView) -> Pages:
        """Returns the indices of the pages, or state items, of a view that no room owns; includes the reserved 0."""
        own = view.shard.segment.index - self._shared
        allocator = self._own[own] if own >= 0 else self._pages
        return np.concatenate([np.zeros(1, np.int64), allocator.free])

    def fill(self, batch: int) -> None:
        """Writes the test pattern of all rooms, unless batch number `batch` was the last one written."""
        if self._filled == batch:
            return
        self._filled = batch
        self.fill_rooms(list(self.rooms.values()))

    def fill_rooms(self, rooms: Sequence[Room]) -> None:
        """Writes the test pattern into the pages, state items and aux rows of rooms."""
        for view, pages, bases in self.pages_with_bases(rooms):
            self.store.fill(view, pages, bases)
        for room in rooms:
            self.aux()[self.slots[room.number]] = aux_row(self.start.seed, room.index, AUX_ROW_BYTES)

    def pages_with_bases(self, rooms: Sequence[Room], cached: bool = True) -> Iterator[tuple[PlaneView, Pages, Words]]:
        """Yields (view, pages, bases) for every view: the pages or items of all rooms, one after the other.

        Together they lie close to one another in the pool, so that pools on devices need few copies.

        Args:
            cached: whether to include pages that are not transferred because decode has them cached.
        """
        for views in zip(*map(self.with_bases, rooms), strict=True):
            pages, bases = [], []
            for room, (view, words) in zip(rooms, views, strict=True):
                first = 0 if cached else self.cached(room, view.shard.segment)
                pages.append(self.items[room.number][view.shard.segment.index][first:])
                bases.append(words[first * view.rows.per_page * view.rows.heads :])
            yield view, np.concatenate(pages), np.concatenate(bases)

    def poison(self) -> None:
        """Fills the whole pool with poison, so that correct content found later must have been transferred."""
        for view in self.views:
            self.store.poison(view)
        self.aux().fill(POISON)

    def with_bases(self, room: Room) -> Iterator[tuple[PlaneView, Words]]:
        """Yields (view, bases) for every view: `pattern.row_bases` for all rows of a room and this rank's heads.

        The bases of rows that are not transferred are 0.
        """
        made: dict[tuple[int | None, int, int, int, int], Words] = {}
        for view in self.views:
            rows, segment = view.rows, view.shard.segment
            key = (segment.table, len(self.items[room.number][segment.index]), rows.per_page, rows.head_lo, rows.heads)
            if key not in made:
                positions, end = self.row_map(room, view)
                count = max(end, int(positions.max(initial=-1)) + 1)
                whole = row_bases(self.start.seed, room.index, count, rows.head_lo, rows.heads)
                whole[end * rows.heads :] = 0
                made[key] = whole.reshape(count, rows.heads)[positions].reshape(-1)
            yield view, made[key]

    def row_map(self, room: Room, view: PlaneView) -> RowMap:
        """Returns the rows of the prompt that the rows of a room's pages, or state items, are."""
        start, per_page, segment = self.start, view.rows.per_page, view.shard.segment
        own = np.arange(len(self.items[room.number][segment.index]) * per_page, dtype=np.int64)
        if segment.table:
            first = group_pages(self._groups[segment.table - 1], room.tokens).start * per_page
            return RowMap(first + own, first + len(own))
        if start.role == "prefill" or segment.state:
            return RowMap(own, len(own))
        ranks, rank = start.decode.cp, own_coord(start).cp
        if ranks > 1:
            run = int(start.config.get("cp_interleave", 1)) * per_page // start.page_size
            own = (own // run * ranks + rank) * run + own % run
        transfer_page = start.transfer_page or start.page_size
        tokens = -(-room.tokens // transfer_page) * transfer_page
        return RowMap(own, tokens * per_page // start.page_size)

    def aux(self) -> Bytes:
        """Returns a view of all aux rows, uint8 `[slots, AUX_ROW_BYTES]`."""
        return self._pool.aux[0]

    def _reset(self, batch: int) -> None:
        """Removes all rooms and rebuilds the allocators, whose page order depends on the batch and the rank."""
        start = self.start
        rank = 2 * start.unique + (start.role == "decode") + (max(0, start.instance) << 32)
        seed = mix64(mix64(start.seed + rank) + batch)
        self._pages = PageAllocator(start.pool_pages, start.page_order, seed)
        names = [each["name"] for each in (*self._groups, *self._states)]
        self._own = [
            PageAllocator(start.state_slots[name], start.page_order, mix64(seed + at + 1))
            for at, name in enumerate(names)
        ]
        self.rooms: dict[int, Room] = {}
        self.items: dict[int, tuple[Pages, ...]] = {}
        self.slots: dict[int, int] = {}
        self.free_slots = list(range(start.aux_slots))
