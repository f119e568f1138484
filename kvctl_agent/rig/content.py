"""What a rank's pool holds for a lot of rooms: which pages are whose, and what is written there before a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvctl_agent.contract.rig import Room, Start
from kvctl_agent.layout.heads import mix64
from kvctl_agent.layout.holding import Held, held
from kvctl_agent.layout.shape import Plane
from kvctl_agent.layout.side import Coord, Side
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.rig.geometry import model_shape, state_items
from kvctl_agent.rig.pages import Pages, assign_pages
from kvctl_agent.rig.pattern import POISON, Bytes, Rows, Sheet, Words, Writer, aux_row, row_bases
from kvctl_agent.rig.resolve import side_of

AUX_ROW_BYTES = 256


def own_side(start: Start) -> Side:
    """The sizes of the instance that this rank is of."""
    return side_of(start.prefill[start.instance] if start.role == "prefill" else start.decode)


def own_coord(start: Start) -> Coord:
    """This rank's place in it."""
    return own_side(start).coord(start.unique)


def allocate_pool(start: Start) -> KVPool:
    """The pool this rank was planned to have."""
    shape = model_shape(start.shape, start.page_size)
    return KVPool.allocate(
        held(shape, start.page_size, own_side(start), own_coord(start)),
        page_size=start.page_size,
        num_pages=start.pool_pages,
        state_slots=start.state_slots,
        aux_slots=start.aux_slots,
        aux_row_bytes=AUX_ROW_BYTES,
    )


@dataclass(frozen=True, slots=True)
class Deck:
    """One plane of one segment on this rank, over all the layers it holds.

    Attributes:
        held: which layers and heads of the segment.
        index, plane: of the plane in a layer.
        writer: writes and checks rows of its geometry.
    """

    pool: KVPool
    held: Held
    index: int
    plane: Plane
    writer: Writer

    @property
    def num_slots(self) -> int:
        """Pages (of a state: items) of each layer."""
        return self.pool.segments[self.held.segment.index].num_slots

    @property
    def rows(self) -> Rows:
        return self.writer.rows

    @property
    def name(self) -> str:
        """What a mismatch calls it: "k", "latent", "draft k", a state component's name."""
        return f"draft {self.plane.name}" if self.held.segment.name == "draft" else self.plane.name

    def sheets(self) -> Iterator[tuple[Sheet, Bytes]]:
        """Each layer's bytes, flat, in page order."""
        memory = self.pool.segments[self.held.segment.index]
        for layer in range(self.held.layer_lo, self.held.layer_hi):
            yield Sheet(self.held.segment.index, layer, self.index), memory.block(layer, self.index)


class Content:
    """The lot a rank works on.

    Attributes:
        start: who this rank is.
        decks: every plane of every segment that this rank has layers of.
        rooms: the rooms taken, by number, in the order they were given.
        items: of each, the page (of a state: item) indices in each segment, in the prompt's order.
    """

    def __init__(self, pool: KVPool, start: Start) -> None:
        self._pool = pool
        self._filled: int | None = None
        self.start = start
        self.decks = [
            Deck(pool, memory.held, index, plane, Writer(_rows(memory.held, plane, start.shape["dtype_bytes"])))
            for memory in pool.segments
            if memory.held.num_layers
            for index, plane in enumerate(memory.held.segment.planes)
        ]
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
            items = self.items[room.number][deck.held.segment.index]
            for sheet, block in deck.sheets():
                deck.writer.fill(block, items, bases, sheet)
        self.aux()[room.slot] = aux_row(self.start.seed, room.index, AUX_ROW_BYTES)

    def poison(self) -> None:
        """Overwrite everything, so that whatever is right afterwards has been moved."""
        for deck in self.decks:
            for _, block in deck.sheets():
                block.fill(POISON)
        self.aux().fill(POISON)

    def with_bases(self, room: Room) -> Iterator[tuple[Deck, Words]]:
        """Every deck with the pattern's words for all whole pages of a room and this rank's heads."""
        made: dict[tuple[int, int, int], Words] = {}
        for deck in self.decks:
            key = (self.whole_rows(room, deck), deck.rows.head_lo, deck.rows.heads)
            if key not in made:
                made[key] = row_bases(self.start.seed, room.index, *key)
            yield deck, made[key]

    def whole_rows(self, room: Room, deck: Deck) -> int:
        """Rows of all pages (of a state: items) of a room, the last one filled up."""
        return len(self.items[room.number][deck.held.segment.index]) * deck.rows.per_page

    def aux(self) -> Bytes:
        """The aux rows, uint8 `[slots, AUX_ROW_BYTES]`."""
        assert self._pool.aux is not None
        return self._pool.aux


def _rows(here: Held, plane: Plane, dtype_bytes: int) -> Rows:
    # Scales and state have elements of their own size; bytes say enough there.
    paged = not here.segment.state and plane.head_bytes % dtype_bytes == 0 and "scale" not in plane.name
    return Rows(
        per_page=plane.rows,
        head_lo=here.head_lo,
        heads=here.heads,
        row_bytes=plane.head_bytes,
        element_bytes=dtype_bytes if paged else 1,
    )
