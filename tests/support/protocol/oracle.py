"""Observes every byte of a simulated world and raises `Broken` at the first byte that differs from the plan.

A byte is a cell (segment, layer, page or item, head) of one decode rank; its value identifies the cell of the prompt
that it holds. `layout`, which is tested against its own oracles, determines the expected contents of each cell.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.plan import slices_of_writer, slices_to_reader, state_slices_to_reader, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import PartKind, Tag

UNIT = 256  # bytes; resolution at which the contents of rings are tracked
PAGE_SIZE = 1


class Broken(AssertionError):
    """Error for a step that the protocol must not take."""


@dataclass(frozen=True)
class Instance:
    """Prefill instance of a simulated world.

    Attributes:
        side: parallel sizes of the instance.
        cp_mode: division of the sending among its CP ranks.
        early_send: whether pipeline stages before the last one may send before the end of their forward.
        answers: whether its registry answers; otherwise its ranks are never known.
        introduced: whether decode ranks know it from their start; otherwise they ask when a room needs it.
    """

    side: ParallelConfig
    cp_mode: str = "rank0"
    early_send: bool = True
    answers: bool = True
    introduced: bool = True


class Place(NamedTuple):
    """Role, instance and rank of an agent."""

    role: str
    instance: int  # 0 for decode agents
    rank: int


class Write(NamedTuple):
    """One write of a part, posted by one incarnation of a writer."""

    writer: str
    incarnation: int
    order: ev.Transfer


Cell = tuple[int, int, int, int]  # segment, layer, page (of a state: item), head in the reader's pool
Value = tuple[int, int, int, int, int]  # room, page of the prompt (of a state: which item), segment, layer, head


@dataclass
class Expected:
    """Expected and observed state of one room under one nonce at one decode rank.

    Attributes:
        reader: name of the decode rank.
        pages: pages of the room there, without the prefix.
        items: items of each state component there.
        written: value of each cell that was written.
        aux_written: how often the aux row was written.
        released: whether the machine has released the room.
    """

    room: int
    nonce: int
    reader: str
    pages: list[int]
    prefix_pages: int
    total_pages: int
    aux_index: int
    instance: int = 0
    items: tuple[list[int], ...] = ()
    prefill_only: bool = False
    written: dict[Cell, Value] = field(default_factory=dict)
    aux_written: int = 0
    released: bool = False
    state: RoomState = RoomState.BOOTSTRAPPING
    failure: Any = None


def place_of(name: str) -> Place:
    """Parses an agent's name: `prefill-<rank>` belongs to instance 0, `p<i>-prefill-<rank>` to instance i."""
    head, role, rank = name.rpartition("-")[0].rpartition("prefill")
    if role:
        return Place(role, int(head[1:-1] or 0), int(name.rpartition("-")[2]))
    return Place(rank, 0, int(name.rpartition("-")[2]))


class Oracle:
    """Tracks writes in flight, the contents of rings and pages, and the results reported to each engine.

    Every method that records a step raises `Broken` if the protocol must not take that step.
    """

    def __init__(
        self, shape: ModelShape, decode: ParallelConfig, instances: tuple[Instance, ...], chunk_pages: int
    ) -> None:
        self.shape = shape
        self.decode = decode
        self.instances = instances
        self.chunk_pages = chunk_pages
        self.rooms: dict[tuple[str, int, int], Expected] = {}  # by decode rank, room, nonce
        self.sent: dict[tuple[str, int], RoomState] = {}  # last state reported to each prefill engine, by (agent, room)
        self.sent_failures: dict[tuple[str, int], Any] = {}
        self.prefixes: dict[tuple[str, int], int | None] = {}  # last prefix_tokens reported, likewise
        self.sent_released: set[tuple[str, int]] = set()
        self.flying: list[Write] = []
        self.ring_bytes: dict[str, dict[int, tuple[int, int, Any]]] = {}  # reader → unit → (serial, unit, last write)
        self.source: dict[tuple[str, int], tuple[int, int]] = {}  # (prefill rank, page) → (room, position)
        self.items: dict[tuple[str, int, int], tuple[int, int]] = {}  # (prefill rank, segment, item) → likewise
        self.queued: Counter[tuple[str, int, str, int, int]] = Counter()  # (layer, page) pairs ordered, by transfer
        self.computed: set[tuple[str, int, int, int]] = set()  # (prefill rank, room, layer, page) that its engine has
        self.finished: set[tuple[str, int]] = set()  # (prefill rank, room) whose engine is done
        self.taken_back: set[tuple[str, int, int]] = set()  # (prefill rank, room, page) that its engine has recalled
        self.recalling: set[tuple[str, int]] = set()  # (prefill rank, room) whose engine waits for the end of a recall
        self.paths: Counter[str] = Counter()  # number of ordered parts by path
        self.cut: Counter[bool] = (
            Counter()
        )  # number of ordered parts, by whether they contain only some layers of their slice

    def life(self, name: str) -> int | None:
        """Returns the incarnation of an agent's process; None if no process is running."""
        raise NotImplementedError

    def forget(self, name: str) -> None:
        """Drops what is recorded of a process that has ended, and its writes in flight."""
        self.flying = [write for write in self.flying if write.writer != name]
        self.sent = {key: state for key, state in self.sent.items() if key[0] != name}
        self.sent_released = {key for key in self.sent_released if key[0] != name}
        self.computed = {entry for entry in self.computed if entry[0] != name}
        self.finished = {entry for entry in self.finished if entry[0] != name}
        self.taken_back = {entry for entry in self.taken_back if entry[0] != name}
        self.recalling = {entry for entry in self.recalling if entry[0] != name}
        # Writes into an ended process have no effect; the engine reports them as completed later.
        self.rooms = {key: room for key, room in self.rooms.items() if key[0] != name}

    @property
    def inputs(self) -> PlanInputs:
        return self.inputs_of(0)

    def inputs_of(self, instance: int) -> PlanInputs:
        prefill = self.instances[instance]
        return PlanInputs(self.shape, PAGE_SIZE, self.chunk_pages, prefill.side, self.decode, prefill.cp_mode)

    # ---- calls of the engines -------------------------------------------------------------------------------------

    def called(self, name: str, event: ev.Event) -> None:
        """Records a call of an engine: pages that it has computed, or the end of its forwards."""
        if isinstance(event, ev.Recall):
            mine = {entry for entry in self.computed if entry[:2] == (name, event.room)}
            self.taken_back |= {(name, event.room, page) for *_, page in mine}
            self.computed -= mine
            self.finished.discard((name, event.room))
            if not self.sent.get((name, event.room), RoomState.SUCCESS).finished:
                self.recalling.add((name, event.room))
        elif isinstance(event, ev.Finish):
            self.finished.add((name, event.room))
        elif isinstance(event, ev.SendPages):
            lo, hi = event.layers or (0, sum(segment.layer_hi for segment in self.inputs.segments))
            places = [(layer, page) for layer in range(lo, hi) for page in event.pages.tolist()]
            self.computed.update((name, event.room, layer, page) for layer, page in places)

    def _check_computed(self, name: str, order: ev.Transfer) -> None:
        pages = order.src_pages.tolist()
        for layer in range(order.key.lo, order.key.hi):
            for page in pages:
                if (name, order.room, layer, page) not in self.computed:
                    raise Broken(f"{name} orders {order.key} of room {order.room} before page {page} is computed there")
        place = place_of(name)
        prefill = self.instances[place.instance]
        last = prefill.side.coord(place.rank).pp == prefill.side.pp - 1
        if not (prefill.early_send or last or (name, order.room) in self.finished):
            raise Broken(f"{name} orders {order.key} of room {order.room}, and was to wait for the end of its forward")

    # ---- writes -------------------------------------------------------------------------------------------------

    def ordered(self, name: str, order: ev.Transfer) -> None:
        """Checks a part that a writer orders.

        The room has not failed and is not being recalled, and final parts come after all KV parts.
        """
        if (name, order.room) in self.recalling:
            raise Broken(
                f"{name} orders {order.key} of room {order.room}, whose engine waits for the end of its recall"
            )
        if self.sent.get((name, order.room)) is RoomState.FAILED:
            raise Broken(f"{name} orders {order.key} of room {order.room} after its engine was told that it has failed")
        transfer = (name, self.life(name) or 0, order.peer, order.room, order.nonce)
        if order.kind is PartKind.KV:
            self._check_computed(name, order)
            assert order.share is not None
            self.paths[order.path] += 1
            self.cut[order.key.hi - order.key.lo < order.share.num_layers] += 1
            self.queued[transfer] += (order.key.hi - order.key.lo) * len(order.src_pages)
            return
        room = self.rooms.get((order.peer, order.room, order.nonce))
        if room is not None and self.queued[transfer] != self._owed(name, room):
            raise Broken(f"{order.kind.name} of room {order.room} is ordered before all of its KV parts")

    def _owed(self, name: str, room: Expected) -> int:
        """Returns the number of (layer, page) pairs that one prefill rank must send for this room."""
        if room.prefill_only:
            return 0
        inputs, rank, reader = self.inputs_of(room.instance), place_of(name).rank, place_of(room.reader).rank
        dp = self.decode.coord(reader).dp
        owed = [share for share in slices_of_writer(inputs, room.room, dp, rank) if share.reader == reader]
        cells = writer_cells(inputs, room.room, rank, reader, room.total_pages, room.prefix_pages)
        return sum(share.num_layers for share in owed) * sum(cell.count for cell in cells)

    def undone(self, write: Write) -> None:
        """Records a queued part that was dropped: it may be ordered once more."""
        order = write.order
        if order.kind is PartKind.KV:
            transfer = (write.writer, write.incarnation, order.peer, order.room, order.nonce)
            self.queued[transfer] -= (order.key.hi - order.key.lo) * len(order.src_pages)

    def recalled(self, name: str, number: int) -> None:
        """Checks that no write reads pages which an engine has recalled, and may reuse from now on."""
        self.recalling.discard((name, number))
        for write in self.flying:
            if write.writer == name and write.order.room == number and self._taken_back(write):
                raise Broken(f"{name} gives pages of room {number} back while {write.order.key} is in flight")

    def _taken_back(self, write: Write) -> bool:
        order = write.order
        pages = order.src_pages.tolist() if order.kind is PartKind.KV else []
        return any((write.writer, order.room, page) in self.taken_back for page in pages)

    def begun(self, write: Write) -> None:
        """Checks and records a write that begins; from now on no cancellation stops it."""
        order = write.order
        if self.sent.get((write.writer, order.room)) is RoomState.FAILED:
            raise Broken(f"{order.key} of room {order.room} begins after the room has failed: it was to be dropped")
        if (write.writer, order.room) in self.sent_released:
            raise Broken(f"{write.writer} reads pages of room {order.room} after it was released")
        if self._taken_back(write):
            raise Broken(f"{write.writer} reads pages of room {order.room} that its engine has recalled")
        for other in self.flying:
            if _reader(other) == _reader(write) and _overlap(other.order, order):
                raise Broken(f"two writes in flight to the same ring bytes: {other.order.key} and {order.key}")
        room = self.target(write)
        if room is not None and room.released:
            raise Broken(f"{order.key} of room {order.room} begins after the room was released")
        if order.grant is not None and room is not None:
            for unit in _units(order):
                self.ring_bytes[order.peer][unit] = (0, 0, None)
        self.flying.append(write)

    def landed(self, write: Write) -> bool:
        """Checks and records a write that has landed; returns whether the reader's process still runs."""
        order = write.order
        self.flying.remove(write)
        room = self.target(write)
        if room is None:
            return False
        if room.released:
            raise Broken(f"{order.key} of room {order.room} lands after the room was released")
        if order.kind is PartKind.AUX:
            if order.dst_pages.tolist() != [room.aux_index]:
                raise Broken("the aux row lands in another row")
            room.aux_written += 1
        elif order.grant is not None:
            for unit in _units(order):
                self.ring_bytes[order.peer][unit] = (order.grant.serial, unit, write)
        else:
            self._store(room, write, order.dst_pages)
        return True

    def target(self, write: Write) -> Expected | None:
        """Returns the room at the reader for which a write is meant; None if the reader's process has ended."""
        if Tag.unpack(write.order.tag).incarnation != self.life(write.order.peer):
            return None
        return self.rooms[write.order.peer, write.order.room, write.order.nonce]

    def scattered(self, name: str, action: ev.Scatter) -> None:
        """Checks a copy of a landed part from the ring into the pages, and records the cells written."""
        room = self.rooms[name, action.room, action.nonce]
        if room.released:
            raise Broken(f"{action.key} of room {action.room} is scattered after the room was released")
        nbytes = action.share.part_bytes(len(action.pages), action.key.hi - action.key.lo)
        found = [self.ring_bytes[name].get(unit) for unit in _span(action.offset, nbytes)]
        write = found[0][2] if found[0] else None
        if any(entry is None or entry[0] != action.serial for entry in found) or write is None:
            raise Broken(f"the ring holds {found} where {action.key} of room {action.room} was to be scattered from")
        if write.order.share != action.share or write.order.key != action.key:
            raise Broken(f"{write.order.key} was gathered as {write.order.share} and is scattered as {action.share}")
        self._store(room, write, action.pages)

    def _store(self, room: Expected, write: Write, pages: ev.Pages) -> None:
        order, share = write.order, write.order.share
        assert share is not None
        key, place = order.key, place_of(write.writer)
        if not len(order.src_pages) == len(pages) == len(order.dst_pages):
            raise Broken(f"{key}: {len(order.src_pages)} pages go into {len(pages)}")
        instance = self.instances[place.instance].side
        mine = local_shards(self.shape, PAGE_SIZE, instance, instance.coord(place.rank))[share.segment]
        lowest = mine.head_lo + share.src_head
        if not (mine.layer_lo <= key.lo < key.hi <= mine.layer_hi and lowest + share.heads <= mine.head_hi):
            raise Broken(f"{write.writer} sends {key} of {share}, and holds {mine}")
        if mine.segment.state:
            values = [self.items[write.writer, share.segment, item] for item in order.src_pages.tolist()]
        else:
            values = [self.source[write.writer, page] for page in order.src_pages.tolist()]
        self._check_planned(room, write, [position for _, position in values])
        for (number, position), dst in zip(values, pages.tolist(), strict=True):
            for layer in range(key.lo, key.hi):
                for head in range(share.heads):
                    cell = (share.segment, layer, dst, share.dst_head + head)
                    if cell in room.written:
                        raise Broken(f"{room.reader} {cell} is written twice")
                    room.written[cell] = (number, position, share.segment, layer, lowest + head)

    def _check_planned(self, room: Expected, write: Write, positions: list[int]) -> None:
        """Checks that the plan contains this writer, these heads, layers and pages."""
        share, key, place = write.order.share, write.order.key, place_of(write.writer)
        inputs, reader = self.inputs_of(room.instance), place_of(room.reader).rank
        state = write.order.kind is PartKind.STATE
        planned = (state_slices_to_reader if state else slices_to_reader)(inputs, room.room, reader)
        if place.instance != room.instance or key.writer != place.rank or share not in planned:
            raise Broken(f"{write.writer} sends {key} of {share}, which is not planned")
        if share.writer != place.rank or not share.layer_lo <= key.lo < key.hi <= share.layer_hi:
            raise Broken(f"{write.writer} sends {key} as {share}")
        if state:
            return
        cells = writer_cells(inputs, room.room, place.rank, reader, room.total_pages, room.prefix_pages)
        owed = {cell.index: list(range(cell.first, cell.first + cell.count)) for cell in cells}
        if positions != owed.get(key.chunk):
            raise Broken(f"{write.writer} sends {key} with pages {positions}, and owes {owed.get(key.chunk)}")

    # ---- results reported to the engines --------------------------------------------------------------------------

    def changed(self, name: str, action: ev.StateChanged) -> None:
        if place_of(name).role == "prefill":
            before = self.sent.get((name, action.room))
            if before is not None and before.finished and before != action.state:
                raise Broken(f"{name} room {action.room} goes from {before.label} to {action.state.label}")
            if action.state is RoomState.SUCCESS:
                self._check_received(name, action.room)
            self.sent[name, action.room] = action.state
            self.sent_failures[name, action.room] = action.failure
            self.prefixes[name, action.room] = action.prefix_tokens
            return
        room = self._latest(name, action.room)
        if room.state.finished and action.state is not RoomState.BOOTSTRAPPING:
            raise Broken(f"{name} room {room.room} goes from {room.state.label} to {action.state.label}")
        room.state, room.failure = action.state, action.failure
        if action.state is RoomState.SUCCESS:
            self._check_success(room)

    def _check_received(self, name: str, number: int) -> None:
        """Checks that as many decode ranks have received a room as one dp group has, unless one has ended since."""
        opened = [room for room in self.rooms.values() if room.room == number]
        received = {room.reader for room in opened if room.state is RoomState.SUCCESS}
        expected = self.decode.tp * self.decode.cp * self.decode.pp
        if len(received) < expected <= len({room.reader for room in opened}):
            raise Broken(f"{name} ends room {number} with Success, and only {sorted(received)} has received it")

    def _check_success(self, room: Expected) -> None:
        wanted = self.wanted(room)
        if room.written != wanted:
            raise Broken(f"room {room.room} succeeds with {len(room.written)} of {len(wanted)} cells in place")
        if room.aux_written != (room.aux_index >= 0):
            raise Broken(f"room {room.room} succeeds with {room.aux_written} aux rows")

    def wanted(self, room: Expected) -> dict[Cell, Value]:
        """Returns the expected final contents of a decode rank's pages and items for one room."""
        coord: RankCoord = self.decode.coord(place_of(room.reader).rank)
        wanted: dict[Cell, Value] = {}
        lists = iter(room.items)
        for mine in local_shards(self.shape, PAGE_SIZE, self.decode, coord):
            if mine.segment.state:
                places = list(enumerate(next(lists, [])))
            else:
                places = [] if room.prefill_only else list(enumerate(room.pages, room.prefix_pages))
            segment = mine.segment.index
            for layer in range(mine.layer_lo, mine.layer_hi):
                for position, page in places:
                    for head in range(mine.head_lo, mine.head_hi):
                        cell = (segment, layer, page, head - mine.head_lo)
                        wanted[cell] = (room.room, position, segment, layer, head)
        return wanted

    def released(self, name: str, number: int) -> None:
        if place_of(name).role == "prefill":
            self.sent_released.add((name, number))
            for write in self.flying:
                if write.writer == name and write.order.room == number:
                    raise Broken(f"{name} releases room {number} while {write.order.key} is in flight")
            return
        room = self._latest(name, number)
        if room.released:
            raise Broken(f"{name} releases room {number} twice")
        room.released = True
        for write in self.flying:
            if self.target(write) is room:
                raise Broken(f"{name} releases room {number} while {write.order.key} is in flight")

    def _latest(self, name: str, number: int) -> Expected:
        """Returns the latest room with this number at one decode rank."""
        return [room for room in self.rooms.values() if room.reader == name and room.room == number][-1]


def _reader(write: Write) -> tuple[str, int]:
    """Returns the process that a write targets, as (agent, incarnation): a later incarnation has other memory."""
    return write.order.peer, Tag.unpack(write.order.tag).incarnation


def _span(offset: int, nbytes: int) -> range:
    return range(offset // UNIT, -(-(offset + nbytes) // UNIT))


def _units(order: ev.Transfer) -> range:
    assert order.grant is not None
    return _span(order.grant.offset, order.grant.end - order.grant.offset)


def _overlap(one: ev.Transfer, other: ev.Transfer) -> bool:
    if one.grant is None or other.grant is None:
        return False
    return one.grant.offset < other.grant.end and other.grant.offset < one.grant.end
