"""Walks all histories of a small world: every order of everything, with a few losses, copies and aborts.

Time passes only when nothing else can happen, and then far enough for every resend and revoke to be due; so a state
holds no clock, and histories that come to the same state are walked once. Safety is the oracle's; for liveness, every
state must have a way to one in which all rooms have ended and nothing is left.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from simulation import Broken, Item, Machine, World, direct

from kvctl_agent.layout.inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape, Segment
from kvctl_agent.layout.share import Share
from kvctl_agent.layout.side import Side
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.local import Local, Timing
from kvctl_agent.protocol.prefill import PrefillMachine

SECOND = 1_000_000_000
# Heartbeats, resends and revokes are due at each tick; no peer is ever suspect.
TIMING = Timing(
    heartbeat_ns=SECOND,
    suspect_ns=1 << 60,
    lost_ns=1 << 61,
    resend_ns=SECOND,
    bootstrap_ns=1 << 60,
    waiting_ns=1 << 60,
    revoke_ns=SECOND,
)


class Record:
    """What the machines ask of a room's record."""

    def __init__(self, nonce: int) -> None:
        self.nonce = nonce
        self.planned = self.sent = self.landed = self.scattered = self.parked = self.pages = 0
        self.peers: list[str] = []
        self.forward_begun_at: int | None = None
        self.forward_done_at: int | None = None

    def _nothing(self, *args: object, **kwargs: object) -> None:
        pass

    state = event = finish = fail = _nothing


class Silent:
    """Telemetry that keeps nothing, so that a state is only what the protocol knows."""

    def __init__(self) -> None:
        self.metrics = self.recorder = self.rooms = self.clock = self

    def open(self, room: int, nonce: int) -> Record:
        return Record(nonce)

    def wall_ns(self, moment_ns: int) -> int:
        return 0

    def _nothing(self, *args: object, **kwargs: object) -> None:
        pass

    add = record = part = finish = _nothing

    def __reduce__(self) -> tuple[Callable[[], Silent], tuple[()]]:
        return _silent, ()


_SILENT = Silent()


def _silent() -> Silent:
    return _SILENT


class _Snapshot:
    """The tables of handlers are made anew when a state is read."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_events", "_messages")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        vars(self)["_events"] = _Handlers(self)
        vars(self)["_messages"] = _Handlers(self)


class _Handlers:
    """The same table, looked up by name."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def __getitem__(self, kind: type) -> Callable[..., None]:
        handler: Callable[..., None] = getattr(self._machine, _NAMES[kind])
        return handler

    def get(self, kind: type) -> Callable[..., None] | None:
        return getattr(self._machine, _NAMES[kind], None)


def _snake(name: str) -> str:
    return "on_" + "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


_NAMES = {kind: _snake(kind.__name__) for kind in (*ev.Event.__subclasses__(), *msg.Message.__subclasses__())}


class SnapshotPrefill(_Snapshot, PrefillMachine):
    pass


class SnapshotDecode(_Snapshot, DecodeMachine):
    pass


_shared: list[object] = []
_places: dict[object, int] = {}


def _share(value: Any) -> tuple[Callable[[int], object], tuple[int]]:
    """Values that nobody changes are kept once for all states."""
    if isinstance(value, np.ndarray):
        key: object = value.tobytes(), value.dtype.str
    else:
        key = id(value)
    place = _places.get(key)
    if place is None:
        place = _places[key] = len(_shared)
        _shared.append(value)
    return _shared_at, (place,)


def _shared_at(place: int) -> object:
    return _shared[place]


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | dict.fromkeys(
        (np.ndarray, Share, Side, ModelShape, Segment, PlanInputs, Local, Timing, msg.Introduction, msg.RoomOpen),
        _share,
    )


def freeze(world: SmallWorld) -> bytes:
    file = io.BytesIO()
    _Pickler(file, -1).dump(world)
    return file.getvalue()


class Budget(NamedTuple):
    """How much may still go wrong.

    Messages of one agent to another come in order, and so do the tags of its writes, but for so many overtakings.
    """

    ticks: int
    losses: int = 0
    copies: int = 0
    overtakings: int = 0
    aborts: tuple[tuple[str, int], ...] = ()  # (agent, room)
    restarts: tuple[str, ...] = ()


class SmallWorld(World):  # type: ignore[misc]
    """A world whose state can be kept and compared."""

    def __init__(self, **options: Any) -> None:
        super().__init__(timing=TIMING, make_telemetry=lambda name, role: _SILENT, **options)
        del self.make_telemetry

    def _machine(self, local: Local) -> Machine:
        if local.role == "prefill":
            return SnapshotPrefill(local, self.timing, _SILENT, self.choose, direct)  # type: ignore[arg-type]
        return SnapshotDecode(local, self.timing, _SILENT)  # type: ignore[arg-type]

    def _act(self, name: str, action: ev.Action) -> None:
        # A heartbeat's times are of no consequence, and one without a watermark is nothing but times.
        if isinstance(action, ev.Send) and isinstance(action.message, msg.Heartbeat):
            if not action.message.watermark:
                return
            action = ev.Send(action.peer, msg.Heartbeat(1, 0, 0, action.message.watermark))
        super()._act(name, action)
        # The same message twice on the wire is one message that may be copied: it would only multiply states.
        if isinstance(action, ev.Send) and self.pool[-1] in self.pool[:-1]:
            self.pool.pop()

    def happen(self, item: Item) -> None:
        """As ever, but an engine makes all its calls at once: what lies between them is not under test here."""
        super().happen(item)
        while item.kind == "engine" and len(item.what) > 1:
            item = self.pool.pop()
            super().happen(item)

    def fingerprint(self) -> int:
        """All that the future depends on."""
        parts: list[object] = [_machine_state(machine) for machine in self.machines.values()]
        parts.append(frozenset(Counter(_item_state(item) for item in self.pool).items()))
        parts.append(
            tuple((room.state, room.released, room.aux_written, len(room.written)) for room in self.rooms.values())
        )
        parts.append(tuple(sorted(self.sent.items())))
        parts.append(frozenset(self.sent_released))
        parts.append(frozenset((write.writer, write.order.tag) for write in self.flying))
        parts.append(
            tuple(
                (name, unit, entry[0], entry[2].order.tag if entry[2] else b"")
                for name, held in self.ring_bytes.items()
                for unit, entry in sorted(held.items())
            )
        )
        return hash(tuple(parts))


def _item_state(item: Item) -> object:
    if item.kind in ("begin", "complete"):
        order = item.what.order
        return item.kind, item.by, order.tag, order.fence.raised, order.grant
    if item.kind == "scatter":
        return item.kind, item.to, item.what.serial
    if item.kind == "engine":
        return item.kind, item.to, len(item.what), item.what[0].room
    if item.kind == "event":
        event = item.what
        if isinstance(event, ev.PeerConnected):
            return item.kind, item.to, event.peer
        return item.kind, item.to, type(event), event.room, event.nonce, event.kind, event.key, event.dropped
    return item.kind, item.to, item.by, item.what


def _machine_state(machine: Machine) -> object:
    graves = frozenset(machine._graves._graves)
    if isinstance(machine, DecodeMachine):
        ring = machine.book.ring
        return (
            machine.local.incarnation,
            ring._head,
            ring._round,
            ring._serial,
            ring.sequence,
            tuple((held.region, held.room, held.key, held.state) for held in machine.book.holdings()),
            frozenset((peer, serial) for peer, gated in machine.book._gated.items() for serial in gated),
            tuple(
                (
                    room.room,
                    room.nonce,
                    room.state,
                    room.released,
                    frozenset(room.finals),
                    tuple(sorted(room.landed.items())),
                    tuple(sorted(room.scattered.items())),
                    tuple((leg.peer, leg.accepted, leg.acked, leg.drained) for leg in room.legs.values()),
                )
                for room in machine.rooms.values()
            ),
            graves,
            tuple((peer.name, peer.state, peer.incarnation) for peer in machine.peers.values()),
        )
    return (
        machine.local.incarnation,
        tuple(
            (
                room.room,
                room.state,
                room.claimed,
                room.prefetched,
                tuple(room.ledger._spans),
                room.ledger.total,
                room.finished,
                room.released,
                tuple(_leg_state(leg) for leg in room.legs.values()),
            )
            for room in machine.rooms.values()
        ),
        tuple((number, ended.state, ended.claimed) for number, ended in machine._ended.items()),
        frozenset(key for parked in machine._parked.values() for key in parked),
        graves,
        tuple((p.name, p.state, p.incarnation, p.gate.position, p.gate.sequence) for p in machine.peers.values()),
    )


def _leg_state(leg: Any) -> object:
    return (
        leg.nonce,
        leg.in_flight,
        leg.to_queue,
        leg.to_send,
        tuple(final.state for final in leg.finals.values()),
        leg.done,
        leg.abort_asked,
        leg.failed_acked,
        leg.drained_said,
        leg.resend_ns > 0,
        tuple((p.key, p.state, p.grant, p.requested, p.revoked, p.path, p.confirmed) for p in leg.parts.values()),
    )


Step = tuple[Literal["do", "lose", "copy", "abort", "restart", "tick"], int]


def steps(world: SmallWorld, budget: Budget) -> Iterator[tuple[Step, Budget]]:
    """Everything that can happen next, and what is left of the budget then."""
    ready = world.ready()
    waiting: set[tuple[str, str, str]] = set()
    for place in ready:
        item = world.pool[place]
        queue = item.kind, item.to, item.by
        if queue in waiting and item.kind in ("message", "tag", "begin", "event"):
            if budget.overtakings and item.kind != "event":
                yield ("do", place), budget._replace(overtakings=budget.overtakings - 1)
            continue
        waiting.add(queue)
        yield ("do", place), budget
        if world.pool[place].kind in ("message", "tag"):
            if budget.losses:
                yield ("lose", place), budget._replace(losses=budget.losses - 1)
            if budget.copies:
                yield ("copy", place), budget._replace(copies=budget.copies - 1)
    for place in range(len(budget.aborts)):
        yield ("abort", place), budget._replace(aborts=budget.aborts[:place] + budget.aborts[place + 1 :])
    for place in range(len(budget.restarts)):
        yield ("restart", place), budget._replace(restarts=budget.restarts[:place] + budget.restarts[place + 1 :])
    if not ready and budget.ticks and not world.over():
        yield ("tick", 0), budget._replace(ticks=budget.ticks - 1)


def perform(world: SmallWorld, step: Step, budget: Budget) -> None:
    what, place = step
    if what == "do":
        world.happen(world.pool.pop(place))
    elif what == "lose":
        world.pool.pop(place)
    elif what == "copy":
        world.happen(world.pool[place])
    elif what == "abort":
        agent, room = budget.aborts[place]
        world.feed(agent, ev.AbortRoom(room, "enough"))
    elif what == "restart":
        world.restart(budget.restarts[place])
    else:
        world.tick(SECOND + 1)


class Explored(NamedTuple):
    states: int
    ended: int  # states in which all is over
    deepest: int


def explore(world: SmallWorld, budget: Budget, limit: int) -> Explored:
    """Walk every history from here.

    Raises:
        Broken: the oracle's complaint, or a state from which the rooms cannot all end, with the way to it.
        AssertionError: more than `limit` states.
    """
    first = (world.fingerprint(), budget)
    towards: dict[object, set[object]] = {first: set()}  # state → states that lead to it
    way: dict[object, tuple[object, str]] = {}
    good: list[object] = []
    stack = [(first, freeze(world), budget, 0)]
    deepest = 0
    while stack:
        state, frozen, left, depth = stack.pop()
        deepest = max(deepest, depth)
        here: SmallWorld = pickle.loads(frozen)
        options = list(steps(here, left))
        if here.over():
            _check_left(here)
            good.append(state)
        elif not options:
            good.append(state)  # out of ticks: time alone must bring it to an end
            _finish(here, way, state)
        for number, (step, rest) in enumerate(options):
            there = here if number == len(options) - 1 else pickle.loads(frozen)
            name = _describe(there, step)
            try:
                perform(there, step, left)
            except Exception as error:
                raise Broken(f"{error}; after: {_path(way, state)} > {name}") from error
            after = (there.fingerprint(), rest)
            known = towards.get(after)
            if known is not None:
                known.add(state)
                continue
            towards[after] = {state}
            way[after] = (state, name)
            assert len(towards) <= limit, f"more than {limit} states"
            stack.append((after, freeze(there), rest, depth + 1))
    live = set(good)
    frontier = list(good)
    while frontier:
        for before in towards[frontier.pop()]:
            if before not in live:
                live.add(before)
                frontier.append(before)
    for seen in towards:
        if seen not in live:
            raise Broken(f"the rooms cannot end after: {_path(way, seen)}")
    return Explored(len(towards), len(good), deepest)


def _finish(world: SmallWorld, way: dict[object, tuple[object, str]], state: object) -> None:
    try:
        world.settle(ticks=30)
        _check_left(world)
    except Exception as error:
        raise Broken(f"{error}; after: {_path(way, state)}") from error


def _check_left(world: SmallWorld) -> None:
    for machine in world.machines.values():
        if isinstance(machine, DecodeMachine):
            assert machine.book.ring.used_bytes == 0
            assert not machine.book.gates_somebody
        else:
            assert not machine.parked()


def _describe(world: SmallWorld, step: Step) -> str:
    what, place = step
    if what not in ("do", "lose", "copy"):
        return f"{what} {place}"
    item = world.pool[place]
    detail = type(codec.decode(item.what)[1][0]).__name__ if item.kind == "message" else item.kind
    return f"{what} {item.by}→{item.to} {detail}"


def _path(way: dict[object, tuple[object, str]], state: object) -> str:
    names: list[str] = []
    while state in way:
        state, name = way[state]
        names.append(name)
    return " > ".join(reversed(names))
