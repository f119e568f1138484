"""Connects the shipped machines by a simulated network and engine, with an oracle that checks every byte.

No step happens by itself: `World.pool` holds every possible next step (deliver a message, begin or complete a write,
report a tag, run a scatter, make an engine's call), and a scheduler picks one. A seed therefore determines the whole
sequence of steps, and an explorer can try all sequences. Messages pass through the real codec.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan import TransferSlice, slices_to_reader
from kvctl_agent.layout.shape import ModelShape, segments
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.tag import Tag
from kvctl_agent.telemetry.hub import Telemetry
from tests.support.protocol.forwards import forwards
from tests.support.protocol.invariants import Broken, ExpectedRoom
from tests.support.protocol.messages import MessageChecks
from tests.support.protocol.oracle import (
    AUX_ROW_BYTES,
    PAGE_SIZE,
    UNIT,
    Instance,
    Oracle,
    Write,
    place_of,
    row_of,
    tag_of,
)

__all__ = ["AUX_ROW_BYTES", "UNIT", "Instance", "World", "Write"]

MS = 1_000_000
SECOND = 1000 * MS

# One page of one head is one unit of the ring: 256 bytes over both layers, K and V.
SHAPE = ModelShape(num_layers=2, num_kv_heads=2, k_dim=32, v_dim=32, dtype_bytes=2)

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


class Item(NamedTuple):
    """Possible next step of a world.

    Attributes:
        kind: kind of the step.
        to: agent at which the step happens.
        by: agent that caused the step.
        what: contents, such as an encoded message, a write or an event.
    """

    kind: Kind
    to: str
    by: str
    what: Any


def staged(who: msg.PeerInfo, share: TransferSlice, layers: int, pages: ev.Pages) -> str:
    return "staged"


def direct(who: msg.PeerInfo, share: TransferSlice, layers: int, pages: ev.Pages) -> str:
    return "slice"


def mixed(who: msg.PeerInfo, share: TransferSlice, layers: int, pages: ev.Pages) -> str:
    """Chooses a path for a part, so that some parts of a room are staged and others are not."""
    return "staged" if (share.layer_lo + layers + int(pages[0])) % 2 else "slice"


def registry(instance: int) -> str:
    """Returns the address of a prefill instance's registry."""
    return f"registry-{instance}"


def telemetry(name: str, role: Literal["prefill", "decode"]) -> Telemetry:
    return Telemetry(name, role)


class World(Oracle):  # type: ignore[misc]
    """A decode instance, one or several prefill instances, the network between them and their engine.

    Args:
        prefill: parallel sizes of the first prefill instance; `cp_mode`, `early_send` and `introduced` apply to it.
        decode: parallel sizes of the decode instance.
        others: further prefill instances, served by the same decode ranks.
        ring: units of `UNIT` bytes in each decode rank's ring.
        chunk_pages: pages of a chunk.
        choose: chooses the path of each part.
        state_slots: items of each state component in each decode rank's pool.
    """

    checksums = False  # whether writers send a checksum with every part

    def __init__(
        self,
        prefill: ParallelConfig | None = None,
        decode: ParallelConfig | None = None,
        *,
        cp_mode: str = "rank0",
        early_send: bool = True,
        introduced: bool = True,
        others: Sequence[Instance] = (),
        ring: int = 8,
        chunk_pages: int = 2,
        timing: Timing = TIMING,
        choose: Callable[..., str] = staged,
        shape: ModelShape = SHAPE,
        make_telemetry: Callable[[str, Literal["prefill", "decode"]], Any] = telemetry,
        num_pages: int = 1 << 20,
        aux_slots: int = 64,
        state_slots: int = 1 << 16,
    ) -> None:
        first = Instance(prefill or ParallelConfig(tp=2), cp_mode, early_send, introduced=introduced)
        super().__init__(shape, decode or ParallelConfig(), (first, *others), chunk_pages)
        self.prefill = first.side
        self.timing = timing
        self.ring = ring
        self.choose = choose
        self.make_telemetry = make_telemetry
        self.num_pages = num_pages
        self.aux_slots = aux_slots
        self.state_slots = state_slots
        self.now_ns = SECOND
        self.pool: list[Item] = []
        self.machines: dict[str, Machine] = {}
        self.paused: set[str] = set()
        self.ended: list[tuple[str, int]] = []  # name and incarnation
        self.lives = 0
        self.recalls: dict[tuple[str, int], int] = {}  # serial of the last recall that has ended, by (agent, room)
        self.messages = MessageChecks(timing)
        self.prompts: dict[tuple[str, int], tuple[int, Sequence[int]]] = {}  # pages and items given to `send`, likewise
        self.counts: Counter[str] = Counter()
        for number in range(len(self.instances)):
            for name in self.names_of(number):
                self._start(name)
        for rank in range(self.decode.size):
            self._start(f"decode-{rank}")
        self.agents = len(self.machines)

    # ---- processes --------------------------------------------------------------------------------------------

    @property
    def prefill_names(self) -> tuple[str, ...]:
        return self.names_of(0)

    def names_of(self, instance: int) -> tuple[str, ...]:
        """Returns the names of the agents of a prefill instance."""
        prefix = f"p{instance}-" if instance else ""
        return tuple(f"{prefix}prefill-{rank}" for rank in range(self.instances[instance].side.size))

    def life(self, name: str) -> int | None:
        machine = self.machines.get(name)
        return machine.local.incarnation if machine is not None else None

    def _start(self, name: str) -> None:
        self.lives += 1
        place = place_of(name)
        instance = self.instances[place.instance]
        side = instance.side if place.role == "prefill" else self.decode
        slots = [self.state_slots if segment.state else self.num_pages for segment in segments(self.shape, PAGE_SIZE)]
        local = LocalInfo(
            name=name,
            role=place.role,
            coord=side.coord(place.rank),
            side=side,
            shape=self.shape,
            page_size=PAGE_SIZE,
            chunk_pages=self.chunk_pages,
            cp_mode=instance.cp_mode,
            incarnation=self.lives,
            transport="simulated",
            metadata=b"",
            pool={
                "num_pages": self.num_pages,
                "aux_slots": self.aux_slots,
                "aux_row_bytes": [AUX_ROW_BYTES],
                "slots": slots,
            },
            host="here",
            pid=self.lives,
            ring_base=1 << 20,
            ring_bytes=self.ring * UNIT if place.role == "decode" else 0,
        )
        self.machines[name] = self._machine(local)
        self.ring_bytes[name] = {}
        if place.role == "decode":
            for number, known in enumerate(self.instances):
                if known.answers and known.introduced:
                    self.feed(name, ev.RosterKnown(registry(number), self.names_of(number)))

    def _machine(self, local: LocalInfo) -> Any:
        """Creates the machine of a starting rank; subclasses replace it."""
        told = self.make_telemetry(local.name, "prefill" if local.role == "prefill" else "decode")
        if local.role == "prefill":
            early_send = self.instances[place_of(local.name).instance].early_send
            return PrefillMachine(local, self.timing, told, self.choose, direct, early_send, self.checksums)
        return DecodeMachine(local, self.timing, told)

    def p(self, rank: int = 0, instance: int = 0) -> PrefillMachine:
        machine = self.machines[self.names_of(instance)[rank]]
        assert isinstance(machine, PrefillMachine)
        return machine

    def d(self, rank: int = 0) -> DecodeMachine:
        machine = self.machines[f"decode-{rank}"]
        assert isinstance(machine, DecodeMachine)
        return machine

    def kill(self, name: str, *, proven: bool = True) -> None:
        """Ends a process and drops its writes in flight; its peers notice at once if `proven`, otherwise in `prove`."""
        life = self.machines.pop(name).local.incarnation
        self.ended.append((name, life))
        self.forget(name)
        own = ("begin", "complete", "event", "scatter", "engine")
        self.pool = [
            item
            for item in self.pool
            if not (item.to == name and item.kind in own) and not (item.kind in own and item.by == name)
        ]
        for other in list(self.machines):
            if proven:
                self.feed(other, ev.PeerDead(name, life, "process has ended"))

    def prove(self) -> None:
        """Lets every agent notice which processes have ended, as its check twice a second does."""
        for name, life in self.ended:
            for other in list(self.machines):
                self.feed(other, ev.PeerDead(name, life, "process has ended"))

    def restart(self, name: str, *, proven: bool = True) -> None:
        if name in self.machines:
            self.kill(name, proven=proven)
        self._start(name)

    # ---- calls of the engines -----------------------------------------------------------------------------------

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
        instance: int = 0,
        states: Sequence[int] = (),
        prefill_only: bool = False,
        refusal: str = "",
    ) -> ExpectedRoom:
        """Lets the decode engine open a room of `pages` pages, and returns the oracle's expectation of it.

        Args:
            prefix: number of these pages that are cached.
            extra: number of surplus pages that the engine passes by mistake.
            states: number of items of each state component.
            refusal: why the engine ends the room, which then has no pages.
        """
        name = f"decode-{reader}"
        nonce = nonce if nonce is not None else 1000 + len(self.rooms)
        first = first_page if first_page is not None else 100 * (1 + len(self.rooms))
        indices = list(range(first, first + pages - prefix + extra))
        items = tuple(np.arange(first + 7, first + 7 + count, dtype=np.int32) for count in states)
        event = ev.OpenRoom(
            room,
            nonce,
            np.array(indices, np.int32),
            prefix,
            pages,
            aux,
            registry(instance),
            items,
            prefill_only or bool(refusal),
            refusal=refusal,
        )
        self.feed(name, event)
        return self.rooms[name, room, nonce]

    def send(
        self,
        room: int,
        pages: int,
        *,
        ranks: Iterable[int] | None = None,
        split: Sequence[int] = (),
        aux: int = 1,
        instance: int = 0,
        groups: Sequence[int] = (),
        declare: bool = True,
        told: int = 0,
        states: Sequence[int] = (),
        together: bool = False,
        dice: random.Random | None = None,
    ) -> None:
        """Adds the calls of the prefill engines for a room to the pool, where the scheduler picks them one by one.

        Args:
            split: pages of each forward but the last.
            states: number of items of each state component.
            declare, told, groups, together, dice: see `forwards`.
        """
        for rank in self.prefill_ranks(room, instance) if ranks is None else ranks:
            name = self.names_of(instance)[rank]
            base = 10_000 * (1 + max((page // 10_000 for _, page in self.source), default=0))
            self.sent.setdefault((name, room), RoomState.BOOTSTRAPPING)
            self.prompts[name, room] = pages, states
            for position in range(pages):
                self.source[name, base + position] = (room, position)
            finish = ev.Finish(room, aux, self.now_ns, self.compute_states(name, room, states))
            sends = [*split, pages - sum(split)]
            layers = self.machines[name].local.layers
            options = {"declare": declare, "told": told, "together": together, "dice": dice}
            calls = forwards(room, layers, base, sends, groups, finish=finish, **options)
            self.pool.append(Item("engine", name, name, calls))

    def recall(
        self, room: int, rank: int = 0, instance: int = 0, *, serial: int = 1, **options: Any
    ) -> tuple[ev.Event, ...]:
        """Lets one prefill engine take a room's pages back, and forget the calls that it was going to make.

        Returns its further calls, by which it computes the room in other pages; `options` are as for `send`.
        """
        name = self.names_of(instance)[rank]
        pages, states = self.prompts[name, room]
        self.pool = [
            item for item in self.pool if not (item.kind == "engine" and item.to == name and item.what[0].room == room)
        ]
        self.feed(name, ev.Recall(room, serial))
        self.send(room, pages, ranks=[rank], instance=instance, states=states, **options)
        return tuple(self.pool.pop().what[1:])

    def compute_states(self, name: str, room: int, counts: Sequence[int]) -> tuple[ev.Pages, ...]:
        """Allocates the items that hold a room's state on a prefill rank, and returns them by component."""
        components = [segment.index for segment in segments(self.shape, PAGE_SIZE) if segment.state]
        base = 500 * (1 + max((item for *_, item in self.items), default=0) // 500)
        found = tuple(np.arange(base, base + count, dtype=np.int32)[::-1].copy() for count in counts)
        for segment, numbers in zip(components, found, strict=False):
            for position, item in enumerate(numbers.tolist()):
                self.items[name, segment, item] = (room, position)
        return found

    def prefill_ranks(self, room: int, instance: int = 0) -> list[int]:
        """Returns the ranks of the dp group that computes a room."""
        side = self.instances[instance].side
        return [rank for rank in range(side.size) if side.coord(rank).dp == room % side.dp]

    # ---- steps --------------------------------------------------------------------------------------------------

    def feed(self, name: str, event: ev.Event) -> None:
        machine = self.machines.get(name)
        if machine is None:
            return
        self.called(name, event)
        if isinstance(event, ev.Received):
            self.messages.received(name, event, self.now_ns)
        for action in machine.handle(event, self.now_ns):
            self._act(name, action)

    def tick(self, elapsed_ns: int) -> None:
        self.now_ns += elapsed_ns
        for name in list(self.machines):
            if name not in self.paused:
                self.feed(name, ev.Tick())

    def happen(self, item: Item) -> None:
        """Executes one item, which the caller has removed from the pool."""
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
            if isinstance(call, ev.SendRoom) and call.prefix_tokens is None:
                prefix = self.machines[item.to].opened_prefix(call.room)
                if prefix is not None:  # The agent tells the engine at once; the machine learns of it later.
                    told = msgspec.structs.replace(call, prefix_tokens=prefix)
                    self.pool.append(item._replace(what=(told, *rest)))
                    return
            if rest:
                self.pool.append(item._replace(what=tuple(rest)))
            self.feed(item.to, call)

    def _act(self, name: str, action: ev.Action) -> None:
        if isinstance(action, ev.Send):
            self.counts[type(action.message).__name__] += 1
            self.messages.sent(self.machines[name], action, self)
            frame = codec.encode(self.machines[name].local.incarnation, [action.message])
            self.pool.append(Item("message", action.peer, name, frame))
        elif isinstance(action, ev.ConnectPeer):
            self.pool.append(Item("event", name, name, ev.PeerConnected(action.peer)))
        elif isinstance(action, ev.FindInstance):
            number = int(action.instance.rpartition("-")[2])
            if self.instances[number].answers:
                found = ev.RosterKnown(action.instance, self.names_of(number))
                self.pool.append(Item("event", name, name, found))
        elif isinstance(action, ev.Transfer):
            self.ordered(name, action)
            self.messages.ordered(name, action, self.now_ns)
            write = Write(name, self.machines[name].local.incarnation, action)
            self.pool.append(Item("begin", name, name, write))
        elif isinstance(action, ev.StoreAux):
            self.row_stored(name, action)
        elif isinstance(action, ev.Scatter):
            self.pool.append(Item("scatter", name, name, action))
        elif isinstance(action, ev.StateChanged):
            self.changed(name, action)
            if action.state is RoomState.SUCCESS and place_of(name).role == "decode":
                self.messages.succeeded(name, self._latest(name, action.room))
        elif isinstance(action, ev.Released):
            self.released(name, action.room)
        elif isinstance(action, ev.Recalled):
            self.recalled(name, action.room)
            self.recalls[name, action.room] = action.serial

    def queued(self) -> list[Write]:
        """Returns the writes that are ordered and have not begun, except those that are cancelled."""
        orders = [item.what for item in self.pool if item.kind == "begin"]
        return [write for write in orders if not write.order.cancel.dropped]

    # ---- the transfer engine --------------------------------------------------------------------------------------

    def _over(self, write: Write, *, dropped: bool) -> None:
        order = write.order
        moments = {"ready": order.ready_ns, "queue": order.opened_ns, "wire": self.now_ns}
        checksum = None if dropped else Tag.unpack(order.tag).checksum
        row = None if dropped else row_of(order)
        done = ev.PartSent(order.peer, order.room, order.nonce, order.kind, order.key, moments, dropped, checksum, row)
        self.pool.append(Item("event", write.writer, write.writer, done))

    def _begin(self, write: Write) -> None:
        if write.order.cancel.dropped:
            self.undone(write)
            self._over(write, dropped=True)
            return
        self.begun(write)
        self.pool.append(Item("complete", write.writer, write.writer, write))

    def _complete(self, write: Write) -> None:
        seen = self.landed(write)
        self._over(write, dropped=False)
        if seen:
            self._tell(write, tag_of(write.order))

    def _tell(self, write: Write, tag: bytes) -> None:
        self.pool.append(Item("tag", write.order.peer, write.writer, tag))

    def _scatter(self, name: str, action: ev.Scatter) -> None:
        self.scattered(name, action)
        self.feed(name, ev.Scattered(action.serial, self.now_ns))

    # ---- schedules ----------------------------------------------------------------------------------------------

    def ready(self) -> Sequence[int]:
        """Returns the indices of the items in the pool that may happen now."""
        if not self.paused and len(self.machines) == self.agents:
            return range(len(self.pool))
        return [place for place, item in enumerate(self.pool) if self._may_happen(item)]

    def _may_happen(self, item: Item) -> bool:
        return item.to not in self.paused and (item.kind == "message" or item.to in self.machines)

    def _next(self) -> bool:
        """Executes the first item that can happen; returns False if none can."""
        place = next((place for place, item in enumerate(self.pool) if self._may_happen(item)), None)
        if place is not None:
            self.happen(self.pool.pop(place))
        return place is not None

    def settle(self, *, ticks: int = 400, until: Callable[[], bool] | None = None) -> None:
        """Executes all items in order, and lets time pass when no item can happen, until a condition holds.

        Args:
            ticks: how often time may pass.
            until: the condition; by default that all rooms have ended and all agents are idle.

        Raises:
            Broken: the condition does not hold after all ticks.
        """
        until = until or self.over
        for _ in range(ticks):
            while self._next():
                pass
            if until():
                return
            self.tick(self.timing.resend_ns)
        raise Broken(f"not over after {ticks} ticks: {self.unfinished()}")

    def flush(self) -> None:
        """Executes all items that can happen without letting time pass."""
        while self._next():
            pass

    def stir(
        self, dice: random.Random, steps: int, *, loss: float = 0.0, copies: float = 0.0, delay: float = 0.02
    ) -> None:
        """Executes about `steps` items in random order.

        Args:
            loss: probability that a message or tag is lost.
            copies: probability that a message or tag is delivered and stays in the pool to be delivered again.
            delay: probability that time passes instead of a step.
        """
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
        """Describes every room that has not ended, and every agent that is not idle."""
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
        """Checks that no agent holds anything of any room, and after some time no tombstone either."""
        for name, machine in self.machines.items():
            if isinstance(machine, DecodeMachine):
                assert not machine.rooms, name
                assert len(machine.state.grant_table) == 0, name
                assert machine.state.grant_table.ring.used_bytes == 0, name
                assert machine.state.grant_table.ring.live == (), name
                assert machine.state.grant_table.quarantined_bytes == 0, name
                assert not machine.state.grant_table.gates_any_peer, name
                assert not machine.state.grant_table._by_part, name
                assert not machine.state.grant_table._by_room, name
            else:
                assert not machine.rooms, name
                assert not machine.state.transfers, name
                assert machine.parked() == [], name
        self.paused.clear()
        for _ in range(5):  # long enough for peers to lose each other
            self.tick(self.timing.bootstrap_ns // 2)
            self.flush()
        for name, machine in self.machines.items():
            assert len(machine.state.tombstones) == 0, name
            if isinstance(machine, PrefillMachine):
                assert not machine.state.ended, name

    def connect(self) -> None:
        """Delivers all introductions between agents, without loss."""
        self.flush()

    def owed(self, room: int, reader: int = 0) -> tuple[TransferSlice, ...]:
        return slices_to_reader(self.inputs, room, reader)
