"""The shipped machines, composed over a simulated network and engine, under an oracle that sees every byte.

Nothing happens by itself: `World.pool` holds all that could happen next (a message to deliver, a write to begin or to
complete, a tag to tell, a scatter to run, a call of an engine), and a scheduler picks. So one seed is one history, and
an explorer can try them all. Messages pass through the real codec. A byte is a cell (decode rank, layer, page, head);
its value says whose token it is.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.heads import head_range
from kvctl_agent.layout.plan import PlanInputs, Share, shares_to_reader
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.side import Side
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.local import Local, Timing
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.tag import PartKind, Tag
from kvctl_agent.telemetry.hub import Telemetry

MS = 1_000_000
SECOND = 1000 * MS

# One token of one head is 256 bytes over both layers, K and V: one page of one head is one unit of the ring.
SHAPE = ModelShape(num_layers=2, num_kv_heads=2, k_dim=32, v_dim=32, dtype_bytes=2)
UNIT = 256

TIMING = Timing(
    heartbeat_ns=SECOND,
    suspect_ns=3 * SECOND,
    lost_ns=15 * SECOND,
    resend_ns=SECOND,
    bootstrap_ns=120 * SECOND,
    waiting_ns=120 * SECOND,
    revoke_ns=5 * SECOND,
)

Machine = PrefillMachine | DecodeMachine
Kind = Literal["message", "begin", "complete", "tag", "event", "scatter", "engine"]


class Broken(AssertionError):
    """The protocol let something happen that it must not."""


class Item(NamedTuple):
    """Something that may happen next, to the agent `to`."""

    kind: Kind
    to: str
    by: str
    what: Any


class Write(NamedTuple):
    """One write of one agent in one life, as the engine sees it."""

    writer: str
    incarnation: int
    order: ev.Transfer


@dataclass
class Expected:
    """What the oracle knows of one room under one nonce at one decode rank."""

    room: int
    nonce: int
    reader: str
    pages: list[int]
    prefix_pages: int
    total_pages: int
    aux_index: int
    written: dict[tuple[int, int, int], tuple[int, int, int, int]] = field(default_factory=dict)
    aux_written: int = 0
    released: bool = False
    state: RoomState = RoomState.BOOTSTRAPPING
    failure: Any = None


def staged(who: msg.Introduction, share: Share, layers: int, pages: ev.Pages) -> str:
    return "staged"


def direct(who: msg.Introduction, share: Share, layers: int, pages: ev.Pages) -> str:
    return "slice"


def telemetry(name: str, role: Literal["prefill", "decode"]) -> Telemetry:
    return Telemetry(name, role, history=8, timeline_events=0, recorder_events=256)


class World:
    """Two instances, the network between them and the engine under them.

    Args:
        ring: units of `UNIT` bytes in each decode rank's ring.
    """

    def __init__(
        self,
        prefill: Side | None = None,
        decode: Side | None = None,
        *,
        ring: int = 8,
        chunk_pages: int = 2,
        timing: Timing = TIMING,
        choose: Callable[..., str] = staged,
        shape: ModelShape = SHAPE,
        make_telemetry: Callable[[str, Literal["prefill", "decode"]], Any] = telemetry,
        num_pages: int = 1 << 20,
        aux_slots: int = 64,
    ) -> None:
        self.prefill = prefill or Side(tp=2)
        self.decode = decode or Side()
        self.shape = shape
        self.timing = timing
        self.ring = ring
        self.chunk_pages = chunk_pages
        self.choose = choose
        self.make_telemetry = make_telemetry
        self.num_pages = num_pages
        self.aux_slots = aux_slots
        self.now_ns = SECOND
        self.pool: list[Item] = []
        self.machines: dict[str, Machine] = {}
        self.paused: set[str] = set()
        self.lives = 0
        self.rooms: dict[tuple[str, int, int], Expected] = {}  # by decode rank, room, nonce
        self.sent: dict[tuple[str, int], RoomState] = {}  # what each prefill engine was told
        self.sent_failures: dict[tuple[str, int], Any] = {}
        self.sent_released: set[tuple[str, int]] = set()
        self.flying: list[Write] = []
        self.ring_bytes: dict[str, dict[int, tuple[int, int, Any]]] = {}  # reader → unit → who wrote it last
        self.source: dict[tuple[str, int], tuple[int, int]] = {}  # (prefill rank, page) → (room, position)
        self.counts: Counter[str] = Counter()
        for rank in range(self.prefill.size):
            self._start(f"prefill-{rank}")
        for rank in range(self.decode.size):
            self._start(f"decode-{rank}")

    # ---- lives ------------------------------------------------------------------------------------------------

    @property
    def prefill_names(self) -> tuple[str, ...]:
        return tuple(f"prefill-{rank}" for rank in range(self.prefill.size))

    def _start(self, name: str) -> None:
        self.lives += 1
        role, _, number = name.partition("-")
        side = self.prefill if role == "prefill" else self.decode
        local = Local(
            name=name,
            role=role,
            coord=side.coord(int(number)),
            side=side,
            shape=self.shape,
            page_size=1,
            chunk_pages=self.chunk_pages,
            cp_mode="rank0",
            incarnation=self.lives,
            transport="simulated",
            metadata=b"",
            pool={"num_pages": self.num_pages, "aux_slots": self.aux_slots},
            host="here",
            pid=self.lives,
            ring_base=1 << 20,
            ring_bytes=self.ring * UNIT if role == "decode" else 0,
        )
        self.machines[name] = self._machine(local)
        self.ring_bytes[name] = {}
        if role == "decode":
            self.feed(name, ev.RosterKnown(self.prefill_names))

    def _machine(self, local: Local) -> Machine:
        told = self.make_telemetry(local.name, "prefill" if local.role == "prefill" else "decode")
        if local.role == "prefill":
            return PrefillMachine(local, self.timing, told, self.choose, direct)
        return DecodeMachine(local, self.timing, told)

    def p(self, rank: int = 0) -> PrefillMachine:
        machine = self.machines[f"prefill-{rank}"]
        assert isinstance(machine, PrefillMachine)
        return machine

    def d(self, rank: int = 0) -> DecodeMachine:
        machine = self.machines[f"decode-{rank}"]
        assert isinstance(machine, DecodeMachine)
        return machine

    def kill(self, name: str, *, proven: bool = True) -> None:
        """End a process: what it had in flight is gone with it. `proven`: the others are told so."""
        life = self.machines.pop(name).local.incarnation
        self.flying = [write for write in self.flying if write.writer != name]
        own = ("begin", "complete", "event", "scatter", "engine")
        self.pool = [
            item
            for item in self.pool
            if not (item.to == name and item.kind in own) and not (item.kind in own and item.by == name)
        ]
        self.sent = {key: state for key, state in self.sent.items() if key[0] != name}
        self.sent_released = {key for key in self.sent_released if key[0] != name}
        if name.startswith("decode"):
            # Writes into a dead process go nowhere; the engine says so in its own time.
            self.rooms = {key: room for key, room in self.rooms.items() if key[0] != name}
        for other in list(self.machines):
            if proven:
                self.feed(other, ev.PeerDead(name, life, "process has ended"))

    def restart(self, name: str, *, proven: bool = True) -> None:
        if name in self.machines:
            self.kill(name, proven=proven)
        self._start(name)

    # ---- the engines' side --------------------------------------------------------------------------------------

    def receive(
        self,
        room: int,
        pages: int,
        *,
        reader: int = 0,
        prefix: int = 0,
        nonce: int | None = None,
        aux: int = 0,
        first_page: int | None = None,
        extra: int = 0,
    ) -> Expected:
        """The decode engine opens a room of `pages` pages, `prefix` of which it has; `extra` ones are its mistake."""
        name = f"decode-{reader}"
        nonce = nonce if nonce is not None else 1000 + len(self.rooms)
        first = first_page if first_page is not None else 100 * (1 + len(self.rooms))
        indices = list(range(first, first + pages - prefix + extra))
        expected = Expected(room, nonce, name, indices, prefix, pages, aux)
        self.rooms[name, room, nonce] = expected
        self.feed(name, ev.OpenRoom(room, nonce, np.array(indices, np.int32), prefix, pages, aux))
        return expected

    def send(
        self, room: int, pages: int, *, ranks: Iterable[int] | None = None, split: Sequence[int] = (), aux: int = 1
    ) -> None:
        """The prefill engines get a room: their calls come one by one, as the scheduler picks."""
        for rank in self.prefill_ranks(room) if ranks is None else ranks:
            name = f"prefill-{rank}"
            base = 10_000 * (1 + len({number for _, number in self.sent}))
            self.sent.setdefault((name, room), RoomState.BOOTSTRAPPING)
            sends = [*split, pages - sum(split)]
            calls: list[ev.Event] = [ev.SendRoom(room), ev.Prefetch(room)]
            first = 0
            for number, count in enumerate(sends, 1):
                indices = np.arange(base + first, base + first + count, dtype=np.int32)
                for position, page in enumerate(indices.tolist(), first):
                    self.source[name, page] = (room, position)
                first += count
                calls.append(ev.SendPages(room, indices, number == len(sends), self.now_ns))
            calls.append(ev.Finish(room, aux, self.now_ns))
            self.pool.append(Item("engine", name, name, tuple(calls)))

    def prefill_ranks(self, room: int) -> range:
        """The ranks of the dp group that computes a room."""
        first = room % self.prefill.dp * self.prefill.tp
        return range(first, first + self.prefill.tp)

    # ---- what happens -------------------------------------------------------------------------------------------

    def feed(self, name: str, event: ev.Event) -> None:
        machine = self.machines.get(name)
        if machine is None:
            return
        for action in machine.handle(event, self.now_ns):
            self._act(name, action)

    def tick(self, elapsed_ns: int) -> None:
        self.now_ns += elapsed_ns
        for name in list(self.machines):
            if name not in self.paused:
                self.feed(name, ev.Tick())

    def happen(self, item: Item) -> None:
        """Let one thing of the pool happen; the caller has taken it out."""
        if item.kind == "message":
            incarnation, messages, unknown = codec.decode(item.what)
            assert not unknown
            for message in messages:
                self.feed(item.to, ev.Received(item.by, incarnation, message))
        elif item.kind == "begin":
            self._begin(item.what)
        elif item.kind == "complete":
            self._complete(item.what)
        elif item.kind == "tag":
            self.feed(item.to, ev.Arrived(Tag.unpack(item.what), self.now_ns))
        elif item.kind == "event":
            self.feed(item.to, item.what)
        elif item.kind == "scatter":
            self._scatter(item.to, item.what)
        else:
            call, *rest = item.what
            if rest:
                self.pool.append(item._replace(what=tuple(rest)))
            self.feed(item.to, call)

    def _act(self, name: str, action: ev.Action) -> None:
        if isinstance(action, ev.Send):
            self.counts[type(action.message).__name__] += 1
            frame = codec.encode(self.machines[name].local.incarnation, [action.message])
            self.pool.append(Item("message", action.peer, name, frame))
        elif isinstance(action, ev.ConnectPeer):
            self.pool.append(Item("event", name, name, ev.PeerConnected(action.peer)))
        elif isinstance(action, ev.Transfer):
            write = Write(name, self.machines[name].local.incarnation, action)
            self.pool.append(Item("begin", name, name, write))
        elif isinstance(action, ev.Scatter):
            self.pool.append(Item("scatter", name, name, action))
        elif isinstance(action, ev.StateChanged):
            self._changed(name, action)
        elif isinstance(action, ev.Released):
            self._released(name, action.room)

    # ---- the engine, and the oracle -------------------------------------------------------------------------------

    def _over(self, write: Write, *, dropped: bool) -> None:
        order = write.order
        moments = {"ready": order.ready_ns, "wire": self.now_ns}
        done = ev.PartSent(order.peer, order.room, order.nonce, order.kind, order.key, moments, dropped)
        self.pool.append(Item("event", write.writer, write.writer, done))

    def _begin(self, write: Write) -> None:
        order = write.order
        if order.fence.raised:
            self._over(write, dropped=True)
            return
        if (write.writer, order.room) in self.sent_released:
            raise Broken(f"{write.writer} reads pages of room {order.room} after it was released")
        for other in self.flying:
            if other.order.peer == order.peer and _overlap(other.order, order):
                raise Broken(f"two writes in flight to the same ring bytes: {other.order.key} and {order.key}")
        room = self._target(write)
        if room is not None and room.released:
            raise Broken(f"{order.key} of room {order.room} begins after the room was released")
        if order.grant is not None:
            for unit in _units(order):
                self.ring_bytes[order.peer][unit] = (0, 0, None)
        self.flying.append(write)
        self.pool.append(Item("complete", write.writer, write.writer, write))

    def _complete(self, write: Write) -> None:
        order = write.order
        self.flying.remove(write)
        room = self._target(write)
        if room is not None and room.released:
            raise Broken(f"{order.key} of room {order.room} lands after the room was released")
        if room is not None:
            if order.kind is PartKind.AUX:
                if order.dst_aux != room.aux_index:
                    raise Broken("the aux row lands in another row")
                room.aux_written += 1
            elif order.grant is not None:
                for unit in _units(order):
                    self.ring_bytes[order.peer][unit] = (order.grant.serial, unit, write)
            else:
                self._store(room, write, order.dst_pages)
        self._over(write, dropped=False)
        if room is not None:
            self.pool.append(Item("tag", order.peer, write.writer, order.tag))

    def _target(self, write: Write) -> Expected | None:
        """The room at the reader that this write was meant for; None where that process has ended."""
        reader = self.machines.get(write.order.peer)
        if reader is None or Tag.unpack(write.order.tag).incarnation != reader.local.incarnation:
            return None
        return self.rooms[write.order.peer, write.order.room, write.order.nonce]

    def _scatter(self, name: str, action: ev.Scatter) -> None:
        room = self.rooms[name, action.room, action.nonce]
        if room.released:
            raise Broken(f"{action.key} of room {action.room} is scattered after the room was released")
        nbytes = action.share.part_bytes(self.shape, len(action.pages))
        found = [self.ring_bytes[name].get(unit) for unit in _span(action.offset, nbytes)]
        write = found[0][2] if found[0] else None
        if any(entry is None or entry[0] != action.serial for entry in found) or write is None:
            raise Broken(f"the ring holds {found} where {action.key} of room {action.room} was to be scattered from")
        self._store(room, write, action.pages)
        self.feed(name, ev.Scattered(action.serial, self.now_ns))

    def _store(self, room: Expected, write: Write, pages: ev.Pages) -> None:
        order, share = write.order, write.order.share
        assert share is not None
        if len(order.src_pages) != len(pages) or len(order.src_pages) != len(order.dst_pages):
            raise Broken(f"{order.key}: {len(order.src_pages)} pages go into {len(pages)}")
        writer_tp = self.prefill.coord(share.writer).tp
        lowest = head_range(self.shape.num_kv_heads, self.prefill.tp, writer_tp).lo + share.src_head
        for src, dst in zip(order.src_pages.tolist(), pages.tolist(), strict=True):
            number, position = self.source[write.writer, src]
            for layer in range(order.key.lo, order.key.hi):
                for head in range(share.heads):
                    cell = (layer, dst, share.dst_head + head)
                    if cell in room.written:
                        raise Broken(f"{room.reader} {cell} is written twice")
                    room.written[cell] = (number, position, layer, lowest + head)

    def _changed(self, name: str, action: ev.StateChanged) -> None:
        if name.startswith("prefill"):
            before = self.sent.get((name, action.room))
            if before is not None and before.finished and before != action.state:
                raise Broken(f"{name} room {action.room} goes from {before.label} to {action.state.label}")
            self.sent[name, action.room] = action.state
            self.sent_failures[name, action.room] = action.failure
            return
        live = [room for room in self.rooms.values() if room.reader == name and room.room == action.room]
        room = live[-1]
        if room.state.finished and action.state is not RoomState.BOOTSTRAPPING:
            raise Broken(f"{name} room {room.room} goes from {room.state.label} to {action.state.label}")
        room.state, room.failure = action.state, action.failure
        if action.state is RoomState.SUCCESS:
            self._check_success(room)

    def _check_success(self, room: Expected) -> None:
        rank = int(room.reader.partition("-")[2])
        tp = self.decode.coord(rank).tp
        heads = head_range(self.shape.num_kv_heads, self.decode.tp, tp)
        wanted = {
            (layer, page, head - heads.lo): (room.room, position, layer, head)
            for layer in range(self.shape.num_layers)
            for position, page in enumerate(room.pages, room.prefix_pages)
            for head in range(heads.lo, heads.hi)
        }
        if room.written != wanted:
            raise Broken(f"room {room.room} succeeds with {len(room.written)} of {len(wanted)} cells in place")
        if room.aux_written != (room.aux_index >= 0):
            raise Broken(f"room {room.room} succeeds with {room.aux_written} aux rows")

    def _released(self, name: str, number: int) -> None:
        if name.startswith("prefill"):
            self.sent_released.add((name, number))
            for write in self.flying:
                if write.writer == name and write.order.room == number:
                    raise Broken(f"{name} releases room {number} while {write.order.key} is in flight")
            return
        room = [room for room in self.rooms.values() if room.reader == name and room.room == number][-1]
        if room.released:
            raise Broken(f"{name} releases room {number} twice")
        room.released = True
        for write in self.flying:
            if self._target(write) is room:
                raise Broken(f"{name} releases room {number} while {write.order.key} is in flight")

    # ---- schedules ----------------------------------------------------------------------------------------------

    def ready(self) -> list[int]:
        """Places in the pool of what may happen now."""
        return [
            place
            for place, item in enumerate(self.pool)
            if item.to not in self.paused and (item.kind == "message" or item.to in self.machines)
        ]

    def settle(self, *, ticks: int = 400, until: Callable[[], bool] | None = None) -> None:
        """Let everything happen in order, with time passing when nothing else can, until all is quiet."""
        until = until or self.over
        for _ in range(ticks):
            while places := self.ready():
                self.happen(self.pool.pop(places[0]))
            if until():
                return
            self.tick(self.timing.resend_ns)
        raise Broken(f"not over after {ticks} ticks: {self.unfinished()}")

    def flush(self) -> None:
        """Let everything happen that can, without time."""
        while places := self.ready():
            self.happen(self.pool.pop(places[0]))

    def stir(
        self, dice: random.Random, steps: int, *, loss: float = 0.0, copies: float = 0.0, delay: float = 0.02
    ) -> None:
        """Let `steps` things happen in random order; messages and tags may be lost or come again."""
        for _ in range(steps):
            places = self.ready()
            if not places or dice.random() < delay:
                self.tick(dice.choice([MS, 100 * MS, self.timing.resend_ns]))
                continue
            place = dice.choice(places)
            item = self.pool[place]
            if item.kind in ("message", "tag"):
                chance = dice.random()
                if chance < loss:
                    self.pool.pop(place)
                    continue
                if chance < loss + copies:
                    self.happen(item)
                    continue
            self.happen(self.pool.pop(place))

    def over(self) -> bool:
        return not self.unfinished()

    def unfinished(self) -> list[str]:
        """What has not come to its end, in words."""
        left = [
            f"{room.reader} room {room.room}: {room.state.label}"
            for room in self.rooms.values()
            if room.reader in self.machines and not (room.state.finished and room.released)
        ]
        left += [
            f"{name} room {number}: {state.label}"
            for (name, number), state in self.sent.items()
            if name in self.machines and not (state.finished and (name, number) in self.sent_released)
        ]
        left += [f"{name} is not idle" for name, machine in self.machines.items() if machine.open_rooms]
        return left

    def check_empty(self) -> None:
        """Nothing of any room is left anywhere, and after a while no tombstone either."""
        for name, machine in self.machines.items():
            if isinstance(machine, DecodeMachine):
                assert not machine.rooms, name
                assert len(machine.book) == 0, name
                assert machine.book.ring.used_bytes == 0, name
                assert machine.book.ring.live == (), name
                assert machine.book.quarantined_bytes == 0, name
                assert not machine.book.gates_somebody, name
                assert not machine.book._by_part, name
                assert not machine.book._by_room, name
            else:
                assert not machine.rooms, name
                assert not machine._legs, name
                assert machine.parked() == [], name
        self.paused.clear()
        elapsed = 0
        while elapsed <= 2 * self.timing.bootstrap_ns:
            self.tick(self.timing.resend_ns)
            self.flush()
            elapsed += self.timing.resend_ns
        for name, machine in self.machines.items():
            assert len(machine._graves) == 0, name
            if isinstance(machine, PrefillMachine):
                assert not machine._ended, name

    def connect(self) -> None:
        """All say hello, without loss."""
        self.flush()

    def owed(self, room: int, reader: int = 0) -> tuple[Share, ...]:
        return shares_to_reader(self.inputs, room, reader)

    @property
    def inputs(self) -> PlanInputs:
        return PlanInputs(self.shape, 1, self.chunk_pages, self.prefill, self.decode)


def _span(offset: int, nbytes: int) -> range:
    return range(offset // UNIT, -(-(offset + nbytes) // UNIT))


def _units(order: ev.Transfer) -> range:
    assert order.grant is not None
    return _span(order.grant.offset, order.grant.end - order.grant.offset)


def _overlap(one: ev.Transfer, other: ev.Transfer) -> bool:
    if one.grant is None or other.grant is None:
        return False
    return one.grant.offset < other.grant.end and other.grant.offset < one.grant.end
