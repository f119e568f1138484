"""What the ranks of a simulated world tell each other: acceptances, grants, watermarks, revocations, drained rooms.

The expected state is computed from the messages and the calls of the engines. Of a machine only the number of its live
grants and the oldest of them are read, to see whether a grant is of an empty ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.states import RoomState
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.peer import Timing
from kvctl_agent.protocol.ring import Position, may_write
from kvctl_agent.protocol.tag import Tag
from tests.support.protocol.invariants import Broken, ExpectedRoom

if TYPE_CHECKING:
    from tests.support.protocol.simulation import World

_Process = tuple[str, int]  # name and incarnation of an agent
_Room = tuple[str, int, int]  # decode rank, room, nonce


class _Ring:
    """The ring of one decode process, as its messages describe it."""

    def __init__(self) -> None:
        self.grants: dict[int, tuple[str, int, int, msg.Grant]] = {}  # by serial; with writer, room and nonce
        self.revoked: set[int] = set()  # serials that their writers have given back
        self.watermark = Position(0, 0)
        self.sequence = 0


class MessageChecks:
    """Checks messages when they are sent; every method raises `Broken` for one that must not be sent."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._rings: dict[_Process, _Ring] = {}
        self._opened: dict[_Room, set[str]] = {}  # ranks at which a decode rank has opened a room
        self._accepted: dict[_Room, set[str]] = {}
        self._heard_ns: dict[tuple[str, _Process], int] = {}  # by agent and sender

    def received(self, name: str, event: ev.Received, now_ns: int) -> None:
        self._heard_ns[name, (event.peer, event.incarnation)] = now_ns
        if isinstance(event.message, msg.RoomAccepted):
            room = name, event.message.room, event.message.nonce
            self._accepted.setdefault(room, set()).add(event.peer)

    def sent(self, machine: Any, action: ev.Send, world: World) -> None:
        """Checks a message against the open rooms and the writes of a world."""
        name, message = machine.local.name, action.message
        match message:
            case msg.RoomOpen():
                self._opened.setdefault((name, message.room, message.nonce), set()).add(action.peer)
            case msg.StagingGrants():
                self._grant(machine, action.peer, message, world.rooms.get((name, message.room, message.nonce)))
            case msg.Watermark():
                self._move_watermark(machine, (message.round, message.tail, message.sequence))
            case msg.Heartbeat() if isinstance(machine, DecodeMachine):
                self._move_watermark(machine, message.watermark)
            case msg.RoomDrained():
                self._check_not_written(name, action.peer, message, world)
            case msg.StagingRevoked():
                self._check_not_written(name, action.peer, message, world)
                writer = name, message.room, message.nonce
                for (reader, _), ring in self._rings.items():
                    if reader == action.peer and ring.grants.get(message.serial, ())[:3] == writer:
                        ring.revoked.add(message.serial)

    @staticmethod
    def _check_not_written(name: str, reader: str, message: msg.RoomDrained | msg.StagingRevoked, world: World) -> None:
        """Checks that no write goes to the room, or the region, that a writer will not write any more."""
        serial = message.serial if isinstance(message, msg.StagingRevoked) else None
        writes = [(write, "in flight") for write in world.flying] + [(write, "queued") for write in world.queued()]
        for (writer, _, order), state in writes:
            mine = writer == name and (order.peer, order.room, order.nonce) == (reader, message.room, message.nonce)
            if mine and (serial is None or (order.grant is not None and order.grant.serial == serial)):
                what = "drained" if serial is None else f"serial {serial} as revoked"
                raise Broken(f"{name} reports room {message.room} {what} while {order.key} is {state}")

    def ordered(self, name: str, order: ev.Transfer, now_ns: int) -> None:
        """Checks that a part goes to a peer that was heard lately, and into a region that its writer may write."""
        reader = order.peer, Tag.unpack(order.tag).incarnation
        part = f"{name} orders {order.key} of room {order.room} to {order.peer}"
        if now_ns - self._heard_ns.get((name, reader), -1 << 62) > self._timing.lease_ns:
            raise Broken(f"{part}, which it has not heard of lately")
        grant = order.grant
        if (order.path == STAGED) != (grant is not None):
            raise Broken(f"{part} on path {order.path} {'without' if grant is None else 'with'} a grant")
        if grant is None:
            return
        ring = self._rings.get(reader, _Ring())
        if ring.grants.get(grant.serial) != (name, order.room, order.nonce, grant):
            raise Broken(f"{part} into serial {grant.serial}, which was not granted to it")
        if grant.serial in ring.revoked:
            raise Broken(f"{part} into serial {grant.serial}, which it has given back")
        if not may_write(grant.round, grant.end, ring.watermark):
            raise Broken(f"{part} into {grant}, which the watermark {ring.watermark} has not passed")

    def succeeded(self, name: str, room: ExpectedRoom) -> None:
        """Checks that every rank at which a room was opened, and that writes to it, has accepted it."""
        key = name, room.room, room.nonce
        if silent := self._opened.get(key, set()) - self._accepted.get(key, set()):
            raise Broken(f"room {room.room} succeeds at {name}, and {min(silent)} has not accepted it")

    def _grant(
        self, machine: DecodeMachine, writer: str, message: msg.StagingGrants, room: ExpectedRoom | None
    ) -> None:
        """Checks grants that are sent, or sent again, to one writer of a room."""
        if room is None or room.released or room.state is RoomState.FAILED:
            raise Broken(f"{machine.local.name} grants regions to {writer} for room {message.room}, which is not open")
        ring = self._ring(machine)
        name, size, latest = machine.local.name, machine.local.ring_bytes, max(ring.grants, default=0)
        for grant in message.grants:
            mine = writer, message.room, message.nonce, grant
            known = ring.grants.setdefault(grant.serial, mine)
            if known != mine:
                raise Broken(f"{name} grants serial {grant.serial} again, to {mine} after {known}")
            if known is mine and grant.serial < latest:
                raise Broken(f"{name} grants serial {grant.serial} after serial {latest}")
            if not 0 <= grant.offset < grant.end <= size:
                raise Broken(f"{name} grants {grant}, which exceeds the ring of {size} bytes")
        self._move_watermark(machine, message.watermark)
        oldest = machine.ring.oldest
        alone = len(machine.allocations()) == len(message.grants) and oldest is not None
        first = min(message.grants, key=lambda grant: grant.serial)
        if alone and first.serial == oldest.serial and not may_write(first.round, first.end, ring.watermark):
            raise Broken(f"{name} grants {first} of an empty ring, and {writer} has to wait for a watermark")

    def _move_watermark(self, machine: DecodeMachine, watermark: Iterable[int]) -> None:
        ring, (round_, tail, sequence) = self._ring(machine), watermark
        if sequence < ring.sequence or (round_, tail) < ring.watermark:
            raise Broken(f"{machine.local.name} moves its watermark back, from {ring.watermark} to {(round_, tail)}")
        ring.watermark, ring.sequence = Position(round_, tail), sequence

    def _ring(self, machine: DecodeMachine) -> _Ring:
        return self._rings.setdefault((machine.local.name, machine.local.incarnation), _Ring())
