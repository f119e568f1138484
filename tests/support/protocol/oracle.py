"""Observes every write of a simulated world and raises an error at the first step that the protocol must not take.

`invariants` checks what each room's plan permits, `messages` what the ranks tell each other. This module adds which
writes are in flight, what the bytes of each ring hold, and what each engine has computed. The plan itself comes from
`kvctl_agent.layout`, as that of the machines, so `check_plan` compares it with the shards of the ranks.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import LocalShard, ParallelConfig, local_shards
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag, with_row
from tests.support.protocol.invariants import Broken, ExpectedRoom, ExpectedTransfer, RoomPlan

UNIT = 256  # bytes; resolution at which the contents of rings are tracked
PAGE_SIZE = 1


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


_ROW = struct.Struct("<II")
AUX_ROW_BYTES = _ROW.size


def row_of(order: ev.Transfer) -> bytes | None:
    """Returns the aux row that is sent with a KV part, which names the room; None if none is."""
    return _ROW.pack(order.room, order.nonce) if order.aux_row >= 0 else None


def tag_of(order: ev.Transfer) -> bytes:
    """Returns the tag that a write carries, with the aux row that is sent with it."""
    row = row_of(order)
    return order.tag if row is None else with_row(order.tag, row)


Cell = tuple[int, int, int, int]  # segment, layer, page (of a state: item), head in the reader's pool
Value = tuple[int, int]  # page of the prompt (of a state: which item), head of the model


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
        self.rooms: dict[tuple[str, int, int], ExpectedRoom] = {}  # by decode rank, room, nonce
        self.sent: dict[tuple[str, int], RoomState] = {}  # last state reported to each prefill engine, by (agent, room)
        self.sent_failures: dict[tuple[str, int], Any] = {}
        self.prefixes: dict[tuple[str, int], int | None] = {}  # last prefix_tokens reported, likewise
        self.sent_released: set[tuple[str, int]] = set()
        self.flying: list[Write] = []
        self.ring_bytes: dict[str, dict[int, tuple[int, int, Any]]] = {}  # reader → unit → (serial, unit, last write)
        self.source: dict[tuple[str, int], tuple[int, int]] = {}  # (prefill rank, page) → (room, position)
        self.items: dict[tuple[str, int, int], tuple[int, int]] = {}  # (prefill rank, segment, item) → likewise
        # By (writer, its incarnation, decode rank, room, nonce).
        self.transfers: dict[tuple[str, int, str, int, int], ExpectedTransfer] = {}
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
        """Records a call of an engine: a room that it opens, pages that it has computed, the end of its forwards."""
        if isinstance(event, ev.OpenRoom):
            instance = int(event.instance.rpartition("-")[2])
            self.rooms[name, event.room, event.nonce] = ExpectedRoom(event.room, event.nonce, name, event, instance)
        elif isinstance(event, ev.Recall):
            mine = {entry for entry in self.computed if entry[:2] == (name, event.room)}
            self.taken_back |= {(name, event.room, page) for *_, page in mine}
            self.computed -= mine
            self.finished.discard((name, event.room))
            if not self.sent.get((name, event.room), RoomState.SUCCESS).finished:
                self.recalling.add((name, event.room))
        elif isinstance(event, ev.SendRoom):
            self.sent_released.discard((name, event.room))
        elif isinstance(event, ev.Finish):
            self.finished.add((name, event.room))
            if event.pages is not None:
                self.called(name, event.pages)
        elif isinstance(event, ev.SendPages):
            lo, hi = event.layers or (0, sum(segment.layer_hi for segment in self.inputs.segments))
            places = [(layer, page) for layer in range(lo, hi) for page in event.pages.tolist()]
            self.computed.update((name, event.room, layer, page) for layer, page in places)

    def plan_of(self, room: ExpectedRoom) -> RoomPlan:
        if room.plan is None:
            inputs, reader = self.inputs_of(room.instance), place_of(room.reader).rank
            room.plan = RoomPlan.of_call(inputs, room.opening, reader)
            check_plan(inputs, room.opening, reader, room.plan)
        return room.plan

    # ---- writes -------------------------------------------------------------------------------------------------

    def ordered(self, name: str, order: ev.Transfer) -> None:
        """Checks a part that a writer orders: it is planned, computed, and its room is neither failed nor recalled."""
        if (name, order.room) in self.recalling:
            raise Broken(
                f"{name} orders {order.key} of room {order.room}, whose engine waits for the end of its recall"
            )
        if self.sent.get((name, order.room)) is RoomState.FAILED:
            raise Broken(f"{name} orders {order.key} of room {order.room} after its engine was told that it has failed")
        transfer = self.transfers.setdefault(self._transfer(name, self.life(name) or 0, order), ExpectedTransfer())
        place = place_of(name)
        room = self.rooms.get((order.peer, order.room, order.nonce))
        if room is not None and room.instance != place.instance:
            raise Broken(f"{name} sends {order.key} of room {order.room}, which another instance computes")
        plan = self.plan_of(room) if room is not None else None
        if order.kind is PartKind.KV:
            self._check_computed(name, order)
            self.paths[order.path] += 1
            assert order.share is not None
            self.cut[order.key.hi - order.key.lo < order.share.num_layers] += 1
        transfer.order(place.rank, order, plan, finished=(name, order.room) in self.finished)

    @staticmethod
    def _transfer(name: str, incarnation: int, order: ev.Transfer) -> tuple[str, int, str, int, int]:
        return name, incarnation, order.peer, order.room, order.nonce

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

    def _check_sources(self, write: Write, room: ExpectedRoom) -> None:
        """Checks that a part is read from the pages of the prompt, or the items, that go to its destination."""
        order = write.order
        planned = self.plan_of(room).find(order.kind, order.key)
        assert planned is not None  # checked when it was ordered
        numbers = order.src_pages.tolist()
        if planned.chunk is not None:
            held = [self.source[write.writer, page] for page in numbers]
            wanted: Iterable[int] = range(planned.chunk.first, planned.chunk.end)
        elif order.kind is PartKind.STATE:
            held = [self.items[write.writer, order.key.chunk, item] for item in numbers]
            wanted = range(len(planned.pages))
        else:
            return
        if held != [(order.room, position) for position in wanted]:
            raise Broken(f"{write.writer} sends {order.key} of room {order.room} from {held}")

    def undone(self, write: Write) -> None:
        """Records a queued part that was dropped: it may be ordered once more."""
        key = self._transfer(write.writer, write.incarnation, write.order)
        if key in self.transfers:
            self.transfers[key].undo(write.order)

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
        self._check_sources(write, room)
        if order.grant is not None:
            for unit in _units(order):
                self.ring_bytes[order.peer][unit] = (order.grant.serial, unit, write)
        else:
            self._store(room, order)
        return True

    def target(self, write: Write) -> ExpectedRoom | None:
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
        planned = self.plan_of(room).find(PartKind.KV, action.key)
        if write.order.key != action.key or planned is None or planned.share != action.share:
            raise Broken(f"{write.order.key} was gathered as {write.order.share} and is scattered as {action.share}")
        if planned.pages.tolist() != action.pages.tolist():
            raise Broken(f"{action.key} of room {action.room} is scattered into the pages of another part")
        self._store(room, write.order)

    def row_stored(self, name: str, action: ev.StoreAux) -> None:
        """Checks a row that came in a tag, and records it as written."""
        room = self.rooms.get((name, *_ROW.unpack(action.row)))
        if room is None or room.released or room.opening.aux_index != action.slot:
            raise Broken(f"row {action.row.hex()} is stored in slot {action.slot} of {name}")
        (key,) = (key for key in self.plan_of(room).finals if key[0] is PartKind.AUX)
        if not room.cover(*key):
            raise Broken(f"the row of room {room.room} is stored twice")

    def _store(self, room: ExpectedRoom, order: ev.Transfer) -> None:
        if not room.cover(order.kind, order.key):
            raise Broken(f"{order.kind.name} {order.key} of room {room.room} is written twice")

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
        if action.state is RoomState.SUCCESS:
            self.plan_of(room)
        room.change(action.state)
        room.failure = action.failure

    def _check_received(self, name: str, number: int) -> None:
        """Checks that as many decode ranks have received a room as one dp group has, unless one has ended since."""
        opened = [room for room in self.rooms.values() if room.room == number]
        received = {room.reader for room in opened if room.state is RoomState.SUCCESS}
        expected = self.decode.tp * self.decode.cp * self.decode.pp
        if len(received) < expected <= len({room.reader for room in opened}):
            raise Broken(f"{name} ends room {number} with Success, and only {sorted(received)} has received it")

    def released(self, name: str, number: int) -> None:
        if place_of(name).role == "prefill":
            if (name, number) in self.sent_released:
                raise Broken(f"{name} releases room {number} twice")
            self.sent_released.add((name, number))
            for write in self.flying:
                if write.writer == name and write.order.room == number:
                    raise Broken(f"{name} releases room {number} while {write.order.key} is in flight")
            return
        room = self._latest(name, number)
        room.release()
        for write in self.flying:
            if self.target(write) is room:
                raise Broken(f"{name} releases room {number} while {write.order.key} is in flight")

    def _latest(self, name: str, number: int) -> ExpectedRoom:
        """Returns the latest room with this number at one decode rank."""
        return [room for room in self.rooms.values() if room.reader == name and room.room == number][-1]


def check_plan(inputs: PlanInputs, call: ev.OpenRoom, reader: int, plan: RoomPlan) -> None:
    """Checks that a plan fills each cell of a decode rank's shards once, from the same cell of a writer's shard.

    The decode engine's pages and items and the shards alone determine the expected cells, not the slices and chunks of
    the layout.

    Raises:
        Broken: a cell is missing, wrong or written twice, a writer does not have it, or the aux row is not planned.
    """
    shape, page_size = inputs.shape, inputs.page_size
    shards = local_shards(shape, page_size, inputs.decode, inputs.decode.coord(reader))
    prompt = range(call.prefix_pages, call.total_pages)
    pages = {} if call.prefill_only else dict(zip(prompt, call.pages.tolist(), strict=False))
    items = iter(call.states)
    wanted: dict[Cell, Value] = {}
    for mine in shards:
        places = dict(enumerate(next(items, np.empty(0, np.int32)).tolist())) if mine.segment.state else pages
        wanted |= _cells(mine, range(mine.layer_lo, mine.layer_hi), places, 0, range(mine.head_lo, mine.head_hi))
    written: dict[Cell, Value] = {}
    for kind, key in _parts(plan):
        planned = plan.find(kind, key)
        assert planned is not None
        share, chunk = planned.share, planned.chunk
        assert share is not None
        theirs = local_shards(shape, page_size, inputs.prefill, inputs.prefill.coord(key.writer))[share.segment]
        heads = range(theirs.head_lo + share.src_head, theirs.head_lo + share.src_head + share.heads)
        inside = theirs.head_lo <= heads.start < heads.stop <= theirs.head_hi
        if (share.writer, share.reader) != (key.writer, reader) or not (
            inside and theirs.layer_lo <= key.lo < key.hi <= theirs.layer_hi
        ):
            raise Broken(f"writer {key.writer} is to send {key} of room {call.room} as {share}, and holds {theirs}")
        positions = range(len(planned.pages)) if chunk is None else range(chunk.first, chunk.end)
        places = dict(zip(positions, planned.pages.tolist(), strict=True))
        part = _cells(shards[share.segment], range(key.lo, key.hi), places, share.dst_head, heads)
        if twice := part.keys() & written.keys():
            raise Broken(f"room {call.room} at decode rank {reader}: {min(twice)} is planned twice, again in {key}")
        written |= part
    if written != wanted:
        differ = min(cell for cell in written.keys() | wanted.keys() if written.get(cell) != wanted.get(cell))
        text = f"{differ} is planned as {written.get(differ)} instead of {wanted.get(differ)}"
        raise Broken(f"room {call.room} at decode rank {reader}: {text}")
    rows = [planned.pages.tolist() for (kind, _), planned in plan.finals.items() if kind is PartKind.AUX]
    if rows != ([[call.aux_index]] if call.aux_index >= 0 else []):
        raise Broken(f"room {call.room} at decode rank {reader}: aux rows {rows} are planned, not {call.aux_index}")


def _parts(plan: RoomPlan) -> Iterator[tuple[PartKind, PartKey]]:
    """Yields the parts of a plan but the aux row, those of KV by layer."""
    for (writer, chunk), layers in plan.layers.items():
        for layer in range(layers.bit_length()):
            if layers >> layer & 1:
                yield PartKind.KV, PartKey(writer, chunk, layer, layer + 1)
    yield from ((kind, key) for kind, key in plan.finals if kind is PartKind.STATE)


def _cells(
    mine: LocalShard, layers: range, places: Mapping[int, int], first_head: int, heads: range
) -> dict[Cell, Value]:
    """Returns the cells of a reader's shard for layers, pages by position, and heads, `first_head` in its pool."""
    return {
        (mine.segment.index, layer, page, first_head + head - heads.start): (position, head)
        for layer in layers
        for position, page in places.items()
        for head in heads
    }


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
