"""The shipped machines as functions (state, event) → (state, output), each computed once.

A state is a number. Its machine is stored frozen and is thawed when it receives an event for the first time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import LocalInfo, Peer
from kvctl_agent.protocol.tag import Tag
from tests.explore.explorer.canonical import Walk
from tests.explore.explorer.frozen import (
    AGES,
    LAPSED,
    NOW_NS,
    TIMING,
    FrozenDecode,
    FrozenPrefill,
    Machine,
    freeze,
    thaw,
)
from tests.support.protocol.invariants import Broken
from tests.support.protocol.oracle import Write, place_of


class Age(NamedTuple):
    """Input: some peers have been silent for a given age; time then passes, or does not (a paused agent)."""

    ages: tuple[tuple[str, int], ...]
    tick: bool


class Lapse(NamedTuple):
    """Input: a room of a prefill rank has waited to be opened, or to be claimed, for longer than it may."""

    room: int


class Knows(NamedTuple):
    """Properties of a machine's state that the space reads.

    Attributes:
        idle: holds nothing of any room.
        serials: of the ring's live allocations, in order.
        peers: by name: incarnation, whether messages may be sent to it, and the age of the silence (an index into
        AGES).
        held: rooms of a prefill rank that wait to be opened although they are computed, or to be claimed.
        unleased: (peer, incarnation) to which the machine's workers must not post, as its leases say.
        unheard: (peer, incarnation) that was not heard for longer than a lease lasts.
    """

    life: int
    idle: bool
    peers: dict[str, tuple[int, bool, int]]
    serials: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    unleased: frozenset[tuple[str, int]] = frozenset()
    unheard: frozenset[tuple[str, int]] = frozenset()


class Done(NamedTuple):
    """Result of a step of a machine.

    Attributes:
        cancelled: peer transfers that this step cancelled: their queued writes are to be dropped.
        seen: inputs of the oracle, in order: numbers of `Machines.seen`.
    """

    state: int
    sends: tuple[tuple[str, bytes, bool], ...] = ()  # peer, frame, whether it is a heartbeat
    events: tuple[ev.Event, ...] = ()  # for itself
    writes: tuple[tuple[int, bool], ...] = ()  # number of the write, whether it is cancelled already
    scatters: tuple[int, ...] = ()
    cancelled: frozenset[tuple[str, int, int]] = frozenset()
    seen: int = 0


Seen = tuple[Any, ...]


class Machines:
    """All states of all machines found so far."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.readers: list[tuple[str, int]] = []  # of the writes: (decode rank, incarnation)
        self.scatters: list[ev.Scatter] = []
        self.knows: list[Knows] = []
        self.seen: list[tuple[Seen, ...]] = []
        self._write_numbers: dict[Hashable, int] = {}
        self._scatter_numbers: dict[Hashable, int] = {}
        self._seen_numbers: dict[Hashable, int] = {}
        self._frozen: list[bytes] = []
        self._numbers: dict[Hashable, int] = {}
        self._done: dict[tuple[int, Hashable], Done | None] = {}
        self._walk = Walk(_name)
        self.see(())

    def number(self, machine: Machine) -> int:
        """Returns the number of a machine's state."""
        key = machine.local.name, machine.local.incarnation, self._walk.of(machine.state)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._frozen)
            self._frozen.append(freeze(machine))
            self.knows.append(_knows(machine))
        return number

    def machine(self, state: int) -> Machine:
        """Returns a new machine in a state; the caller may change it."""
        machine: Machine = thaw(self._frozen[state])
        return machine

    def step(self, state: int, key: Hashable, events: tuple[ev.Event | Age | Lapse, ...]) -> Done | None:
        """Feed the events that `key` identifies; None if the engine may not make this call now.

        Raises:
            Broken: a part was ordered without a lease, or a serial was granted twice.
        """
        place = state, key
        try:
            return self._done[place]
        except KeyError:
            done = self._done[place] = self._compute(state, events)
            return done

    def _compute(self, state: int, events: tuple[ev.Event | Age | Lapse, ...]) -> Done | None:
        machine = self.machine(state)
        name = machine.local.name
        transfers = list(machine.state.transfers.values()) if isinstance(machine, FrozenPrefill) else []
        down = [(transfer, transfer.cancel) for transfer in transfers if not transfer.cancel.dropped]
        granted = (_serials(machine), machine.ring.last_serial) if isinstance(machine, FrozenDecode) else None
        actions: list[ev.Action] = []
        seen: list[Seen] = []
        for event in events:
            if isinstance(event, Age):
                for peer, age in event.ages:
                    machine.peers[peer].heard_ns = NOW_NS - AGES[age]
                if not event.tick:
                    continue
                event = ev.Tick()
            elif isinstance(event, Lapse):
                machine.rooms[event.room].since_ns = NOW_NS - LAPSED
                machine.state.deadlines_due_ns = 0
                event = ev.Tick()
            try:
                found = machine.handle(event, NOW_NS)
            except LocalProtocolError:
                return None
            if isinstance(event, ev.SendRoom | ev.OpenRoom | ev.SendPages | ev.Finish | ev.Recall):
                seen.append(("called", name, event))
            seen += self._told(machine, found)
            actions += found
        if granted is not None and (again := [each for each in _serials(machine) - granted[0] if each <= granted[1]]):
            raise Broken(f"{name} grants serial {again[0]} again")
        # An order's cancel may have been raised after it was given.
        return Done(
            self.number(machine),
            tuple(_send(machine, action) for action in actions if isinstance(action, ev.Send)),
            tuple(ev.PeerConnected(action.peer) for action in actions if isinstance(action, ev.ConnectPeer)),
            tuple(
                (self.order(name, machine.local.incarnation, action), action.cancel.dropped)
                for action in actions
                if isinstance(action, ev.Transfer)
            ),
            tuple(self._scatter(action) for action in actions if isinstance(action, ev.Scatter)),
            frozenset((transfer.peer, transfer.room, transfer.nonce) for transfer, cancel in down if cancel.dropped),
            self.see(tuple(seen)),
        )

    def see(self, seen: tuple[Seen, ...]) -> int:
        """Returns the number of an input of the oracle."""
        key = tuple((*entry[:-1], id(entry[-1])) if isinstance(entry[-1], ev.Event) else entry for entry in seen)
        number = self._seen_numbers.get(key)
        if number is None:
            number = self._seen_numbers[key] = len(self.seen)
            self.seen.append(seen)
        return number

    def _told(self, machine: Machine, actions: list[ev.Action]) -> list[Seen]:
        name = machine.local.name
        told: list[Seen] = []
        for action in actions:
            if isinstance(action, ev.Transfer):
                if _unheard(machine.peers[action.peer]):
                    raise Broken(f"{name} orders {action.key} to {action.peer}, which it has not heard of lately")
                told.append(("ordered", name, self.order(name, machine.local.incarnation, action)))
            elif isinstance(action, ev.StoreAux):
                told.append(("row stored", name, action.slot, action.row))
            elif isinstance(action, ev.StateChanged):
                told.append(("changed", name, action.room, action.state))
            elif isinstance(action, ev.Released):
                told.append(("released", name, action.room))
            elif isinstance(action, ev.Recalled):
                told.append(("recalled", name, action.room))
        return told

    def order(self, name: str, life: int, order: ev.Transfer) -> int:
        """Returns the number of a write that this incarnation of an agent ordered."""
        pages = order.src_pages.tobytes(), order.dst_pages.tobytes()
        key = name, life, order.peer, order.path, order.tag, order.grant, pages, order.aux_row
        number = self._write_numbers.get(key)
        if number is None:
            number = self._write_numbers[key] = len(self.writes)
            self.writes.append(Write(name, life, order))
            self.readers.append((order.peer, Tag.unpack(order.tag).incarnation))
        return number

    def _scatter(self, action: ev.Scatter) -> int:
        key = action.serial, action.offset, action.key, action.room, action.nonce, action.pages.tobytes()
        number = self._scatter_numbers.get(key)
        if number is None:
            number = self._scatter_numbers[key] = len(self.scatters)
            self.scatters.append(action)
        return number


def _serials(machine: Any) -> set[int]:
    return {allocation.region.serial for allocation in machine.allocations()}


def _name(value: object) -> Hashable | None:
    """Names of values that are compared by identity."""
    if isinstance(value, LocalInfo):
        return value.name, value.incarnation
    if isinstance(value, msg.PeerInfo):
        return value.name
    if isinstance(value, ev.Transfer):
        return value.peer, value.tag, value.path, value.grant, value.src_pages.tobytes(), value.aux_row
    return None


def _knows(machine: Machine) -> Knows:
    if isinstance(machine, FrozenDecode):
        table = machine.state.grant_table
        idle = not (machine.rooms or len(table) or table.ring.used_bytes or table.quarantined_bytes)
        idle = idle and not table.gates_any_peer
    else:
        idle = not (machine.open_rooms or machine.rooms or machine.parked())
    peers = {
        peer.name: (peer.incarnation, peer.usable, AGES.index(NOW_NS - peer.heard_ns) if peer.usable else 0)
        for peer in machine.peers.values()
    }
    serials: tuple[int, ...] = ()
    if isinstance(machine, FrozenDecode):
        serials = tuple(allocation.region.serial for allocation in machine.state.grant_table.allocations())
    held: tuple[int, ...] = ()
    if isinstance(machine, FrozenPrefill):
        held = tuple(room.room for room in machine.rooms.values() if room.failure is None and _is_held(room))
    known = [((peer.name, peer.incarnation), peer) for peer in machine.peers.values()]
    unleased = frozenset(key for key, peer in known if not peer.lease.valid(NOW_NS))
    unheard = frozenset(key for key, peer in known if _unheard(peer))
    return Knows(machine.local.incarnation, idle, peers, serials, held, unleased, unheard)


def _unheard(peer: Peer) -> bool:
    return NOW_NS - peer.heard_ns > TIMING.lease_ns


def _is_held(room: Any) -> bool:
    return bool(room.computed.complete and not room.transfers if room.claimed else room.transfers)


def _send(machine: Machine, action: ev.Send) -> tuple[str, bytes, bool]:
    message = action.message
    beats = isinstance(message, msg.Heartbeat)
    if isinstance(message, msg.Heartbeat):  # its times are of no consequence
        message = msg.Heartbeat(1, 0, 0, message.watermark)
    return action.peer, codec.encode(machine.local.incarnation, [message]), beats


def role_of(name: str) -> str:
    return place_of(name).role


def arrived(tag: bytes) -> ev.Arrived:
    return ev.Arrived(Tag.unpack(tag), NOW_NS)
